"""The processes of a launch: whose child is which, which of them have ended, and how; the end of all."""

import ctypes
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

SCHEDULER = "scheduler"
_PARENT_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def become_subreaper():
    """What a child of this process has started becomes a child of this process when that one ends."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def end_with_parent():
    """This process gets SIGTERM when its parent ends, whatever ends that."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def is_gone(pid):
    """Whether a process has ended by a signal, or is stopped by one."""
    state, status = _state(pid)
    return state == "T" or state == "Z" and bool(status & 127)


def _state(pid):
    """The kernel's letter for a process's state, and its status as of waitpid(2); `("", 0)` where there is none."""
    with suppress(OSError):
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(status)
    return "", 0


def process_ranks(msrun_pid):
    """`{pid: rank}` of msrun's living workers, as their environments say; and `{SCHEDULER: pid}`."""
    ranks = {}
    for child in children(msrun_pid):
        with suppress(psutil.Error):
            environment = child.environ()
            if environment.get("MS_ROLE") == "MS_WORKER" and environment.get("RANK_ID", "").isdigit():
                ranks[child.pid] = int(environment["RANK_ID"])
            elif environment.get("MS_ROLE") == "MS_SCHED":
                ranks[SCHEDULER] = child.pid
    return ranks


def failed_workers(ranks):
    """`(rank, exit code)` of workers that have failed, and that msrun hasn't noticed yet; first those of a signal."""
    states = [(rank, *_state(pid)) for pid, rank in ranks.items()]
    found = [(rank, -(status & 127) or status >> 8) for rank, state, status in states if state == "Z" and status]
    return sorted(found, key=lambda failure: failure[1] > 0)


def children(pid, recursive=False):
    """Child processes of `pid`; none if it is gone."""
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=recursive)
    return []


def kill_children(pid):
    """Kill everything that `pid` has started, also what begins meanwhile."""
    for _ in range(20):
        running = [child for child in children(pid, recursive=True) if _state(child.pid)[0] not in ("Z", "")]
        if not running:
            break
        for child in running:
            with suppress(psutil.Error):
                child.kill()
        time.sleep(0.05)
