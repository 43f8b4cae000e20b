"""Runs msrun, shows this machine's first worker, and fails when a worker fails. `msrun_launch.sh` calls this.

Left alone, msrun waits for its scheduler after a worker has failed: 30 s if the ranks had met, CLUSTER_TIME_OUT
(7200 s) if they had not. It also leaves its workers running when it is terminated, and what a killed worker has
started. Here the scheduler gets a few seconds, SIGTERM is passed on to workers, and nothing that was started stays
behind.
"""

import argparse
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from processes import become_subreaper, failed_workers, is_gone, kill_children, process_ranks

POLL_SECONDS = 0.2
SCHEDULER_GRACE_SECONDS = 3
GRACE = os.environ.get("GRACE") or "40"  # seconds after SIGTERM, more than checkpoint.grace
LAST_LINES = 30
NUMBERS = ("worker_num", "local_worker_num", "master_port", "node_rank", "cluster_time_out")  # msrun's options
SCHEDULER = "scheduler"  # the rank of the scheduler, where that began the end
FOR_OTHERS = 75  # exit code of a worker that ends for others, or as a signal asks: mindformers_core.supervised
WORKER_FAILED = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")
# The report of a hang (mindformers_core.hangs.report), and the lines that tell why a worker failed by itself
REPORT = re.compile(r"^.*\nWhere the ranks are:\n(?:(?:- |Python stack |    |\d+ more |Where ).*\n?)+", re.MULTILINE)
CAUSE = re.compile(r"^(Traceback \(most recent call last\)|error: )", re.MULTILINE)
# MindSpore prints these whatever GLOG_v says; they stay in the log file.
NOISE = re.compile(r"^\[INFO\] [A-Z_]+\(")


def main():
    """Parse arguments, check them, run; the exit code is that of the worker that began the end, or 0."""
    parser = argparse.ArgumentParser(prog="msrun_launch.sh", description=__doc__)
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--master_addr", required=True)
    parser.add_argument("--log_dir", type=Path, required=True)
    parser.add_argument("--join", choices=("True", "False"), required=True)
    split = sys.argv.index("--")
    args = parser.parse_args(sys.argv[1:split])
    args.command = sys.argv[split + 1 :]
    try:
        check_counts(args)
        if args.node_rank == 0:
            args.master_port = check_port(args.master_addr, args.master_port, args.local_worker_num == args.worker_num)
    except ValueError as error:
        parser.exit(2, f"msrun_launch.sh: {error}\n")
    sys.exit(run(args))


def check_counts(args):
    """Raise `ValueError` for numbers of workers, machines and ports that don't fit each other, and for `GRACE`."""
    if not GRACE.isdecimal():
        raise ValueError(f"GRACE {GRACE!r}: give seconds, a whole number from 0 up")
    if args.worker_num < 1 or args.local_worker_num < 1:
        raise ValueError(f"WORKER_NUM {args.worker_num} and LOCAL_WORKER {args.local_worker_num} are numbers from 1 up")
    if args.worker_num % args.local_worker_num:
        raise ValueError(
            f"WORKER_NUM {args.worker_num} is not a multiple of LOCAL_WORKER {args.local_worker_num}: every machine "
            f"runs equally many workers; for one machine give {args.worker_num} twice"
        )
    machines = args.worker_num // args.local_worker_num
    if not 0 <= args.node_rank < machines:
        raise ValueError(
            f"NODE_RANK {args.node_rank}: {args.worker_num} workers, {args.local_worker_num} on each machine, "
            f"make {machines} machines; NODE_RANK is 0 to {machines - 1}"
        )
    if args.master_port != 0 and not 1024 <= args.master_port <= 65535:
        raise ValueError(f"MASTER_PORT {args.master_port}: give 1024 to 65535, or 0 for a free one")
    if args.master_port == 0 and machines > 1:
        raise ValueError("MASTER_PORT 0 (a free one) needs all workers on one machine: choose a port that all know")


def check_port(address, port, one_machine):
    """The port to use, after trying to listen on it: `port`, or a free one for 0.

    Raises:
        ValueError: the address isn't known or isn't this machine's, or the port is in use.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR {address!r} is no address known here: {error.strerror}") from error

    def listen_once(port):
        with socket.create_server((target[0], port), family=family) as probe:
            return probe.getsockname()[1]

    try:
        return listen_once(port)
    except PermissionError as error:
        raise ValueError(f"MASTER_PORT {port} on {address}: not allowed to listen there") from error
    except OSError as error:
        try:
            free = listen_once(0)
        except OSError:
            advice = "leave it out" if one_machine else "start NODE_RANK 0 on the machine with that address"
            raise ValueError(f"MASTER_ADDR {address} is not an address of this machine: {advice}") from error
        raise ValueError(
            f"MASTER_PORT {port} on {address} is in use (another job, perhaps): {free} is free; 0 takes a free one"
        ) from error


def run(args):
    """Start msrun and see it through. Returns the exit code for the shell."""
    first = args.node_rank * args.local_worker_num
    logs = {rank: args.log_dir / f"worker_{rank}.log" for rank in range(first, first + args.local_worker_num)}
    args.log_dir.mkdir(parents=True, exist_ok=True)
    remove_old_logs(args)
    become_subreaper()
    print(f"{args.local_worker_num} of {args.worker_num} workers start here, logs in {args.log_dir}", flush=True)
    ending = []  # once workers are asked to leave, the time when those that haven't left are killed

    def hear(number, frame):
        if number != signal.SIGTERM or ending:  # the second one ends all at once
            sys.exit(128 + number)
        ending.append(time.monotonic() + int(GRACE))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hear)
    with (args.log_dir / f"msrun_{args.node_rank}.log").open("w+", errors="replace") as msrun_log:
        streams = {"stdin": subprocess.DEVNULL, "stdout": msrun_log, "stderr": msrun_log}
        msrun = subprocess.Popen(msrun_command(args), start_new_session=True, env=worker_environment(), **streams)
        joined = args.join == "True"
        try:
            failure = watch(msrun, msrun_log, Follower(logs[first]), ending) if joined else None
        finally:
            if joined:
                kill_children(os.getpid())
        code = msrun.wait()
    if code or failure:
        return report(failure, code, args.log_dir, logs, Path(msrun_log.name))
    return 0


def remove_old_logs(args):
    """Remove logs of an earlier launch: those that this machine writes, and those of ranks that there aren't now.

    Other machines may have begun to write theirs, in the same folder.
    """
    first = args.node_rank * args.local_worker_num
    others = {*range(args.worker_num)}.difference(range(first, first + args.local_worker_num))
    for log in args.log_dir.glob("worker_*.log"):
        number = log.stem.removeprefix("worker_")
        if number.isdecimal() and int(number) not in others:
            log.unlink(missing_ok=True)
    if args.node_rank == 0:
        (args.log_dir / "scheduler.log").unlink(missing_ok=True)


def msrun_command(args):
    """Argument list of msrun, with this Python for msrun and for the workers."""
    given = [f"--{name}={getattr(args, name)}" for name in (*NUMBERS, "master_addr", "log_dir", "join")]
    # No worker has this rank: we show the first one's log ourselves, to its last line.
    given.append(f"--tail_worker_log={args.worker_num}")
    return [sys.executable, "-m", "mindspore.parallel.cluster.run", *given, "python3", *args.command]


def worker_environment():
    """Ours, with this Python first on PATH (msrun starts workers by the bare name `python3`), output unbuffered so
    that logs are live and a killed worker's last lines are kept, and MindSpore's own log quiet unless GLOG_v is set."""
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    return {"GLOG_v": "3", **os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


def watch(msrun, msrun_log, follower, ending):
    """Wait for msrun to end. Returns `(rank or None, exit code)` of the worker that began the end, or `None`.

    Under a supervisor workers leave, and are started again, where the scheduler is gone: without it they fail at their
    end. Its rank is here "scheduler". `ending`: a list, which has the time of their end once workers are to leave.
    """
    ranks, failures, deadline, scheduler, asked = {}, {}, math.inf, None, set()
    while msrun.poll() is None:
        time.sleep(POLL_SECONDS)
        follower.show()
        found, pid = process_ranks(msrun.pid)
        ranks, scheduler = ranks | found, pid or scheduler
        if "MINDFORMERS_SUPERVISOR" in os.environ and not (ending or failures) and is_gone(scheduler):
            print("msrun_launch.sh: the scheduler is gone: workers leave", file=sys.stderr)
            failures[SCHEDULER] = -signal.SIGKILL
            with suppress(OSError):  # ranks that leave would wait for one that is stopped
                os.kill(scheduler, signal.SIGKILL)
            ending.append(time.monotonic() + int(GRACE))
        for pid in {*ranks} - asked if ending else ():
            asked.add(pid)
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        ended = failed_workers(ranks)  # msrun looks once a second, in order of ranks: others may have failed of it
        if reported := find_failure(msrun_log, ranks):  # msrun kills the others
            ended = [(rank, code) for rank, code in ended if code != -signal.SIGKILL]
        for rank, code in [*ended, *reported]:
            failures.setdefault(rank, code)
        if {*failures} - {SCHEDULER}:
            deadline = min(deadline, time.monotonic() + SCHEDULER_GRACE_SECONDS)
        if time.monotonic() > min([deadline, *ending]):
            kill_children(msrun.pid)
    follower.show(last=True)
    found = [*failures.items(), *find_failure(msrun_log, ranks)]
    return min(found, key=lambda failure: failure[1] == FOR_OTHERS, default=None)


def find_failure(msrun_log, ranks):
    """The failed worker that msrun has reported, as a list of one `(rank or None, exit code)`, or of none."""
    msrun_log.seek(0)
    match = WORKER_FAILED.search(msrun_log.read())
    return [(ranks.get(int(match[1])), int(match[2]))] if match else []


class Follower:
    """Shows a log file as it grows, line by line, without MindSpore's networking chatter."""

    def __init__(self, path):
        self.path, self.position = path, 0

    def show(self, last=False):
        """Print the lines added since the last call; with `last` also one that isn't ended."""
        if not self.path.exists():
            return
        with self.path.open("rb") as log:
            log.seek(self.position)
            added = log.read()
        if not last:
            added = added[: added.rfind(b"\n") + 1]
        self.position += len(added)
        for line in readable_lines(added):
            print(line, flush=True)


def readable_lines(content):
    """Lines of the bytes `content` that are worth a person's reading."""
    return [line for line in content.decode(errors="replace").splitlines() if not NOISE.match(line)]


def report(failure, msrun_code, log_dir, logs, msrun_log):
    """Tell what failed: the last lines of its log, and of others that failed by themselves, and the report of a hang.

    What the first worker has written is shown already. Returns the exit code for the shell.
    """
    rank, code = failure or (None, msrun_code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    known = {None: ("a worker", [*logs.values()]), SCHEDULER: ("the scheduler", [log_dir / "scheduler.log"])}
    who, shown = known.get(rank) or (f"worker {rank}", [logs[rank]])
    if failure is None:
        who, shown = "msrun", [log_dir / "scheduler.log", msrun_log]
    texts = {path: "\n".join(readable_lines(path.read_bytes())) for path in (*shown, *logs.values()) if path.exists()}
    reports = [found[0] for text in texts.values() if (found := REPORT.search(text))]
    if code == FOR_OTHERS:
        how += ", for others that failed or wait" if reports else ", as SIGTERM asks"
    seen = texts.get(next(iter(logs.values())), "")  # of the first worker
    for path in [*shown, *(path for path, text in texts.items() if CAUSE.search(text) and not REPORT.search(text))]:
        lines = texts.get(path, "").splitlines()[-LAST_LINES:] or ["(empty)"]
        if lines[-1] not in seen.splitlines():
            print(f"--- last lines of {path}", *lines, sep="\n", file=sys.stderr)
            seen = "\n".join((seen, *lines))
    if reports and not REPORT.search(seen):
        print("--- the report of the other workers", reports[0].rstrip(), sep="\n", file=sys.stderr)
    print(f"msrun_launch.sh: {who} {how}; the other workers here were stopped. All logs: {log_dir}", file=sys.stderr)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    main()
