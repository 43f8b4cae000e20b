"""Collectives of large tensors between the ranks of one host, in PyNative on CPU, without MindSpore.

Every rank of a group has memory that all of them can read. It copies there what the others need, piece by piece; then
the ranks meet (each sends every other one a few bytes over a socket, which wake it up), and each reads what it needs,
sums included. Pieces go to the two halves of the memory in turn: whoever comes to the next meeting has read what was
there at the one before.

Every element's sum is made by one rank, in the group's order, so that all get the same bits.
"""

import math
import weakref
import zlib
from functools import partial

import numpy as np

from mindformers_core.communication.connecting import all_gather_texts, connect_ranks
from mindformers_core.communication.local import part_length
from mindformers_core.communication.shared_memory import share_memory
from mindformers_core.communication.tensor_bytes import as_bytes, empty_tensor
from mindformers_core.communication.world import process_state

__all__ = ["SharedGroup", "join_memory", "shared_group"]

_TIMEOUT = 30.0  # seconds that a rank waits for the others, as in MindSpore's collectives on CPU
_HALF = 1 << 21  # bytes of half a rank's memory: what is copied at once, and should stay in a core's cache
_ALIGNED = 64  # bytes at whose multiples a rank's place in a half begins
_TOKEN = 4  # bytes that ranks send each other when they meet


def shared_group(group):
    """The `SharedGroup` of a `Group`; None where its ranks are on several hosts.

    The first call for these ranks is collective: it connects them.

    Raises:
        RuntimeError: ranks that didn't connect.
    """
    memo = process_state().memo(__name__)
    if group.ranks not in memo:
        share = partial(all_gather_texts, index=group.index, size=group.size, group_name=group.name)
        memo[group.ranks] = join_memory(group.index, connect_ranks(group.index, group.size, share, _TIMEOUT))
    return memo[group.ranks]


class SharedGroup:
    """The ranks of a group, joined by memory and sockets; get it from `shared_group()`.

    All ranks call the same methods in the same order, with tensors of the same shape and dtype. Each returns a new
    tensor, and raises a `RuntimeError` where a rank has ended, doesn't come within the limit or calls something else;
    the group can't be used after that.

    Args:
        index: this rank's place in the group.
        connections: place -> `Connection` to that rank, for all others.
        memories: of every rank, in the group's order, an array of bytes of shape (2, bytes of a half).
    """

    def __init__(self, index, connections, memories):
        self.index, self.size = index, len(memories)
        self.connections, self.memories = connections, memories
        self.shelf = memories[0].shape[1] // self.size // _ALIGNED * _ALIGNED  # bytes of a half for each rank
        self.meetings = 0
        weakref.finalize(self, _close, connections)  # also at the end of the process

    def all_gather(self, x, dim):
        """All ranks' tensors, of any dtype, joined along `dim`."""
        shape = x.shape
        result, memory = empty_tensor(x.dtype, (*shape[:dim], shape[dim] * self.size, *shape[dim + 1 :]))
        rows, call = math.prod(shape[:dim]), f"all_gather {x.dtype} {shape} {dim}"
        word = f"u{math.gcd(x.itemsize, 8)}"  # NumPy copies these as they are, and faster than bytes
        source, target = as_bytes(x).view(word).reshape(rows, -1), memory.view(word).reshape(rows, self.size, -1)
        for piece in _pieces(source.shape, self.shelf // source.itemsize * self.size):
            self._share(source[piece], [target[:, place][piece] for place in range(self.size)], call)
        return result

    def reduce_scatter(self, x, dim):
        """This rank's part along `dim` of the sum of all ranks' tensors, of a dtype that NumPy adds."""
        shape, length = x.shape, part_length(x.shape, self.size, dim)
        result, memory = empty_tensor(x.dtype, (*shape[:dim], length, *shape[dim + 1 :]))
        rows, call = math.prod(shape[:dim]), f"reduce_scatter {x.dtype} {shape} {dim}"
        source = x.asnumpy().reshape(rows, self.size, -1)
        target = memory.view(source.dtype).reshape(rows, -1)
        for piece in _pieces(target.shape, self.shelf // source.itemsize):
            self._add([source[:, place][piece] for place in range(self.size)], target[piece], call)
        return result

    def all_reduce(self, x):
        """The sum of all ranks' tensors, of a dtype that NumPy adds."""
        result, memory = empty_tensor(x.dtype, x.shape)
        source, call = x.asnumpy().reshape(1, -1), f"all_reduce {x.dtype} {x.shape}"
        target = memory.view(source.dtype).reshape(1, -1)
        for piece in _pieces(source.shape, self.shelf // source.itemsize * self.size):
            parts, totals = (np.array_split(array[piece], self.size, 1) for array in (source, target))
            self._add(parts, totals[self.index], call)
            self._share(totals[self.index], totals, call)
        return result

    def _share(self, mine, targets, call):
        """Fill an array for every rank with what is `mine` there."""
        _shelf(self._half(), 0, mine)[:] = mine
        for half, target in zip(self._meet(call), targets, strict=True):
            target[:] = mine if half is None else _shelf(half, 0, target)

    def _add(self, parts, total, call):
        """Fill `total` with the sum of what all ranks have as part of this one; `parts` has one for every rank."""
        for place, part in enumerate(parts):
            if place != self.index:
                _shelf(self._half(), place * self.shelf, part)[:] = part
        start = self.index * self.shelf
        mine = parts[self.index]
        first, second, *more = [mine if half is None else _shelf(half, start, mine) for half in self._meet(call)]
        np.add(first, second, out=total)
        for term in more:
            np.add(total, term, out=total)

    def _half(self):
        """The half of this rank's memory that nobody reads now."""
        return self.memories[self.index][self.meetings % 2]

    def _meet(self, call):
        """Wait until all ranks have filled their halves; returns these, None for this rank's own."""
        token = zlib.crc32(f"{self.meetings} {call}".encode()).to_bytes(_TOKEN, "little")
        try:
            for place in self.connections:
                self.connections[place].write([token])
            for place in self.connections:
                if self.connections[place].read(_TOKEN) != token:
                    raise ConnectionError("it called something else")
        except BaseException as error:  # the other ranks may have met without this one
            _close(self.connections)
            if isinstance(error, (ConnectionError, TimeoutError)):
                raise RuntimeError(f"{call} with the rank at place {place} of {self.size}: {error}") from error
            raise
        half = self.meetings % 2
        self.meetings += 1
        return [None if place == self.index else memory[half] for place, memory in enumerate(self.memories)]


def _shelf(half, start, like):
    """The bytes of a half from `start`, as an array like another one."""
    return half[start : start + like.nbytes].view(like.dtype).reshape(like.shape)


def _pieces(shape, most):
    """Indices that cut an array of two dims into pieces of at most so many elements: rows, or parts of a row."""
    wide, high = min(shape[1], most), max(1, most // shape[1])
    for row in range(0, shape[0], high):
        for column in range(0, shape[1], wide):
            yield slice(row, row + high), slice(column, column + wide)


def join_memory(index, connections):
    """The `SharedGroup` of ranks that are connected; None if they are on several hosts. A collective call.

    Args:
        index: this rank's place in the group.
        connections: place -> `Connection` to that rank, for all others; the group owns them.

    Raises:
        RuntimeError: a rank has ended, or doesn't make the call within the timeout.
    """
    if not all(connection.on_one_host for connection in connections.values()):
        _close(connections)
        return None
    memories = share_memory(index, connections, 2 * _HALF)
    return SharedGroup(index, connections, [memories[place].reshape(2, _HALF) for place in sorted(memories)])


def _close(connections):
    for connection in connections.values():
        connection.close()
