"""What a rank issues, written to the board, and compared with its neighbours' before it waits. Pure Python."""

import os
import sys
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from mindformers_core.hangs.board import Slot

__all__ = ["Recorder"]

_PACKAGE = f"{Path(__file__).parent.parent}/"
_INNER = ("/mindspore/", f"{_PACKAGE}communication/", f"{_PACKAGE}hangs/")  # files whose frames are nobody's place
_MOST_SHOWN = 64  # ranks and characters of what a record keeps beside its place


class _Group:
    """The calls of one group of ranks: their number, and the group's other ranks that a call is compared with."""

    def __init__(self, ranks, rank):
        place = ranks.index(rank) if rank in ranks else 0
        self.hash, self.count = _hash(ranks), 0
        # a difference within a group is one between two neighbours; the later one of the two sees it
        self.neighbours = {ranks[place - 1], ranks[(place + 1) % len(ranks)]} - {rank} if ranks else set()


class Recorder:
    """Records what this rank issues.

    Args:
        board: the `Board`.
        rank: this rank.
        stack_file: descriptor of the file for this process's stack.
        check: whether to compare every collective with those of the neighbours in its group.

    Attributes:
        sources: file -> `(key, describe)`: functions of the local variables of a frame in that file, and of a line
            and these variables: a key of what they show, and `(place, number in the plan or None)`, as text.
        folders: temporary folders to remove where the process ends by force.
    """

    def __init__(self, board, rank, stack_file, check):
        self.slot, self.rank, self.check = Slot(board, rank, stack_file), rank, check
        self.board, self.sources, self.folders = board, {}, []
        self._groups, self._signatures, self._described, self._owners = {}, {}, {}, {}

    def place(self):
        """The key of the innermost place on the Python stack that a reader knows, see `sources`."""
        frame, callers = sys._getframe(1), {}  # the innermost frame of this package, and of other code
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self.sources:
                key, describe = self.sources[file]
                variables = frame.f_locals
                found = file, frame.f_lineno, key(variables)
                if found not in self._described:
                    self._described[found] = describe(frame.f_lineno, variables)
                variables.clear()  # a copy, in which the frame would keep tensors alive that it deletes
                return found
            owner = self._owner(file)
            if owner not in callers and "user" not in callers:
                callers[owner] = frame
            frame = frame.f_back
        callers.pop("inner", None)
        found = tuple([(caller.f_code, caller.f_lineno) for caller in callers.values()])
        if found not in self._described:
            shown = [f"{_shown(code.co_filename)}:{line} in {code.co_name}" for code, line in found]
            self._described[found] = ", called by ".join(shown), ""
        return found

    def _owner(self, file):
        if file not in self._owners:
            inner = any(part in file for part in _INNER)
            self._owners[file] = "inner" if inner else "package" if file.startswith(_PACKAGE) else "user"
        return self._owners[file]

    def issue(self, kind, axes, ranks, shape, dtype, options, left=None):
        """Record a collective that is issued now.

        Args:
            kind, axes, ranks, shape: as of `Issued`.
            dtype: an object whose text names the dtype.
            options: what has to be equal on all ranks beside these.
            left: keys of the places of the forward calls whose gradients are not computed yet, the last one at the
                end; None or empty for a forward call.

        Returns:
            `(where the record is, for done(), whether the neighbours have issued the same)`.
        """
        group = self._groups.get(ranks) or self._groups.setdefault(ranks, _Group(ranks, self.rank))
        place = left.pop() if left else self.place()
        key = kind, ranks, shape, dtype, options, place, bool(left is not None)
        text = self.slot.texts.get(key)
        if text is None:
            text = self._write(key, axes)
        number, signature = group.count, self._signatures[key]
        group.count += 1
        self.slot.enter_call(group.hash, number, signature)
        at = self.slot.issue(group.hash, number, text)
        if self.check:
            for neighbour in group.neighbours:
                if self._differs(neighbour, group, number, signature):
                    return at, False
        return at, True

    def _differs(self, neighbour, group, number, signature):
        for _ in range(2):  # again, since the neighbour may be writing it
            other, current = self.board.call(neighbour, group.hash, number), self.board.current(neighbour)
            wrong = other not in (0, signature)
            if not other and current:  # the neighbour waits for this rank in a call of another group
                known = next((each for each in self._groups.values() if each.hash == current[0] != group.hash), None)
                wrong = known is not None and current[1] >= known.count > 0 and neighbour in known.neighbours
            if not wrong:
                return False
        return True

    def _write(self, key, axes):
        """Write the text of a call. Its number in the plan is part of its signature; that of a backward pass follows
        from the order of calls before it, which may differ."""
        kind, ranks, shape, dtype, options, place, backward = key
        where, plan = self._described.get(place, ("", ""))
        text = {"kind": kind, "axes": axes, "ranks": ranks, "shape": shape, "dtype": str(dtype).lower()}
        text |= {"place": where, "plan": f"backward of {plan}" if plan and backward else plan}
        text["place"] += " (backward pass)" * (backward and not plan)
        text["options"] = options
        self._signatures[key] = _hash((kind, ranks, shape, str(dtype), options, "" if backward else plan))
        return self.slot.write_text(key, text)

    @contextmanager
    def waiting(self, kind, ranks=(), place=None):
        """Record what runs in a `with` block: a wait for a message, or a call of a compiled function.

        Args:
            kind: `"receive"`, `"compiled"` or `"compiling"`.
            ranks: `(sender, receiver)` of a message.
            place: name of the compiled function.
        """
        key = kind, ranks, place or self.place()
        text = self.slot.texts.get(key)
        if text is None:
            where = place or self._described.get(key[2], ("", ""))[0]
            text = self.slot.write_text(key, {"kind": kind, "axes": (), "ranks": ranks, "place": where})
        at = self.slot.issue(0, 0, text)
        try:
            yield
        finally:
            self.slot.done(at)

    def done(self, at):
        """Record that a call has finished."""
        self.slot.done(at)


def _shown(file):
    """A file without its folders, where these are the working directory or this package's."""
    return file.removeprefix(_PACKAGE.removesuffix("mindformers_core/")).removeprefix(f"{os.getcwd()}/")


def _hash(value):
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little") or 1
