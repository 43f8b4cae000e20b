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
from traceback import extract_tb

from mindformers_core.hangs.board import MOST_ERROR, join_board
from mindformers_core.hangs.recorder import Recorder
from mindformers_core.hangs.report import own_frame
from mindformers_core.supervised import FOR_OTHERS, tell_end

_POLL = 0.2  # seconds
_BY_ITSELF = 0.5  # seconds in which the main thread may raise the report as an error
_ALL_REPORTED = 2.0  # seconds in which all ranks write the report
_RAISED = 6.0  # seconds that an error waits for the report at most
_IDLE = 0.3  # CPU seconds in a second that a rank which waits in a compiled function takes at most
_START = 30.0  # least deadline in seconds of the start, which differs by as much on a busy machine
_BEGUN = 1.0  # seconds in which other ranks begin to wait for one that fails


class Watch:
    """The watcher of this rank, and its `recorder`.

    Args:
        name: of the job, see `join_board`.
        rank, size: this rank, and the number of all ranks.
        timeout: the deadline in seconds.
        check: as of `Recorder`.
    """

    def __init__(self, name, rank, size, timeout, check):
        self.board, self.rank, self.timeout = join_board(name, size), rank, timeout
        stack_file = os.memfd_create("mindformers_core_stack")
        faulthandler.register(signal.SIGUSR2, stack_file, all_threads=False, chain=False)
        self.recorder = Recorder(self.board, rank, stack_file, check)
        self._slot, self._is_open = self.recorder.slot, True
        self._code, self.job_leaves = FOR_OTHERS, False  # exit code where there is a report, or all ranks leave
        self._processes = {}  # descriptor that is readable once the process has ended -> rank
        self._thread = threading.Thread(target=self._run, name="hang watcher", daemon=True)
        self._thread.start()
        self._hook = sys.excepthook
        atexit.register(self._leave)

    def await_ranks(self, purpose):
        """Wait until all ranks, which are on this host, have joined: MindSpore's own wait would stop the watcher."""
        with self.recorder.waiting("start", tuple(range(self.board.size)), purpose):
            while len(self.board.ranks()) < self.board.size:
                time.sleep(_POLL / 4)

    def hear_errors(self):
        """Tell other ranks of an error that ends this one: once MindSpore has set its own `sys.excepthook`, to join."""
        self._hook, sys.excepthook = sys.excepthook, self._end_by

    def close(self):
        """Leave the board, at `shutdown()`."""
        self._slot.ended, self._is_open = True, False
        self.board.hide()
        sys.excepthook = self._hook
        atexit.unregister(self._leave)
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR2)
        for descriptor in (self.board.file, self._slot.stack_file, *self._processes):
            os.close(descriptor)

    def report(self):
        """The report, which this thread raises as an error: from now on the watcher does not end this process.

        Returns:
            The text; posted first if there is none yet.
        """
        self._slot.raised = True
        self._thread.join(_RAISED)
        return self.board.report

    def fail(self, error, code):
        """Tell the ranks that wait for this one of the error that ends it, and wait until they have said so.

        Returns:
            The exit code: `code`; 75 where a report has ended this rank before, which `error` is then of.
        """
        if self.board.report:
            self._slot.raised = True
            self._tell_report()
            return self._code
        self._code = code
        frames = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in extract_tb(error.__traceback__)]
        name, text = type(error).__name__, " ".join(str(error).split())[: MOST_ERROR // 4]
        tell_end(f"{name}: {text}", code)
        self._slot.error = f"{name}: {text} (at {own_frame(frames[::-1])})".encode()[: MOST_ERROR - 1]
        self._slot.raised = True
        self._thread.join(_BEGUN)
        self._thread.join(_RAISED if self.board.report else 0)
        return code

    def _end_by(self, kind, error, traceback):
        """The process's `sys.excepthook`."""
        self._hook(kind, error, traceback)
        if os.getpid() == self._slot.pid and issubclass(kind, Exception):
            self.fail(error, 1)  # Python's exit code

    def _leave(self):
        """At the end of the process: MindSpore's own end would wait for ranks, or a scheduler, that are gone."""
        if os.getpid() == self._slot.pid:  # no forked process
            self._slot.ended = True
            self.board.hide()
            if self.board.report or self.job_leaves:
                self._end()

    def _run(self):
        poll = select.poll()
        while self._is_open and not self.board.report:
            for rank in {*self.board.ranks()} - {self.rank, *self._processes.values()}:
                with suppress(OSError):
                    descriptor = os.pidfd_open(self.board.slots[rank].pid)
                    self._processes[descriptor] = rank
                    poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(_POLL * 1000):
                poll.unregister(descriptor)
                self._report_death(self._processes[descriptor])
            if self._is_late():
                self.board.post(self.rank, self._is_late)  # not if the call ends while the ranks write their stacks
        if self.board.report:
            self._write_report()

    def _report_death(self, rank):
        """Report a rank that has failed without a word, at once: msrun kills all others within a second."""
        _, exit_code = self.board.state(rank)
        if exit_code and self.board.post(self.rank):
            for other in self.board.ranks():
                self._write_report_for(other)

    def _is_late(self):
        """Whether this rank's call has lasted too long, or has failed."""
        calls = {rank: self.board.current(rank) for rank in self.board.ranks()}
        own = calls[self.rank]
        if self._slot.error:
            return any(call and rank != self.rank for rank, call in calls.items())
        if self._slot.raised:
            return True
        waited = time.monotonic() - own.since if own else 0.0
        if waited < (max(self.timeout, _START) if own and own.kind == b"start" else self.timeout):
            return False
        if own.kind == b"compiled":
            return self.board.computed(self.rank) < _IDLE
        return not any(call and call.kind == b"compiling" for call in calls.values())

    def _write_report(self):
        """Write the report to standard error, and end the process, unless the main thread raises it."""
        time.sleep(_BY_ITSELF)
        if not (self._slot.raised or self._slot.reported):
            os.write(2, f"\n{self.board.report}\n".encode())
        self._slot.reported = True
        self._wait_for_others()
        if not self._slot.raised:
            self._end()

    def _wait_for_others(self):
        """Until all ranks have written the report; the poster writes it for those that can't, and kills them."""
        is_poster = self.board.is_poster(self.rank)
        waits_for = ("running",) if is_poster else ("running", "stopped")
        end = time.monotonic() + _ALL_REPORTED + (0 if is_poster else _BY_ITSELF)
        while self._silent(waits_for) and time.monotonic() < end:
            time.sleep(0.02)
        unable = self._silent(("running", "stopped")) if is_poster else ()
        for rank in unable:
            self._write_report_for(rank)
        for rank in unable:  # last, since the launcher ends all others with the first rank
            with suppress(OSError):
                os.kill(self.board.slots[rank].pid, signal.SIGKILL)

    def _silent(self, states):
        """The ranks in some states that have not written the report."""
        ranks = [rank for rank in self.board.ranks() if not self.board.slots[rank].reported]
        return [rank for rank in ranks if self.board.state(rank)[0] in states]

    def _write_report_for(self, rank):
        slot = self.board.slots[rank]
        with suppress(OSError), open(f"/proc/{slot.pid}/fd/2", "a") as log:
            log.write(f"\n{self.board.report}\n")
        slot.reported = True

    def _end(self):
        """End the process at once, after that which has failed: its threads wait for other ranks."""
        self._tell_report()
        end = time.monotonic() + _ALL_REPORTED * (self._code == FOR_OTHERS)
        failing, runs = [rank for rank in self.board.ranks() if self.board.slots[rank].error], ("running", "ended")
        while any(self.board.state(rank)[0] in runs for rank in failing) and time.monotonic() < end:
            time.sleep(0.02)
        if self._code == FOR_OTHERS and any(slot.raised for slot in self.board.slots):
            time.sleep(_BY_ITSELF)  # the launcher looks now and then, and ends all others with the first that it sees
        flush = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
        flush.start()
        flush.join(_BY_ITSELF)  # the main thread may hold the file's lock
        for folder in self.recorder.folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(self._code)

    def _tell_report(self):
        if self._code == FOR_OTHERS and self.board.report:
            tell_end(self.board.report.partition("\n")[0], self._code)
