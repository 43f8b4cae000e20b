"""Starts workers as msrun does, shows this machine's first one, and fails when one fails. `msrun_launch.sh` calls this.

msrun itself waits for its scheduler after a worker has failed: 30 s if the ranks had met, CLUSTER_TIME_OUT (7200 s) if
they had not. It kills all others at once, and leaves workers running when it is terminated. Here the others get a few
seconds for their reports, SIGTERM is passed on to workers, and nothing that was started stays behind.
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
from pathlib import Path

from processes import become_subreaper, kill_children

from mindformers_core.hangs.board import process_state
from mindformers_core.supervised import FOLDER, FOR_OTHERS

POLL_SECONDS = 0.2
OTHERS_SECONDS = 3  # of the other workers, after one has failed
GRACE = os.environ.get("GRACE") or "40"  # seconds after SIGTERM, more than checkpoint.grace
LAST_LINES = 30
NUMBERS = ("worker_num", "local_worker_num", "master_port", "node_rank", "cluster_time_out")  # msrun's options
SCHEDULER = "scheduler"  # beside ranks
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
        args.master_addr, args.master_port = check_address(args)
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


def check_address(args):
    """The scheduler's address and port; on its machine after trying to listen there: a free port for 0.

    Raises:
        ValueError: the address isn't known or isn't this machine's, or the port is in use.
    """
    address, port = args.master_addr, args.master_port
    try:
        family, _, _, _, target = min(socket.getaddrinfo(address.strip("[]"), port, type=socket.SOCK_STREAM))
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR {address!r} is no address known here: {error.strerror}") from error

    def listen_once(port):
        with socket.create_server((target[0], port), family=family) as probe:
            return probe.getsockname()[1]

    try:
        return target[0], listen_once(port) if args.node_rank == 0 else port
    except PermissionError as error:
        raise ValueError(f"MASTER_PORT {port} on {address}: not allowed to listen there") from error
    except OSError as error:
        try:
            free = listen_once(0)
        except OSError:
            one_machine = args.local_worker_num == args.worker_num
            advice = "leave it out" if one_machine else "start NODE_RANK 0 on the machine with that address"
            raise ValueError(f"MASTER_ADDR {address} is not an address of this machine: {advice}") from error
        raise ValueError(
            f"MASTER_PORT {port} on {address} is in use (another job, perhaps): {free} is free; 0 takes a free one"
        ) from error


def run(args):
    """Start the workers and see them through. Returns the exit code for the shell."""
    first = args.node_rank * args.local_worker_num
    logs = {rank: args.log_dir / f"worker_{rank}.log" for rank in range(first, first + args.local_worker_num)}
    args.log_dir.mkdir(parents=True, exist_ok=True)
    for log in args.log_dir.glob("worker_*.log"):  # of an earlier launch of more
        if (number := log.stem.removeprefix("worker_")).isdecimal() and int(number) >= args.worker_num:
            log.unlink(missing_ok=True)
    become_subreaper()
    print(f"{args.local_worker_num} of {args.worker_num} workers start here, logs in {args.log_dir}", flush=True)
    ending = []  # once workers are asked to leave, the time when those that haven't left are killed

    def hear(number, frame):
        if number != signal.SIGTERM or ending:  # the second one ends all at once
            sys.exit(128 + number)
        ending.append(time.monotonic() + int(GRACE))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hear)
    if args.join == "False":
        start(args, logs)
        return 0
    follower = Follower(logs[first])
    try:
        processes = start(args, logs)
        failures = watch(processes, follower, ending)
    finally:
        kill_children()
    follower.show(last=True)
    failures = failures or {who: process.returncode for who, process in processes.items() if process.wait()}
    began = min(failures.items(), key=lambda failure: failure[1] == FOR_OTHERS, default=None)
    return report(*began, args.log_dir, logs) if began else 0


def start(args, logs):
    """The processes, by rank, of the workers of this machine, and of the scheduler on the first one, `SCHEDULER`.

    Output is unbuffered, so that logs are live and a killed worker's last lines are kept; MindSpore's own log is quiet
    unless GLOG_v is set.
    """
    job = {"MS_WORKER_NUM": args.worker_num, "RANK_SIZE": args.worker_num, "MS_TOPO_TIMEOUT": args.cluster_time_out}
    job |= {"MS_SCHED_HOST": args.master_addr, "MS_SCHED_PORT": args.master_port, "PYTHONUNBUFFERED": 1}
    own = {
        rank: {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": rank, "RANK_ID": rank, "DEVICE_ID": device}
        for device, rank in enumerate(logs)
    }
    if args.node_rank == 0:
        own[SCHEDULER] = {"MS_ROLE": "MS_SCHED", "RANK_ID": 0}
    found = {}
    for who, given in own.items():
        variables = {name: str(value) for name, value in (job | given).items()}
        with logs.get(who, args.log_dir / "scheduler.log").open("w") as log:
            found[who] = subprocess.Popen(
                [sys.executable, *args.command], env={"GLOG_v": "3", **os.environ, **variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
    return found


def watch(processes, follower, ending):
    """Wait until all have ended, or are to be killed. Returns `{rank: exit code}` of those that failed, in this order.

    Under a supervisor workers leave, and are started again, where the scheduler is gone: without it they fail at their
    end. `ending`: a list, which has the time of their end once workers are to leave. No process is reaped:
    watchers read exit codes, too.
    """
    failures, deadline, asked = {}, math.inf, False
    workers, running = [who for who in processes if who != SCHEDULER], processes
    while running and time.monotonic() < min([deadline, *ending]):
        time.sleep(POLL_SECONDS)
        follower.show()
        states = {who: process_state(process.pid) for who, process in processes.items()}
        letter, code, _ = states.get(SCHEDULER, ("", 0, 0))
        if FOLDER in os.environ and not (ending or failures) and (letter == "T" or code < 0):
            print("msrun_launch.sh: the scheduler is gone: workers leave", file=sys.stderr)
            failures[SCHEDULER] = -signal.SIGKILL
            processes[SCHEDULER].kill()  # ranks that leave would wait for one that is stopped
            ending.append(time.monotonic() + int(GRACE))
        if ending and not asked:
            asked = True
            for who in workers:
                os.kill(processes[who].pid, signal.SIGTERM)
        failed = [(who, states[who][1]) for who in workers if states[who][1]]
        for who, code in sorted(failed, key=lambda failure: failure[1] > 0):  # others may have failed of a signal's
            failures.setdefault(who, code)
        if failed:
            deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
        running = [who for who in (workers if failures else processes) if states[who][0] not in "ZX"]
    return failures


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


def report(rank, code, log_dir, logs):
    """Tell what failed: the last lines of its log, and of others that failed by themselves, and the report of a hang.

    What the first worker has written is shown already. Returns the exit code for the shell.
    """
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    who, shown = (f"worker {rank}", logs[rank]) if rank in logs else ("the scheduler", log_dir / "scheduler.log")
    texts = {path: "\n".join(readable_lines(path.read_bytes())) for path in (shown, *logs.values()) if path.exists()}
    reports = [found[0] for text in texts.values() if (found := REPORT.search(text))]
    if code == FOR_OTHERS:
        how += ", for others that failed or wait" if reports else ", as SIGTERM asks"
    seen = texts.get(next(iter(logs.values())), "")  # of the first worker
    for path in [shown, *(path for path, text in texts.items() if CAUSE.search(text) and not REPORT.search(text))]:
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
