"""Start ranks under msrun for tests: one launch for a script, or one launch for many cases of one world size."""

import ast
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
WORKER = TESTS / "ranks" / "worker.py"
_ENVIRONMENT = dict(os.environ)  # as it was when pytest began: launches run beside tests that set variables


def on_ranks(*world_sizes):
    """Declare on how many ranks a `case_*` function runs: `@on_ranks(2)`, `@on_ranks(2, 4)`. Read by `find_cases`."""
    assert all(isinstance(size, int) and size > 1 for size in world_sizes), world_sizes
    return lambda function: function


def find_cases():
    """All cases as `(world size, "module::function")`, found by reading the files: nothing is imported."""
    found = []
    for path in sorted((TESTS / "ranks").glob("case_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.FunctionDef) and node.name.startswith("case_")):
                continue
            sizes = [_sizes(decorator) for decorator in node.decorator_list]
            assert any(sizes), f"{path.name}: {node.name} lacks its @on_ranks(…)"
            found += [(size, f"{path.stem}::{node.name}") for size in sum(sizes, [])]
    return sorted(found)


def _sizes(decorator):
    if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "on_ranks":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


@dataclass(frozen=True)
class Launched:
    """How a launch ended: msrun's exit code (None: it was killed at the timeout), every rank's log, seconds taken."""

    exit_code: int | None
    logs: dict
    seconds: float

    def tail(self, rank, lines=25):
        """The last lines of a rank's log."""
        return "\n".join(self.logs.get(rank, "no log").splitlines()[-lines:])


def run_ranks(world_size, script, *arguments, timeout=120, env=None, stop=None):
    """Run a Python script on `world_size` ranks under msrun, and leave no process behind.

    Args:
        world_size: number of ranks.
        script: path of the script, absolute or from the repository's root; `arguments` follow it.
        timeout: seconds until everything is killed.
        env: variables to add to the environment.
        stop: a `threading.Event`; once it is set, everything is killed.

    Returns:
        A `Launched`; whether the exit code is right is the caller's to check.
    """
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        path = os.pathsep.join([str(Path(sys.executable).parent), _ENVIRONMENT.get("PATH", "")])
        python_path = os.pathsep.join([str(ROOT), str(TESTS), _ENVIRONMENT.get("PYTHONPATH", "")])
        variables = {"GLOG_v": "3", **_ENVIRONMENT, "PATH": path, "PYTHONPATH": python_path, **(env or {})}
        command = ["msrun", f"--worker_num={world_size}", f"--local_worker_num={world_size}", "--join=True"]
        command += [f"--master_port={free_port()}", "--cluster_time_out=60", f"--log_dir={folder}"]
        command += [str(ROOT / script), *map(str, arguments)]
        start = time.monotonic()
        with open(Path(folder) / "msrun.log", "w") as output:
            launcher = subprocess.Popen(command, env=variables, cwd=folder, stdout=output, stderr=output)
            try:
                exit_code = _wait(launcher, start + timeout, Path(output.name), stop or threading.Event())
            finally:
                _kill_tree(launcher)
        logs = {rank: _read(Path(folder) / f"worker_{rank}.log") for rank in range(world_size)}
        if not any(logs.values()):
            logs = dict.fromkeys(logs, _read(Path(folder) / "msrun.log"))
        return Launched(exit_code, logs, time.monotonic() - start)


def run_cases(world_size, cases, case_timeout=120, stop=None):
    """Run cases (`"module::function"`) in one launch; again for what is left when a case breaks a launch.

    Returns:
        For every case its failure as text, or None where it passed on all ranks. Less, if `stop` was set.
    """
    failures = {}
    while len(failures) < len(cases) and not (stop and stop.is_set()):
        rest = [case for case in cases if case not in failures]
        with tempfile.TemporaryDirectory(prefix="cases_") as results:
            timeout = 60 + case_timeout * len(rest)
            launched = run_ranks(world_size, WORKER, results, case_timeout, *rest, timeout=timeout, stop=stop)
            for index, case in enumerate(rest):
                reports = [_read(Path(results) / f"{index}.{rank}.json") for rank in range(world_size)]
                if not any(reports) and index > 0:
                    break
                failures[case] = _failure(case, reports, launched)
    return failures


def _failure(case, reports, launched):
    """None when all ranks passed, else what every rank says, alike ranks together."""
    said = {}
    for rank, report in enumerate(reports):
        text = json.loads(report)["failure"] if report else f"did not finish; its log ends:\n{launched.tail(rank)}"
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


def _wait(launcher, deadline, log, stop):
    """Exit code of msrun, or None at the deadline or when stopped.

    1 once it says that a rank failed: its scheduler stays long.
    """
    while time.monotonic() < deadline and not stop.is_set():
        if launcher.poll() is not None:
            return launcher.returncode
        if "exit with exception" in _read(log):
            return 1
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
