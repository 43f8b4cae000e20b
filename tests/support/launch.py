"""Start ranks under msrun for tests: one launch for a script, or one launch for many cases of one world size."""

import ast
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
WORKER, FORKING = TESTS / "ranks" / "worker.py", TESTS / "support" / "forking_msrun.py"
# As it was when pytest began: launches run beside tests that set variables. Of a graph that is written into files,
# `count_in_graph` reads the last form; all forms would make a compilation take twice as long.
_ENVIRONMENT = {**os.environ, "MS_DEV_DUMP_IR_PASSES": "execute"}


def on_ranks(*world_sizes, nightly=()):
    """Declare on how many ranks a `case_*` function runs: `@on_ranks(2)`, `@on_ranks(4, nightly=(2, 8))`: on 4 ranks,
    at night also on 2 and 8. Read by `find_cases`.
    """
    assert all(isinstance(size, int) and size > 1 for size in (*world_sizes, *nightly)), (world_sizes, nightly)
    return lambda function: function


def find_cases():
    """All cases as `(world size, "module::function", nightly)`, found by reading the files: nothing is imported."""
    found = []
    for path in sorted((TESTS / "ranks").glob("case_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.FunctionDef) and node.name.startswith("case_")):
                continue
            sizes = sum((_sizes(decorator) for decorator in node.decorator_list), [])
            assert sizes, f"{path.name}: {node.name} lacks its @on_ranks(…)"
            found += [(size, f"{path.stem}::{node.name}", nightly) for size, nightly in sizes]
    return sorted(found)


def _sizes(decorator):
    if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "on_ranks":
        at_night = [size for keyword in decorator.keywords for size in ast.literal_eval(keyword.value)]
        return [(ast.literal_eval(size), False) for size in decorator.args] + [(size, True) for size in at_night]
    return []


@dataclass(frozen=True)
class Launched:
    """How a launch ended: exit code of msrun or a rank (None: killed at the timeout), logs of ranks, seconds taken."""

    exit_code: int | None
    logs: dict
    seconds: float

    def tail(self, rank, lines=25):
        """The last lines of a rank's log."""
        return "\n".join(self.logs.get(rank, "no log").splitlines()[-lines:])


@dataclass(frozen=True)
class CaseResult:
    """What a case came to: its failure as text (None: it passed on all ranks), the seconds of its slowest rank, the CPU
    seconds of all ranks together, and the most bytes that a rank has held so far.
    """

    failure: str | None
    seconds: float
    cpu_seconds: float
    peak_memory: int


def run_ranks(world_size, script, *arguments, timeout=120, env=None, stop=None, until=None):
    """Run a Python script on `world_size` ranks under msrun (`forking_msrun`), and leave no process behind.

    Args:
        world_size: number of ranks.
        script: path of the script, absolute or from the repository's root; `arguments` follow it.
        timeout: seconds until everything is killed.
        env: variables to add to the environment.
        stop: a `threading.Event`; once it is set, everything is killed.
        until: `() -> bool`; once it holds, the launch has done its work, and nobody waits for msrun's scheduler to end.

    Returns:
        A `Launched`; whether the exit code is right is the caller's to check.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        path = os.pathsep.join([str(Path(sys.executable).parent), _ENVIRONMENT.get("PATH", "")])
        python_path = os.pathsep.join([str(ROOT), str(TESTS), _ENVIRONMENT.get("PYTHONPATH", "")])
        variables = {"GLOG_v": "3", **_ENVIRONMENT, "PATH": path, "PYTHONPATH": python_path, **(env or {})}
        command = [sys.executable, str(FORKING), f"--worker_num={world_size}", f"--local_worker_num={world_size}"]
        command += ["--join=True", f"--master_port={free_port()}", "--cluster_time_out=60", f"--log_dir={folder}"]
        command += [str(ROOT / script), *map(str, arguments)]
        start = time.monotonic()
        with open(Path(folder) / "msrun.log", "w") as output:
            launcher = subprocess.Popen(command, env=variables, cwd=folder, stdout=output, stderr=output)
            try:
                exit_code = _wait(launcher, start + timeout, Path(output.name), stop or threading.Event(), until)
            finally:
                _kill_tree(launcher)
        logs = {rank: _read(Path(folder) / f"worker_{rank}.log") for rank in range(world_size)}
        if not any(logs.values()):
            logs = dict.fromkeys(logs, _read(Path(folder) / "msrun.log"))
        return Launched(exit_code, logs, time.monotonic() - start)


def run_cases(world_size, cases, case_timeout=300, stop=None):
    """Run cases (`"module::function"`) in one launch; again for what is left when a case breaks a launch.

    Returns:
        The `CaseResult` of every case, less if `stop` was set; the seconds that launches took beside their cases.
    """
    results, starting = {}, 0.0
    while len(results) < len(cases) and not (stop and stop.is_set()):
        rest = [case for case in cases if case not in results]
        with tempfile.TemporaryDirectory(prefix="cases_") as folder:
            timeout = 60 + case_timeout * len(rest)
            env = {"TRUTHS": folder}  # where `truth.once` leaves what it computes
            last = [Path(folder) / f"{len(rest) - 1}.{rank}.json" for rank in range(world_size)]
            launched = run_ranks(
                world_size, WORKER, folder, case_timeout, *rest, timeout=timeout, env=env, stop=stop,
                until=lambda last=last: all(path.exists() for path in last),
            )  # fmt: skip
            starting += launched.seconds
            for index, case in enumerate(rest):
                reports = [_read(Path(folder) / f"{index}.{rank}.json") for rank in range(world_size)]
                if not any(reports) and index > 0:
                    break
                results[case] = _result(case, [json.loads(report) if report else None for report in reports], launched)
                starting -= results[case].seconds
    return results, starting


def _result(case, reports, launched):
    """The `CaseResult` from what every rank reports, None where a rank did not finish."""
    done = [report for report in reports if report]
    return CaseResult(
        failure=_failure(case, reports, launched),
        seconds=max((report["seconds"] for report in done), default=0.0),
        cpu_seconds=sum(report["cpu_seconds"] for report in done),
        peak_memory=max((report["peak_memory"] for report in done), default=0),
    )


def _failure(case, reports, launched):
    """None when all ranks passed, else what every rank says, alike ranks together."""
    said = {}
    for rank, report in enumerate(reports):
        text = report["failure"] if report else f"did not finish; its log ends:\n{launched.tail(rank)}"
        said.setdefault(text, []).append(rank)
    if list(said) == [None]:
        return None
    parts = [f"--- ranks {ranks}: {text or 'passed'}" for text, ranks in said.items()]
    return f"{case} (msrun exit code {launched.exit_code})\n" + "\n".join(parts)


def free_port():
    """A TCP port from 20000 to 40000 that nobody listens on just now."""
    while True:
        port = random.SystemRandom().randint(20000, 40000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def _wait(launcher, deadline, log, stop, until):
    """Exit code of msrun, or None at the deadline or when stopped.

    That of the first rank, by number, once msrun says that one has failed: its scheduler stays long.
    """
    while time.monotonic() < deadline and not stop.is_set():
        if launcher.poll() is not None:
            return launcher.returncode
        if until is not None and until():
            return 0
        if found := re.search(r"exit with exception\. Error code: (-?\d+)", _read(log)):
            return int(found[1])
        time.sleep(0.1)
    return None


def _kill_tree(process):
    """Kill a process that we started, and all that it started: msrun puts every rank into a session of its own."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def _read(path):
    return path.read_text(errors="replace") if path.exists() else ""
