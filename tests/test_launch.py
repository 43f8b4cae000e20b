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

from mindformers_core.hangs.board import process_state

SCRIPT = str(Path(__file__).resolve().parent.parent / "scripts" / "launch.py")
sys.path.append(str(Path(SCRIPT).parent))


def command(code):
    """A Python program for `launch.start`; `code` has the name `rank`, that of the scheduler is "S"."""
    rank = "rank = os.environ['RANK_ID'] if os.environ['MS_ROLE'] == 'MS_WORKER' else 'S'"
    return ["-c", f"import os, signal, sys, time\n{rank}\n{code}"]


@pytest.fixture
def launched(tmp_path):
    """`(code, workers, ending=…, until=…)`: what `watch` finds, and exit codes of all processes by rank."""
    made = []

    def run(code, workers, ending=(), until=lambda processes: None):
        names = runpy.run_path(SCRIPT)
        names["watch"].__globals__["OTHERS_SECONDS"] = 1.5
        logs = {rank: tmp_path / f"worker_{rank}.log" for rank in range(workers)}
        args = SimpleNamespace(
            worker_num=workers, cluster_time_out=60, master_addr="127.0.0.1", master_port=1, node_rank=0,
            log_dir=tmp_path, command=command(code),
        )  # fmt: skip
        processes = names["start"](args, logs)
        made.extend(processes.values())
        until(processes)
        failures = names["watch"](processes, SimpleNamespace(show=lambda: None), list(ending))
        for process in processes.values():
            process.kill()  # as the launch does
        return failures, {who: process.wait() for who, process in processes.items()}

    yield run
    for process in made:
        process.kill()


def test_the_worker_that_began_the_end_is_first(launched):
    """Of those that have failed when the launch looks, one of a signal; the scheduler is not waited for."""
    code = "time.sleep(60 if rank == 'S' else 0)\nos.kill(os.getpid(), 9) if rank == '2' else None\n"
    code += "os._exit({'0': 75, '3': 2}.get(rank, 0))"

    def all_ended(processes):
        for rank in range(4):
            os.waitid(os.P_PID, processes[rank].pid, os.WEXITED | os.WNOWAIT)

    failures, codes = launched(code, 4, until=all_ended)
    assert [*failures.items()] == [(2, -9), (0, 75), (3, 2)]
    assert codes == {0: 75, 1: 0, 2: -9, 3: 2, "scheduler": -9}


def test_others_have_a_few_seconds(launched, tmp_path):
    """For their reports, after one has failed; the scheduler is waited for where none has."""
    code = f"""
print(rank == "1" or "")
while rank == "0" and "True" not in open({str(tmp_path / "worker_1.log")!r}).read():
    time.sleep(0.02)
time.sleep({{"0": 0, "1": 0.5}}.get(rank, 60))
sys.exit(2 if rank == "0" else 0)
"""
    failures, codes = launched(code, 3)
    assert (failures, codes) == ({0: 2}, {0: 2, 1: 0, 2: -9, "scheduler": -9})
    failures, codes = launched("time.sleep({'S': 0.7}.get(rank, 0))\nsys.exit({'S': 3}.get(rank, 0))", 1)
    assert (failures, codes) == ({}, {0: 0, "scheduler": 3})


@pytest.mark.parametrize(("number", "supervised"), [("SIGKILL", True), ("SIGSTOP", True), ("SIGKILL", False)])
def test_workers_leave_where_the_scheduler_is_gone(launched, monkeypatch, number, supervised):
    """Under a supervisor, which starts them again."""
    monkeypatch.setenv("MINDFORMERS_SUPERVISOR", "folder")
    if not supervised:
        monkeypatch.delenv("MINDFORMERS_SUPERVISOR")

    def strike(processes):
        os.kill(processes["scheduler"].pid, getattr(signal, number))
        os.waitid(os.P_PID, processes["scheduler"].pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)

    failures, codes = launched("time.sleep(60 if rank == 'S' else 0.8)", 1, until=strike)
    assert failures == ({"scheduler": -9, 0: -15} if supervised else {})
    assert codes == {0: -15 if supervised else 0, "scheduler": -9}


DEAF = """
signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
print("", flush=True)
while True:
    time.sleep(1)
"""


def test_a_worker_that_does_not_leave_is_killed(launched, tmp_path):
    """After SIGTERM, when the time that it has is over."""
    log, ending = tmp_path / "worker_0.log", []

    def deafened(_):
        while not log.read_text():
            time.sleep(0.02)
        ending.append(time.monotonic() + 1)

    _, codes = launched(DEAF, 1, ending=ending, until=deafened)
    assert log.read_text() == "\nheard\n" and codes[0] == -9 and time.monotonic() >= ending[0]


def test_a_stopped_worker_has_not_failed():
    """Whose status, as the kernel tells it, is the signal."""
    worker = subprocess.Popen(["sleep", "60"])
    for number, told in ((signal.SIGSTOP, ("T", 0)), (signal.SIGKILL, ("Z", -9))):
        worker.send_signal(number)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert process_state(worker.pid)[:2] == told
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
    runpy.run_path(SCRIPT)["report"](rank, code, tmp_path, paths)
    said = capsys.readouterr().err
    assert all(text in said for text in shown) and hidden not in said, said
