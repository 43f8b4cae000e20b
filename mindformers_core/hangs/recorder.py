"""What a rank issues, written to the board, and compared with its neighbours' before it waits. Pure Python."""

import os
import sys
import time
from collections import Counter
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from mindformers_core.hangs.board import MOST_TEXT, RING
from mindformers_core.hangs.records import Issued

_PACKAGE = f"{Path(__file__).parent.parent}/"
# parts of the names of files whose frames are nobody's place
_INNER = ("/mindspore/", "<frozen ", f"{_PACKAGE}communication/", f"{_PACKAGE}hangs/")
_COMPARED = 8  # the last records of a neighbour


class _Group:
    """The calls of one group of ranks: how many, and the ranks that a call is compared with."""

    def __init__(self, ranks, rank):
        place = ranks.index(rank)
        self.hash, self.count = _hash(ranks), 0
        # a difference within a group is one between two neighbours; the later one of the two sees it
        self.neighbours = {ranks[place - 1], ranks[(place + 1) % len(ranks)]} - {rank}


class Recorder:
    """Records what this rank issues.

    Args:
        stack_file: descriptor of the file for this process's stack.
        check: whether to compare every collective with those of the neighbours in its group.

    Attributes:
        sources: file -> `describe`, a function of a line and of the local variables of a frame in that file, which
            returns `(place, number in the plan or "")`, as text.
        folders: temporary folders to remove where the process ends by force.
    """

    def __init__(self, board, rank, stack_file, check):
        self.board, self.rank, self.check = board, rank, check
        self.slot, self.sources, self.folders = board.slots[rank], {}, []
        self._groups, self._texts, self._compiled = {}, {}, Counter()
        self.slot.stack_file, self.slot.pid = stack_file, os.getpid()

    @property
    def waited(self):
        """Seconds that this rank has spent in collectives, and waiting for messages, so far."""
        return sum(record.waited for record in self.slot.ring)

    def place(self):
        """The innermost place on the Python stack that a reader knows, as `sources` describe it."""
        frame, callers = sys._getframe(1), {}  # the innermost frame of this package, and of other code
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self.sources:
                variables = frame.f_locals
                described = self.sources[file](frame.f_lineno, variables)
                variables.clear()  # a copy, in which the frame would keep tensors alive that it deletes
                return described
            owner = _owner(file)
            if owner not in callers and "user" not in callers:
                callers[owner] = frame.f_code, frame.f_lineno
            frame = frame.f_back
        callers.pop("inner", None)
        return _described(tuple(callers.values()))

    def issue(self, kind, axes, ranks, shape, dtype, options, forward_places=None):
        """Record a collective that is issued now.

        Args:
            kind, axes, ranks, shape: as of `Issued`.
            dtype: an object whose text names the dtype.
            options: what has to be equal on all ranks beside these.
            forward_places: places of the forward calls whose gradients are not computed yet, the last one at the end;
                None for a forward call.

        Returns:
            The record, a context manager to wait in; it gives whether the neighbours have issued the same.
        """
        group = self._groups.get(ranks) or self._groups.setdefault(ranks, _Group(ranks, self.rank))
        place = forward_places.pop() if forward_places else self.place()
        key = kind, ranks, shape, dtype, options, place, forward_places is not None
        text, signature = self._texts.get(key) or self._texts.setdefault(key, self._describe_call(key, axes))
        group.count += 1
        record = self._record(text, group.hash, group.count - 1, signature)
        record.agrees = not (self.check and any(self._differs(each, group, signature) for each in group.neighbours))
        return record

    def waiting(self, kind, ranks=(), place=None):
        """Record a wait for a message or for the start, or a call of a compiled function.

        Args:
            kind: `"receive"`, `"start"`, `"compiled"` or `"compiling"`.
            ranks: `(sender, receiver)` of a message; those that start.
            place: name of the compiled function; what a message is for.

        Returns:
            The record, a context manager to wait in.
        """
        text = _encoded(kind, (), ranks, (), "", place or self.place()[0], "", "")
        call = () if ranks else (_hash(place), self._compiled[place])
        self._compiled[place] += not ranks
        record = self._record(text, *call)
        record.kind, record.computed = kind.encode(), time.process_time()
        return record

    def _record(self, text, group=0, number=0, signature=0):
        record = self.slot.ring[self.slot.count % RING]
        record.group, record.number, record.signature, record.done = group, number, signature, False
        record.since, record.kind, record.text = time.monotonic(), b"", text
        self.slot.count += 1
        return record

    def _describe_call(self, key, axes):
        """Text and signature of a call."""
        kind, ranks, shape, dtype, options, (place, plan), is_backward = key
        if is_backward:
            place, plan = (place, f"backward of {plan}") if plan else (f"{place} (backward pass)", "")
        fields = kind, axes, ranks, shape, str(dtype).lower(), place, plan, options
        return _encoded(*fields), _hash((ranks, Issued(self.rank, 0, *fields).signature))

    def _differs(self, neighbour, group, signature):
        """Whether a neighbour has issued another call as this one, or waits for this rank in one of another group."""
        slot = self.board.slots[neighbour]
        for _ in range(2):  # again, since the neighbour may be writing it
            last = (slot.ring[place % RING] for place in range(slot.count - 1, slot.count - 1 - _COMPARED, -1))
            own = (each for each in last if each.group == group.hash and each.number == group.count - 1)
            known = next(own, None)
            if not (known.signature != signature if known else self._waits_elsewhere(neighbour, group)):
                return False
        return True

    def _waits_elsewhere(self, neighbour, group):
        """Whether a neighbour has not issued the last call of a group, and waits for this rank in one of another."""
        slot, current = self.board.slots[neighbour], self.board.current(neighbour)
        if current is None or current.group == group.hash:
            return False
        numbers = [record.number for record in slot.ring if record.group == group.hash]
        is_behind = max(numbers) < group.count - 1 if numbers else slot.count <= RING  # else it may be far ahead
        return is_behind and any(
            other.hash == current.group and current.number >= other.count > 0 and neighbour in other.neighbours
            for other in self._groups.values()
        )


@lru_cache(4096)
def _owner(file):
    return "inner" if any(part in file for part in _INNER) else "package" if file.startswith(_PACKAGE) else "user"


@lru_cache(4096)
def _described(callers):
    """The place of callers, `(code, line)`; files without their folders where these are known."""
    folders = _PACKAGE.removesuffix("mindformers_core/"), f"{os.getcwd()}/"
    files = [code.co_filename.removeprefix(folders[0]).removeprefix(folders[1]) for code, _ in callers]
    shown = [f"{file}:{line} in {code.co_name}" for file, (code, line) in zip(files, callers)]
    return ", called by ".join(shown), ""


def _encoded(*fields):
    return repr(fields).encode()[:MOST_TEXT]


def _hash(value):
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little")
