"""The board: shared memory in which every rank of a host writes what it issues. Pure Python.

A file without a name (`memfd`), which ends with its ranks. The first rank makes it and passes it to the others over a
Unix-domain socket without a file. A rank writes to its own slot only: a ring of its last records, a table by which the
other ranks look up one call of one group, and the texts that the records refer to. Times are of the monotonic clock,
which all processes of a host share.
"""

import fcntl
import json
import mmap
import os
import signal
import socket
import struct
import threading
import time
from contextlib import suppress

from mindformers_core.hangs.records import Issued, RankState

__all__ = ["ENDED", "RAISED", "REPORTED", "Board", "Slot", "join_board"]

_HEAD = struct.Struct("<qqQ")  # pid, file descriptor of the stack, records written
_FLAGS, ENDED, REPORTED, RAISED = 24, 0, 1, 2  # offset of a slot's flags; which flag
_COUNT = struct.Struct("<Q")  # the last field of the head
_RECORD, _RING_AT, _RING = struct.Struct("<QQdII"), 64, 32  # group, number, time, offset of the text, whether done
_CALL, _TABLE_AT, _GROUPS, _CALLS = struct.Struct("<QQQ"), 2048, 32, 8  # group, signature, number + 1
_TEXT_AT, _SLOT = 8192, 1 << 18
_VERDICT = 1 << 16  # bytes at the beginning of the board: length and text of the report
_CONNECT_TIMEOUT, _PAUSE = 10.0, 0.05  # seconds
_NO_CALLS = ("receive", "compiled", "compiling")  # kinds without a number
_STACK_TIME = 0.5  # seconds in which a rank writes its stack


def join_board(name, size):
    """The `Board` of the ranks of this host that give the same name, and the listener that passes it on, or None.

    Args:
        name: of the job, unique on this host among the jobs that run.
        size: number of all ranks of the job.

    Raises:
        TimeoutError: a process holds the name and doesn't answer.
    """
    address, deadline = b"\0mindformers_core.board." + name.encode(), time.monotonic() + _CONNECT_TIMEOUT
    while True:
        listener = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            listener.bind(address)
            listener.listen(size)
            return Board(os.memfd_create("mindformers_core_board"), size), listener
        listener.close()
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(address)
            _, files, _, _ = socket.recv_fds(connection, 1, 1)
            if files and _is_own_user(connection):
                return Board(files[0], size), None
        if time.monotonic() > deadline:
            raise TimeoutError(f"the board '{name}' of this host's ranks can't be joined for {_CONNECT_TIMEOUT:g} s")
        time.sleep(_PAUSE)


def _is_own_user(connection):
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


class Board:
    """The slots of all ranks, of which those of this host are in use, and the report once there is one.

    Args:
        file: descriptor of the shared memory, which the board owns.
        size: number of all ranks of the job.
    """

    def __init__(self, file, size):
        self.file, self.size = file, size
        os.ftruncate(file, _VERDICT + size * _SLOT)  # no effect on a file that has the size
        self.memory = mmap.mmap(file, _VERDICT + size * _SLOT)
        self._posting = threading.Lock()

    def pass_on(self, listener):
        """Pass the board to a rank that connects to the listener."""
        with suppress(OSError), listener.accept()[0] as connection:
            if _is_own_user(connection):
                socket.send_fds(connection, [b"b"], [self.file])

    def slot(self, rank):
        """Where the slot of a rank begins."""
        return _VERDICT + rank * _SLOT

    def ranks(self):
        """The ranks of this host, ascending."""
        return [rank for rank in range(self.size) if self.pid(rank)]

    def pid(self, rank):
        """The process of a rank, 0 where the rank has not joined."""
        return _HEAD.unpack_from(self.memory, self.slot(rank))[0]

    def flag(self, rank, which, value=None):
        """A flag of a rank; sets it if a value is given."""
        at = self.slot(rank) + _FLAGS + which
        if value is not None:
            self.memory[at] = value
        return bool(self.memory[at])

    def state(self, rank):
        """`"running"`, `"stopped"`, `"dead"` or `"ended"`, see `RankState`."""
        if self.flag(rank, ENDED):
            return "ended"
        letter = self._process_fields(rank)[0]
        return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "running")

    def exit_code(self, rank):
        """How a rank's process has ended, while its launcher has not noticed: the code, minus a signal's number.

        0 for a process that runs, or that is gone altogether.
        """
        status = int(self._process_fields(rank)[-1])
        return -(status & 0x7F) or status >> 8

    def _process_fields(self, rank):
        """The fields of a rank's process as the kernel shows them: the first is its state, the last its wait status."""
        try:
            with open(f"/proc/{self.pid(rank)}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return "X", "0"

    def history(self, rank):
        """The last `Issued` of a rank, oldest first."""
        count, begin, now = _HEAD.unpack_from(self.memory, self.slot(rank))[2], self.slot(rank), time.monotonic()
        issued = []
        for place in range(max(0, count - _RING), count):
            at = begin + _RING_AT + place % _RING * _RECORD.size
            _, number, since, text, done = _RECORD.unpack_from(self.memory, at)
            length = int.from_bytes(self.memory[begin + text : begin + text + 4], "little")
            with suppress(ValueError, TypeError):  # a text that was overwritten meanwhile
                known = json.loads(self.memory[begin + text + 4 : begin + text + 4 + length])
                known = {key: tuple(value) if isinstance(value, list) else value for key, value in known.items()}
                number = number if known["kind"] not in _NO_CALLS else None
                issued.append(Issued(rank, number, done=bool(done), seconds=now - since, **known))
        return tuple(issued)

    def current(self, rank):
        """`(group, number, time)` of the call that a rank is in; None where it is in none."""
        begin = self.slot(rank)
        count = _HEAD.unpack_from(self.memory, begin)[2]
        if not count:
            return None
        *known, _, done = _RECORD.unpack_from(self.memory, begin + _RING_AT + (count - 1) % _RING * _RECORD.size)
        return None if done else tuple(known)

    def call(self, rank, group, number):
        """The signature with which a rank has issued a call of a group; 0 where it has not, or long ago."""
        entry = group % _GROUPS * _CALLS + number % _CALLS
        known, signature, stored = _CALL.unpack_from(self.memory, self.slot(rank) + _TABLE_AT + entry * _CALL.size)
        return signature if known == group and stored == number + 1 else 0

    def stack(self, rank):
        """The Python stack of a rank's main thread, innermost first, as `file:line in function`; () if it can't say."""
        pid, descriptor, _ = _HEAD.unpack_from(self.memory, self.slot(rank))
        text, end = "", time.monotonic() + _STACK_TIME
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
            while "File" not in text and time.monotonic() < end:
                time.sleep(0.02)
                with open(f"/proc/{pid}/fd/{descriptor}", errors="replace") as file:
                    text = file.read()
        frames = [line.strip().split('"') for line in text.splitlines() if line.strip().startswith("File")]
        frames = [f"{file}:{rest.partition('line ')[2]}" for _, file, rest in frames]
        return tuple([frame for frame in frames if "/site-packages/mindspore/" not in frame] or frames)

    def states(self, with_stacks=True):
        """A `RankState` of every rank of this host; running ranks that are in no call write their stacks."""
        states = []
        for rank in self.ranks():
            state, history = self.state(rank), self.history(rank)
            in_python = state == "running" and not (history and not history[-1].done)
            stack = self.stack(rank) if in_python and with_stacks else ()
            code = self.exit_code(rank) if state == "dead" else 0
            states.append(RankState(rank, state, history, stack, code))
        return states

    @property
    def verdict(self):
        """The report; "" before there is one."""
        length = int.from_bytes(self.memory[:4], "little")
        return self.memory[8 : 8 + length].decode(errors="replace")

    def post(self, make_text):
        """Post the report that `make_text()` returns, unless there is one or another rank makes it.

        Returns:
            Whether this rank has posted.
        """
        if not self._posting.acquire(blocking=False):  # by another thread of this process, for which the file is free
            return False
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = "" if self.verdict else make_text()
            encoded = text.encode()[: _VERDICT - 8]
            if encoded:
                self.memory[8 : 8 + len(encoded)] = encoded
                self.memory[:4] = len(encoded).to_bytes(4, "little")
            fcntl.lockf(self.file, fcntl.LOCK_UN)
            return bool(encoded)
        except BlockingIOError:
            return False
        finally:
            self._posting.release()

    def close(self):
        """Leave the file, which ends with its last rank."""
        os.close(self.file)


class Slot:
    """What this rank writes.

    Args:
        board: the `Board`.
        rank: this rank.
        stack_file: descriptor of the file to which this process writes its stack.

    Attributes:
        texts: key -> where its text lies, as `write_text` returns it; emptied when there is no more room.
    """

    def __init__(self, board, rank, stack_file):
        self.memory, self.begin, self.count, self._text_end = board.memory, board.slot(rank), 0, _TEXT_AT
        self.texts = {}
        _HEAD.pack_into(self.memory, self.begin, os.getpid(), stack_file, 0)

    def write_text(self, key, known):
        """Write the fields of an `Issued`, a dict, and enter their place under a key; the oldest texts may be lost."""
        encoded = json.dumps(known).encode()[: _SLOT - _TEXT_AT - 4]
        if self._text_end + 4 + len(encoded) > _SLOT:
            self.texts.clear()
            self._text_end = _TEXT_AT
        at = self.begin + self._text_end
        self.memory[at : at + 4 + len(encoded)] = len(encoded).to_bytes(4, "little") + encoded
        self.texts[key] = self._text_end
        self._text_end += 4 + len(encoded)
        return self.texts[key]

    def issue(self, group, number, text):
        """Write a record; returns where it is, for `done`."""
        at = self.begin + _RING_AT + self.count % _RING * _RECORD.size
        _RECORD.pack_into(self.memory, at, group, number, time.monotonic(), text, 0)
        self.count += 1
        _COUNT.pack_into(self.memory, self.begin + _HEAD.size - _COUNT.size, self.count)
        return at

    def enter_call(self, group, number, signature):
        """Write the signature of a call of a group, for the other ranks."""
        entry = group % _GROUPS * _CALLS + number % _CALLS
        _CALL.pack_into(self.memory, self.begin + _TABLE_AT + entry * _CALL.size, group, signature, number + 1)

    def done(self, at):
        """Mark a record as finished."""
        self.memory[at + _RECORD.size - 4] = 1
