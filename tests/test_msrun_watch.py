"""What `msrun_launch.sh` finds out about its workers: which one began the end, what it shows, which logs it removes."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = str(Path(__file__).resolve().parent.parent / "scripts" / "msrun_watch.py")
sys.path.append(str(Path(SCRIPT).parent))

import processes  # noqa: E402


def test_logs_of_other_machines_stay(tmp_path):
    """In a folder that two machines share; the second one launches."""
    for name in ("worker_0.log", "worker_1.log", "worker_2.log", "worker_4.log", "scheduler.log"):
        (tmp_path / name).touch()
    watch = runpy.run_path(SCRIPT)
    watch["remove_old_logs"](SimpleNamespace(log_dir=tmp_path, node_rank=1, local_worker_num=2, worker_num=4))
    assert {path.name for path in tmp_path.iterdir()} == {"worker_0.log", "worker_1.log", "scheduler.log"}


def test_the_worker_that_began_the_end_is_named(tmp_path):
    """Not one that ends for others, which msrun has seen first, nor one that msrun has killed then."""
    ends = ("exit 75", "exit 0", "kill -9 $$", "exit 2")
    workers = [subprocess.Popen(["sh", "-c", end]) for end in ends]  # nobody waits for them: they stay as zombies
    watch = runpy.run_path(SCRIPT)["watch"]
    watch.__globals__["process_ranks"] = lambda pid: ({worker.pid: rank for rank, worker in enumerate(workers)}, None)
    polls = iter([None, None, None, 1])
    msrun = SimpleNamespace(pid=None, poll=lambda: next(polls))
    with (tmp_path / "msrun.log").open("w+") as log:
        log.write(f"Worker process {workers[0].pid} exit with exception. Error code: 75.")
        assert watch(msrun, log, SimpleNamespace(show=lambda last=False: None), []) == (3, 2)
    assert [worker.wait() for worker in workers] == [75, 0, -9, 2]


@pytest.mark.parametrize(("number", "supervised"), [("SIGKILL", True), ("SIGSTOP", True), ("SIGKILL", False)])
def test_workers_leave_where_the_scheduler_is_gone(tmp_path, monkeypatch, number, supervised):
    """Under a supervisor, which starts them again."""
    names, scheduler, worker = runpy.run_path(SCRIPT), *(subprocess.Popen(["sleep", "60"]) for _ in range(2))
    monkeypatch.setitem(names["os"].environ, "MINDFORMERS_SUPERVISOR", "folder")
    if not supervised:
        monkeypatch.delenv("MINDFORMERS_SUPERVISOR")
    watch, polls = names["watch"], iter([None] * 3 + [1])
    watch.__globals__["process_ranks"] = lambda pid: ({worker.pid: 0}, scheduler.pid)
    msrun, follower = SimpleNamespace(pid=None, poll=lambda: next(polls)), SimpleNamespace(show=lambda last=False: None)
    scheduler.send_signal(getattr(signal, number))
    with (tmp_path / "msrun.log").open("w+") as log:
        found = watch(msrun, log, follower, [])
    assert scheduler.wait(10) == -9
    worker.kill()
    assert (found, worker.wait()) == ((("scheduler", -9), -15) if supervised else (None, -9))


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
print("", flush=True)
while True:
    time.sleep(1)
"""


def test_a_worker_that_does_not_leave_is_killed(tmp_path):
    """After SIGTERM, when the time that it has is over."""
    names, killed = runpy.run_path(SCRIPT), []
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as worker:
        worker.stdout.readline()

        def kill_children(_):
            killed.append(time.monotonic())
            worker.kill()

        changed = {"process_ranks": lambda pid: ({worker.pid: 0}, None), "kill_children": kill_children}
        names["watch"].__globals__.update(changed)
        msrun = SimpleNamespace(pid=None, poll=lambda: killed or None)
        end = time.monotonic() + 1
        with (tmp_path / "msrun.log").open("w+") as log:
            names["watch"](msrun, log, SimpleNamespace(show=lambda last=False: None), [end])
        assert worker.stdout.read() == "heard\n" and killed[0] >= end


def test_a_stopped_worker_has_not_failed():
    """Whose status, as the kernel tells it, is the signal."""
    worker = subprocess.Popen(["sleep", "60"])
    for number, failed in ((signal.SIGSTOP, []), (signal.SIGKILL, [(0, -9)])):
        worker.send_signal(number)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert processes.is_gone(worker.pid)
        assert processes.failed_workers({worker.pid: 0}) == failed
    assert worker.wait() == -9


REPORT = """rank 1 waits in all_reduce; rank 0 was killed by SIGKILL
Where the ranks are:
- rank 0: killed
- rank 1: in all_reduce
"""


@pytest.mark.parametrize(
    ("rank", "code", "logs", "shown", "hidden"),
    [
        (0, -9, ["step 1\n", f"step 1\n{REPORT}"], ["the report of the other workers", REPORT.rstrip()], "step 1"),
        (0, 1, [f"step 1\n{REPORT}", "error: no data\n"], ["worker_1.log\nerror: no data"], "waits"),
        (0, 1, ["Traceback (most recent call last)\nE: x\n"] * 2, ["worker 0 ended with exit code 1"], "E: x"),
    ],
)
def test_a_launch_shows_why_it_failed(tmp_path, capsys, rank, code, logs, shown, hidden):
    """What is on the terminal, the log of rank 0, isn't repeated."""
    paths = {number: tmp_path / f"worker_{number}.log" for number in range(len(logs))}
    for number, text in enumerate(logs):
        paths[number].write_text(text)
    runpy.run_path(SCRIPT)["report"]((rank, code), 1, tmp_path, paths, tmp_path / "msrun_0.log")
    said = capsys.readouterr().err
    assert all(text in said for text in shown) and hidden not in said, said
