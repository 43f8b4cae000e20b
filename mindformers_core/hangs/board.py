"""The board: shared memory in which every rank of a host writes what it issues. Pure Python.

A file without a name (`memfd`), which ends with its ranks. The first rank makes it; the others open it by its
descriptor in that process, which a small file names. A rank writes to its own slot only. Times are of the monotonic
clock, which all processes of a host share.
"""

import ctypes
import fcntl
import mmap
import os
import re
import signal
import tempfile
import time
from ast import literal_eval
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property

from mindformers_core.hangs.records import Issued, RankState
from mindformers_core.hangs.report import explain_hang

RING, MOST_TEXT, _REPORT = 32, 1 << 15, 1 << 16  # records of a slot; bytes: of a record's text, of the report
MOST_ERROR = 1 << 10  # bytes of a rank's error
_REPORTING, _STEPS = (1, 0), (1, 1)  # length and place of what is locked in the file
_STACK_TIME = 0.5  # seconds in which a rank writes its stack
_STATES = {"": "dead", "Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}  # by the letter of `process_state`


class _Record(ctypes.Structure):
    """What a rank has issued, in its `with` block whether the neighbours agree; done at the end of the block. `waited`
    are the seconds of all blocks so far, but those of the start and of compiled functions.
    """

    _fields_ = [
        ("group", ctypes.c_uint64), ("number", ctypes.c_uint64), ("signature", ctypes.c_uint64),
        ("since", ctypes.c_double), ("computed", ctypes.c_double), ("waited", ctypes.c_double), ("done", ctypes.c_bool),
        ("kind", ctypes.c_char * 16), ("text", ctypes.c_char * MOST_TEXT),
    ]  # fmt: skip
    agrees = True

    def __enter__(self):
        return self.agrees

    def __exit__(self, *error):
        self.done = True
        if self.kind in (b"", b"receive"):
            self.waited += time.monotonic() - self.since


class _Slot(ctypes.Structure):
    """What one rank writes. `pid` is 0 until the rank joins, `stack_file` a descriptor of that process; `step` the last
    one that it has done, `leaves_after` that after which it asks all ranks to leave, 0: none.
    """

    _fields_ = [
        ("pid", ctypes.c_int64), ("stack_file", ctypes.c_int64), ("count", ctypes.c_uint64), ("ended", ctypes.c_bool),
        ("raised", ctypes.c_bool), ("reported", ctypes.c_bool), ("error", ctypes.c_char * MOST_ERROR),
        ("step", ctypes.c_int64), ("leaves_after", ctypes.c_int64),
        ("_ring", _Record * RING),
    ]  # fmt: skip

    @cached_property
    def ring(self):
        return [*self._ring]


class _Report(ctypes.Structure):
    """The report, complete once its `poster` is set: a rank + 1."""

    _fields_ = [("poster", ctypes.c_int64), ("text", ctypes.c_char * _REPORT)]


def process_state(pid):
    """The kernel's letter for a process's state, its exit code (negative: a signal's number) where it has ended and
    nobody has noticed, else 0, and CPU seconds of all its threads; `("", 0, 0.0)` where there is none.
    """
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        letter, *fields, status = file.read().rpartition(")")[2].split()
        status = int(status) if letter in "ZX" else 0  # that of a stopped process is the signal
        seconds = sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK")  # of the user and the system
        return letter, -(status & 0x7F) or status >> 8, seconds
    return "", 0, 0.0


def join_board(name, size):
    """The `Board` of the ranks of this host that give the same name. `hide()` removes the file by which they find it.

    Args:
        name: of the job, unique on this host among the jobs that run.
        size: number of all ranks of the job.
    """
    name = f"mindformers_core.{os.getuid()}.{name}"
    path = os.path.join(tempfile.gettempdir(), name)
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as finder:
        fcntl.lockf(finder, fcntl.LOCK_EX)
        shared = finder.read()
        with suppress(OSError):  # no such process or file: of a job that was killed
            if os.readlink(shared).startswith(f"/memfd:{name} "):
                return Board(os.open(shared, os.O_RDWR), size, path)
        file = os.memfd_create(name)
        finder.truncate(0)
        finder.seek(0)
        finder.write(f"/proc/{os.getpid()}/fd/{file}")
        return Board(file, size, path)


class Board:
    """The slots of all ranks, of which those of this host are in use, and the report once there is one.

    Args:
        file: descriptor of the shared memory, which the board owns.
        size: number of all ranks of the job.
        path: file by which the ranks find the board.

    Attributes:
        slots: of every rank what it writes: process, flags, records.
    """

    def __init__(self, file, size, path):
        self.file, self.size, self.path = file, size, path
        bytes_needed = ctypes.sizeof(_Report) + size * ctypes.sizeof(_Slot)
        os.ftruncate(file, bytes_needed)  # no effect on a file that has the size
        memory = mmap.mmap(file, bytes_needed)
        self._report = _Report.from_buffer(memory)
        self.slots = list((_Slot * size).from_buffer(memory, ctypes.sizeof(_Report)))

    def hide(self):
        """Remove the file by which ranks find the board."""
        with suppress(OSError):
            os.unlink(self.path)

    def ranks(self):
        """The ranks of this host that have joined, ascending."""
        return [rank for rank, slot in enumerate(self.slots) if slot.pid]

    def state(self, rank):
        """`(state, exit code)` of a rank, see `RankState`. The code is 0 once the launcher has noticed the end."""
        if self.slots[rank].ended:
            return "ended", 0
        letter, code, _ = process_state(self.slots[rank].pid)
        return _STATES.get(letter, "running"), code

    def computed(self, rank):
        """CPU seconds for a second that a rank has been in a compiled function; 0 outside of one."""
        record = self.current(rank)
        if record is None or record.kind != b"compiled":
            return 0.0
        letter, _, seconds = process_state(self.slots[rank].pid)
        return (seconds - record.computed) / (time.monotonic() - record.since) if letter else 0.0

    def history(self, rank):
        """The last `Issued` of a rank, oldest first."""
        slot, issued = self.slots[rank], []
        for place in range(max(0, slot.count - RING), slot.count):
            record = slot.ring[place % RING]
            with suppress(ValueError, SyntaxError, TypeError):  # a text that is overwritten meanwhile
                fields = literal_eval(record.text.decode())
                issued.append(Issued(rank, record.number if record.group else None, *fields, done=record.done))
        return tuple(issued)

    def current(self, rank):
        """The record of the call that a rank is in; None where it is in none."""
        slot = self.slots[rank]
        record = slot.ring[(slot.count - 1) % RING]
        return None if record.done or not slot.count else record

    def stack(self, rank):
        """The Python stack of a rank's main thread, innermost first, as `file:line in function`; () if it can't say."""
        slot, text, end = self.slots[rank], "", time.monotonic() + _STACK_TIME
        with suppress(OSError):
            os.kill(slot.pid, signal.SIGUSR2)
            while "File" not in text and time.monotonic() < end:
                time.sleep(0.02)
                with open(f"/proc/{slot.pid}/fd/{slot.stack_file}", errors="replace") as file:
                    text = file.read()
        frames = [
            f"{file}:{rest}" for file, rest in re.findall(r'^\s*File "(.*)", line (\d+ in .*)$', text, re.MULTILINE)
        ]
        return tuple([frame for frame in frames if "/site-packages/mindspore/" not in frame] or frames)

    def states(self):
        """A `RankState` of every rank of this host; running ranks that are in no call write their stacks."""
        states = []
        for rank in self.ranks():
            name, code = self.state(rank)
            error, computed = self.slots[rank].error.decode(errors="replace"), self.computed(rank)
            state = RankState(rank, name, self.history(rank), exit_code=code, error=error, computed=computed)
            is_in_python = name == "running" and not state.current and not error
            states.append(replace(state, stack=self.stack(rank)) if is_in_python else state)
        if any(state.current and state.current.kind == "start" for state in states):
            states += [RankState(rank, "absent") for rank in {*range(self.size)}.difference(self.ranks())]
        return states

    @property
    def report(self):
        """The report; "" before there is one."""
        return self._report.text.decode(errors="replace") if self._report.poster else ""

    def is_poster(self, rank):
        """Whether a rank has posted the report."""
        return self._report.poster == rank + 1

    def post(self, rank, is_needed=lambda: True):
        """Post the report, unless there is one, or another rank makes it, or it is no longer needed when it is made.

        Returns:
            Whether this rank has posted it.
        """
        with suppress(BlockingIOError), self._locked(_REPORTING, fcntl.LOCK_NB):
            try:
                text = "" if self.report else explain_hang(self.states(), self.size)
            except Exception as error:  # all ranks have to end, whatever they have written
                text = f"a rank waits beyond its deadline, and the report of it has failed: {error!r}"
            if text and is_needed():
                self._report.text = text.encode()[: _REPORT - 1]
                self._report.poster = rank + 1
                self.hide()  # the ranks may be killed now
        return self.is_poster(rank)

    def ask_to_leave(self, rank):
        """Ask all ranks, for a rank, to leave after the first step that none of them has ended yet."""
        with self._locked(_STEPS):
            own = self.slots[rank]
            own.leaves_after = own.leaves_after or 1 + max(slot.step for slot in self.slots)

    def leave_after(self, rank, step):
        """Whether the ranks of this host leave after a step, which a rank has ended: one answer on all of them."""
        with self._locked(_STEPS):
            self.slots[rank].step = step
            return any(0 < slot.leaves_after <= step for slot in self.slots)

    def forget_steps(self, rank):
        """A rank has left, or done all steps."""
        self.slots[rank].step = self.slots[rank].leaves_after = 0

    @contextmanager
    def _locked(self, what, how=0):
        fcntl.lockf(self.file, fcntl.LOCK_EX | how, *what)
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, *what)
