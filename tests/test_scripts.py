"""The scripts as a person runs them: launching, failing, and saying what is missing."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parent.parent

# Ranks that never meet. The scheduler process runs the same program, and stays where a rank is to fail.
WORKER = """
import os, signal, subprocess, sys, time
case, rank, role = sys.argv[1], os.environ["RANK_ID"], os.environ["MS_ROLE"]
if role == "MS_SCHED":
    time.sleep(0 if case == "finish" else 60)
    sys.exit(0)
print("rank", rank, "runs", sys.argv[2:], end="")  # no end of line: shown all the same
if case != "finish" and rank == "1":
    time.sleep(1)
    if case == "raise":
        open("raised", "w").close()
        raise ValueError("a broken rank")
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(0 if case == "finish" else 600):
    time.sleep(0.1)
    if os.path.exists("raised"):
        time.sleep(0.5)
        sys.exit(75)  # for rank 1
"""

MEETING = """
import mindspore as ms
from mindspore.communication import init, get_group_size
ms.set_device("CPU")
init()
print("size", get_group_size())
"""


def script(name, *arguments, root=ROOT, cwd=None, environment=None):
    """Run scripts/<name> below `root` to its end, with all that it prints in `stdout`."""
    return subprocess.run(
        [shutil.which("bash"), str(root / "scripts" / name), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=110,
        check=False,
    )


def launch(folder, command, workers):
    """Launch in a folder, which gets `worker.py`, on a free port, logs in `folder`/log."""
    (folder / "worker.py").write_text(WORKER)
    return script(
        "msrun_launch.sh", command, workers, workers, "127.0.0.1", 0, 0, folder / "log", "True", 60, cwd=folder
    )


@pytest.mark.waits
def test_workers_finish_and_the_first_is_shown(tmp_path):
    """Logs of an earlier launch are removed, and nothing else in the folder."""
    (tmp_path / "log").mkdir()
    for name in ("worker_0.log", "worker_2.log", "worker_3.log", "worker_x.log", "scheduler.log", "mine.log"):
        (tmp_path / "log" / name).write_text("earlier")
    done = launch(tmp_path, "worker.py finish 'two words'", 2)
    assert done.returncode == 0, done.stdout
    assert "rank 0 runs ['two words']" in done.stdout
    assert "rank 1" not in done.stdout
    assert "rank 1 runs" in (tmp_path / "log" / "worker_1.log").read_text()
    names = {path.name for path in (tmp_path / "log").iterdir()}
    assert {name for name in names if name.startswith("worker")} == {"worker_0.log", "worker_1.log", "worker_x.log"}
    assert (tmp_path / "log" / "mine.log").read_text() == "earlier"
    for name in ("worker_0.log", "scheduler.log"):
        assert "earlier" not in (tmp_path / "log" / name).read_text()


@pytest.mark.waits
@pytest.mark.parametrize(
    ("case", "code", "shown"),
    [
        ("raise", 1, ["worker 1 ended with exit code 1", "ValueError: a broken rank"]),
        ("kill", 137, ["worker 1 was killed by SIGKILL", "rank 1 runs"]),
    ],
)
def test_a_failing_worker_fails_the_launch(tmp_path, case, code, shown):
    started = time.monotonic()
    done = launch(tmp_path, f"python worker.py {case}", 2)
    assert done.returncode == code, done.stdout
    for text in [*shown, str(tmp_path / "log" / "worker_1.log")]:
        assert text in done.stdout
    assert time.monotonic() - started < 40, "waited for the scheduler, or for the other worker"
    assert not running_in(tmp_path)


def running_in(folder):
    """Processes of ours that work in `folder`."""
    found = []
    for process in psutil.process_iter(["cwd", "pid"]):
        if process.info["cwd"] == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.waits
def test_one_worker_meets_itself(tmp_path):
    (tmp_path / "meeting.py").write_text(MEETING)
    done = launch(tmp_path, "-m meeting", 1)
    assert done.returncode == 0, done.stdout
    assert "size 1" in done.stdout


@pytest.mark.waits
def test_termination_leaves_nothing_behind(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = ["bash", str(ROOT / "scripts" / "msrun_launch.sh"), "worker.py raise", "1", "0", "log", "True", "60"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        deadline = time.monotonic() + 30
        while not (tmp_path / "log" / "worker_0.log").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "log" / "worker_0.log").exists(), "the six-argument form did not start a worker"
        launcher.terminate()
        assert launcher.wait(20) == 143
    time.sleep(0.5)
    assert not running_in(tmp_path)


def test_port_in_use_names_it_and_a_free_one(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        done = script("msrun_launch.sh", "worker.py", 1, 1, "127.0.0.1", port, cwd=tmp_path)
    assert done.returncode == 2
    assert f"MASTER_PORT {port} on 127.0.0.1 is in use" in done.stdout
    assert "is free" in done.stdout
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Usage: bash scripts/msrun_launch.sh COMMAND"),
        (("-h",), 0, "CLUSTER_TIME_OUT"),
        (("worker.py", "two"), 2, "invalid int value: 'two'"),
        (("worker.py", "8", "3"), 2, "WORKER_NUM 8 is not a multiple of LOCAL_WORKER 3"),
        (("worker.py", "16", "8", "127.0.0.1", "8118", "2"), 2, "NODE_RANK is 0 to 1"),
        (("worker.py", "16", "8", "203.0.113.7", "8118", "0"), 2, "203.0.113.7 is not an address of this machine"),
        (("worker.py", "1", "1", "127.0.0.1", "80"), 2, "MASTER_PORT 80: give 1024 to 65535"),
        (("worker.py", "1", "1", "127.0.0.1", "8118", "0", "log", "maybe"), 2, "invalid choice: 'maybe'"),
        (("worker.py 'open",), 1, "a quote that isn't closed"),
        (("python",), 1, "the command is empty"),
        (("a", *"1234567890"), 1, "at most 9 arguments"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path, arguments, code, message):
    done = script("msrun_launch.sh", *arguments, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stdout) == (code, False)
    assert message in done.stdout


def fake_path(folder, **programs):
    """A PATH of one folder: the tools that the scripts need, and `programs` by name with their shell code."""
    folder.mkdir()
    tools = "basename bash cat cksum cp dirname grep id mkdir printf rm tail uname xargs"
    for tool in tools.split():
        (folder / tool).symlink_to(shutil.which(tool))
    for name, code in programs.items():
        (folder / name).write_text(f"#!{shutil.which('bash')}\n{code}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def clone(tmp_path):
    """The scripts in a folder of their own, where there is no `.venv`."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    return folder


def in_clone(clone, name, path, *arguments):
    """Run a script of `clone` with nothing but `path` on PATH."""
    return script(name, *arguments, root=clone, environment={"HOME": str(clone), "PATH": str(path)})


# Stands in for a Python whose venv and pip do as the test says: the second argument picks what runs.
PRETEND_PYTHON = """case "$1 $2 $3" in
-c*) echo 3.11 ;;
"-m venv --clear") {venv} ;;
"-m pip install") {pip} ;;
*) echo "ran: $*" ;;
esac"""


def pretend_python(venv='mkdir -p "$4/bin" && cp "$0" "$4/bin/python"', pip="true"):
    return PRETEND_PYTHON.format(venv=venv, pip=pip)


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_another_python_is_named(clone, tmp_path, name):
    done = in_clone(clone, name, fake_path(tmp_path / "bin", python3="echo 3.13"))
    assert done.returncode == 1
    assert "needs Python 3.10, 3.11 or 3.12" in done.stdout and "python3 is 3.13" in done.stdout
    assert not (clone / ".venv").exists()


def test_venv_of_another_python_is_left_alone(clone, tmp_path):
    path = fake_path(tmp_path / "bin", python3=pretend_python())
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").write_text(f"#!{shutil.which('bash')}\necho 3.13\n")
    (clone / ".venv" / "bin" / "python").chmod(0o755)
    done = in_clone(clone, "test.sh", path)
    assert done.returncode == 1
    assert "has Python 3.13" in done.stdout and "remove" in done.stdout
    assert (clone / ".venv" / "bin" / "python").exists()


@pytest.mark.parametrize(
    ("failing", "output", "message"),
    [
        ("venv", "No module named venv", "comes without the venv module"),
        ("venv", "Read-only file system", "Read-only file system"),
        ("pip", "NewConnectionError; No matching distribution found for mindspore", "can't reach the package index"),
        ("pip", "ERROR: No matching distribution found for mindspore==2.10.*", "no wheel of MindSpore 2.10"),
        ("pip", "OSError: [Errno 28] No space left on device", "the disk is full"),
        ("pip", "something else", "could not install"),
    ],
)
def test_an_installation_that_fails_is_explained(clone, tmp_path, failing, output, message):
    python = pretend_python(**{failing: f'echo "{output}"; exit 1'})
    done = in_clone(clone, "test.sh", fake_path(tmp_path / "bin", python3=python))
    assert done.returncode == 1
    assert message in done.stdout
    if failing == "pip":
        assert output in done.stdout and "pip.log" in done.stdout
    left = {"venv": ".venv", "pip": ".venv/installed.stamp"}[failing]
    assert not (clone / left).exists(), "a failed installation counts as done"


def test_installing_once_is_enough(clone, tmp_path):
    path = fake_path(tmp_path / "bin", python3=pretend_python(pip='echo "$*" >> "$HOME/pip_calls"'))
    for _ in range(2):
        done = in_clone(clone, "test.sh", path, "-k", "layout")
        assert done.returncode == 0, done.stdout
        assert "ran: -m ruff check ." in done.stdout and "ran: -m pytest -k layout" in done.stdout
    assert len((clone / "pip_calls").read_text().splitlines()) == 1
    (clone / "setup.py").write_text("changed")
    assert in_clone(clone, "test.sh", path).returncode == 0
    assert len((clone / "pip_calls").read_text().splitlines()) == 2


def test_mpirun_without_gpus_says_what_is_missing(clone, tmp_path):
    done = in_clone(clone, "mpirun_launch.sh", fake_path(tmp_path / "bin"), "worker.py", "2")
    assert done.returncode == 1
    for text in ("mpirun (install Open MPI", "an NVIDIA GPU", "msrun_launch.sh"):
        assert text in done.stdout


def test_mpirun_with_gpus(clone, tmp_path):
    path = fake_path(
        tmp_path / "bin",
        **{"nvidia-smi": 'echo "GPU 0: A"; echo "GPU 1: B"', "mpirun": 'printf "<%s>" "$@"', "python3": "echo 3.11"},
    )
    done = in_clone(clone, "mpirun_launch.sh", path, "python -m meeting 'two words'", "2")
    assert done.returncode == 0, done.stdout
    assert "<-n><2>" in done.stdout and f"<{path}/python3><-m><meeting><two words>" in done.stdout
    done = in_clone(clone, "mpirun_launch.sh", path, "worker.py", "4")
    assert done.returncode == 1
    assert "this machine has 2 GPUs" in done.stdout


MPIRUN = """ranks=$2
while [[ $1 != *python* ]]; do shift; done
echo "$ranks ranks, devices ${CUDA_VISIBLE_DEVICES:-all}, restart $MINDFORMERS_RESTART: ${*:2}"
[ "$MINDFORMERS_RESTART" = 1 ] || exit 137
"""


def test_mpirun_starts_again(tmp_path):
    """On the processes that there are; its exit code after a signal is that of a shell."""
    path = fake_path(tmp_path / "bin", **{"nvidia-smi": 'echo "GPU 0: A"; echo "GPU 1: B"', "mpirun": MPIRUN})
    given = {"RESTARTS": "3", "BACKOFF": "0", "EXCLUDE": "0", "MIN_WORKERS": "1"}
    environment = {**os.environ, **given, "PATH": f"{path}:{os.environ['PATH']}"}
    done = script("mpirun_launch.sh", "worker.py 'two words'", 2, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout
    assert [line for line in done.stdout.splitlines() if line] == [
        "1 ranks, devices 1, restart 0: worker.py two words",
        "supervisor: exit code 137: restart 1 of 3 in 0 s",
        "1 ranks, devices 1, restart 1: worker.py two words",
    ]


def test_launchers_need_mindspore(clone, tmp_path):
    bare = f'[ "$1" = -c ] && case $2 in *find_spec*) exit 1 ;; *) exec {sys.executable} "$@" ;; esac'
    done = in_clone(clone, "msrun_launch.sh", fake_path(tmp_path / "bin", python3=bare), "worker.py", "1")
    assert done.returncode == 1
    assert "has no MindSpore" in done.stdout and "quickstart.sh" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "8 8 127.0.0.1 8118 0 output/msrun_log True 7200"),
        (("4",), "4 4 127.0.0.1 8118 0 output/msrun_log True 7200"),
        (("16", "8", "10.0.0.1", "9000", "1"), "16 8 10.0.0.1 9000 1 output/msrun_log True 7200"),
        (("16", "8", "10.0.0.1", "9000", "1", "logs", "False", "60"), "16 8 10.0.0.1 9000 1 logs False 60"),
    ],
)
def test_arguments_are_those_of_mindspore_transformers(clone, tmp_path, arguments, expected):
    names = ("worker_num", "local_worker_num", "master_addr", "master_port", "node_rank", "log_dir", "join")
    options = " ".join(f"--{name}={value}" for name, value in zip((*names, "cluster_time_out"), expected.split()))
    path = fake_path(tmp_path / "bin", python3=pretend_python())
    done = in_clone(clone, "msrun_launch.sh", path, "a.py x", *arguments)
    assert done.stdout.strip().endswith(f"launch.py {options} -- a.py x"), done.stdout
