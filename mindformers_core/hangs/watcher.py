"""The watcher: a thread of every rank that ends all ranks with one report when a rank waits beyond the deadline.

A wait in MindSpore releases the interpreter's lock, so that the thread runs meanwhile. Whichever rank notices first
asks the others for their Python stacks (SIGUSR2, answered by `faulthandler` without the interpreter), and posts the
report on the board; every rank writes it to its standard error and ends. Of a rank that can't, since it is stopped or
holds the lock, the poster writes it there and kills the process. Pure Python.
"""

import atexit
import faulthandler
import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

from mindformers_core.hangs.board import ENDED, RAISED, REPORTED, join_board
from mindformers_core.hangs.recorder import Recorder
from mindformers_core.hangs.report import explain_hang

__all__ = ["Watch", "start_watch"]

_POLL = 0.2  # seconds
_DEATH_TIME = 1.0  # seconds that a rank waits for one whose process is gone: an error may come by itself
_BY_ITSELF = 0.5  # seconds in which the main thread may raise the report as an error
_ALL_REPORTED = 1.5  # seconds in which all ranks write the report
_IDLE = 0.3  # part of the time that a process which waits in a compiled function may compute


def start_watch(name, rank, size, timeout, check):
    """Join the board of this host's ranks, and start the watcher.

    Args:
        name: of the job, see `join_board`.
        rank, size: this rank, and the number of all ranks.
        timeout: the deadline in seconds.
        check: as of `Recorder`.

    Returns:
        The `Watch`.
    """
    board, listener = join_board(name, size)
    return Watch(board, listener, rank, timeout, check)


class Watch:
    """The watcher of this rank, and its `recorder`."""

    def __init__(self, board, listener, rank, timeout, check):
        self.board, self.rank, self.timeout, self._listener = board, rank, timeout, listener
        self._stack_file = os.memfd_create("mindformers_core_stack")
        faulthandler.register(signal.SIGUSR2, self._stack_file, all_threads=False, chain=False)
        self.recorder = Recorder(board, rank, self._stack_file, check)
        self._stop, self._posted, self._seen = threading.Event(), False, (None, 0.0)
        self._processes = {}  # descriptor that is readable once the process has ended -> rank
        atexit.register(self._leave)
        threading.Thread(target=self._run, name="hang watcher", daemon=True).start()

    def close(self):
        """Leave the board, at `shutdown()`."""
        self.board.flag(self.rank, ENDED, 1)
        self._stop.set()
        atexit.unregister(self._leave)

    def report(self):
        """The report, which this thread raises as an error: from now on the watcher does not end this process.

        Returns:
            The text; posted first if there is none yet.
        """
        self.board.flag(self.rank, RAISED, 1)
        end = time.monotonic() + _ALL_REPORTED
        while not self.board.verdict and time.monotonic() < end:
            self._posted = self.board.post(self._explain) or self._posted
            time.sleep(0.02)
        self.board.flag(self.rank, REPORTED, 1)
        self._wait_for_others()
        return self.board.verdict

    def _explain(self, with_stacks=True):
        return explain_hang(self.board.states(with_stacks), self.board.size)

    def _leave(self):
        """At the end of the process: MindSpore's own end would wait for ranks that are gone."""
        if os.getpid() != self.board.pid(self.rank):
            return  # a forked process
        self.board.flag(self.rank, ENDED, 1)
        if self.board.verdict:
            self._end()

    def _run(self):
        listeners, poll = [self._listener] * (self._listener is not None), select.poll()
        for listener in listeners:
            poll.register(listener, select.POLLIN)
        while not self._stop.is_set():
            self._watch_processes(poll)
            for descriptor, _ in poll.poll(_POLL * 1000):
                if descriptor in self._processes:
                    poll.unregister(descriptor)
                    self._report_death(self._processes[descriptor])
                else:
                    self.board.pass_on(self._listener)
            if self.board.verdict:
                self._write_report()
                break
            if self._is_late():
                self._posted = self.board.post(self._explain_still_late) or self._posted
        if self._listener is not None:
            self._listener.close()
        faulthandler.unregister(signal.SIGUSR2)
        for descriptor in (self._stack_file, *self._processes):
            os.close(descriptor)
        self.board.close()

    def _watch_processes(self, poll):
        """Watch the processes of ranks that have joined meanwhile."""
        for rank in {*self.board.ranks()} - {self.rank, *self._processes.values()}:
            with suppress(OSError):
                descriptor = os.pidfd_open(self.board.pid(rank))
                self._processes[descriptor] = rank
                poll.register(descriptor, select.POLLIN)

    def _report_death(self, rank):
        """Report a rank that has failed without a word, at once: msrun kills all others within a second."""
        if self.board.exit_code(rank) and not self.board.flag(rank, ENDED):
            self._posted = self.board.post(partial(self._explain, with_stacks=False)) or self._posted
            for other in self.board.ranks() if self._posted else ():
                self._write_report_for(other)

    def _is_late(self):
        """Whether this rank's call has lasted too long, or waits for a rank that is gone."""
        current = self.board.current(self.rank)
        if current is None:
            return False
        if self._seen[0] != current:
            self._seen = current, time.process_time()
        waited = time.monotonic() - current[2]
        if waited < _DEATH_TIME:
            return False
        call = self.board.history(self.rank)[-1]
        lost = self._lost(call, current)
        if lost:
            return True
        if waited < self.timeout or call.kind == "compiling":
            return False
        if call.kind == "compiled":
            return time.process_time() - self._seen[1] < _IDLE * waited
        others = (self.board.history(rank)[-1:] for rank in self.board.ranks())
        return not any(last and last[0].kind == "compiling" and not last[0].done for last in others)

    def _lost(self, call, current):
        """Whether the call needs a rank of this host that is gone and has not issued it."""
        if call.kind == "receive":
            return self.board.state(call.ranks[0]) in ("dead", "ended") if self.board.pid(call.ranks[0]) else False
        gone = ("dead", "ended") if call.ranks else ("dead",)  # a compiled function may need no other rank
        needed = [rank for rank in call.ranks or self.board.ranks() if rank != self.rank and self.board.pid(rank)]
        return any(self.board.state(rank) in gone and not self.board.call(rank, *current[:2]) for rank in needed)

    def _explain_still_late(self):
        """The report; "" where the call has ended while the ranks wrote their stacks."""
        text = self._explain()
        return text if self._is_late() else ""

    def _write_report(self):
        """Write the report to standard error, and end the process, unless the main thread raises it."""
        time.sleep(_BY_ITSELF)
        is_raised = self.board.flag(self.rank, RAISED)
        if not is_raised:
            if not self.board.flag(self.rank, REPORTED):
                os.write(2, f"\n{self.board.verdict}\n".encode())
                self.board.flag(self.rank, REPORTED, 1)
            self._wait_for_others()
            if any(self.board.flag(rank, RAISED) for rank in self.board.ranks()):
                time.sleep(_BY_ITSELF)  # the launcher ends all others with the first rank
            self._end()

    def _wait_for_others(self):
        """Until all ranks have written the report; the poster writes it for those that can't, and kills them."""
        end, unable = time.monotonic() + _ALL_REPORTED + _BY_ITSELF, []
        while rest := [rank for rank in self.board.ranks() if not self.board.flag(rank, REPORTED)]:
            states = {rank: self.board.state(rank) for rank in rest}
            out_of_time = time.monotonic() > end
            if out_of_time and not self._posted or not {"running", "stopped"} & {*states.values()}:
                break
            for rank in rest if self._posted else ():
                if states[rank] == "stopped" or out_of_time and states[rank] == "running":
                    self._write_report_for(rank)
                    unable.append(rank)
            time.sleep(0.02)
        for rank in unable:  # last, since the launcher ends all others with the first rank
            with suppress(OSError):
                os.kill(self.board.pid(rank), signal.SIGKILL)

    def _write_report_for(self, rank):
        with suppress(OSError), open(f"/proc/{self.board.pid(rank)}/fd/2", "a") as log:
            log.write(f"\n{self.board.verdict}\n")
        self.board.flag(rank, REPORTED, 1)

    def _end(self):
        """End the process at once: its threads wait for other ranks."""
        flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
        flush.start()
        flush.join(_BY_ITSELF)  # the main thread may hold the file's lock
        for folder in self.recorder.folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
