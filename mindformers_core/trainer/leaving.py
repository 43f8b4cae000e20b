"""SIGTERM, by which machines announce their end: the job saves after the same step on all ranks, and leaves."""

import os
import signal
import sys
import threading
from contextlib import suppress

from mindformers_core.checkpoint.tensors import ranks_of
from mindformers_core.communication import process_state
from mindformers_core.supervised import FOR_OTHERS


class Leaving:
    """While open as a context, in the main thread, SIGTERM asks all ranks of a mesh, of which this is one, to leave.

    `grace` seconds after the signal this process ends in any case, with code 75.
    """

    def __init__(self, mesh, rank, grace):
        self._ranks, self._is_alone, self._grace = ranks_of(mesh, rank), mesh.size == 1, grace
        self._asked, self._before, self._watch = False, None, process_state().watch
        self._board = self._watch and self._watch.board

    def __enter__(self):
        with suppress(ValueError):  # no main thread
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(self, *_):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        if self._board is not None:
            self._board.forget_steps(self._ranks.rank)

    def _hear(self, number, frame):
        if self._asked:  # launchers pass on what every process of a job may have got
            return
        self._asked = True
        if self._board is not None:
            self._board.ask_to_leave(self._ranks.rank)
        end = threading.Timer(self._grace, os._exit, (FOR_OTHERS,))
        end.daemon = True
        end.start()

    def is_due(self, step, gathers):
        """Whether to leave after a step; all ranks ask after each, and get one answer: on one host without
        communication, else in a step that `gathers` anyway.
        """
        if self._is_alone:
            return self._asked
        if self._board is not None and len(self._board.ranks()) == self._board.size:
            return self._board.leave_after(self._ranks.rank, step)
        return gathers and any(self._ranks.gather(self._asked).values())

    def leave(self, step, newest):
        """End this process by `SystemExit`, with code 75, when all ranks have come here; `newest`: the checkpoint."""
        self._ranks.gather(None)
        if self._ranks.rank == 0:
            print(f"SIGTERM: the job leaves after step {step}; its newest checkpoint is {newest}", flush=True)
        if self._watch:
            self._watch.job_leaves = True
        sys.exit(FOR_OTHERS)
