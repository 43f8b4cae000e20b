"""The processes of a launch: their end with their parent, and that of all."""

import ctypes
import signal
import time
from contextlib import suppress

import psutil

from mindformers_core.hangs.board import process_state

_PARENT_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def become_subreaper():
    """What a child of this process has started becomes a child of this process when that one ends."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def end_with_parent():
    """This process gets SIGTERM when its parent ends, whatever ends that."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def kill_children():
    """Kill everything that this process has started, also what begins meanwhile."""
    for _ in range(20):
        running = [each for each in psutil.Process().children(recursive=True) if process_state(each.pid)[0] not in "Z"]
        for child in running:
            with suppress(psutil.Error):
                child.kill()
        if not running:
            break
        time.sleep(0.05)
