"""Collectives between the ranks of one host, on CPU, without MindSpore: of large tensors first.

Every rank of a group has memory that all ranks can read. In PyNative, a rank copies a piece of its tensor there; after
a barrier (each rank sends every other one a few bytes over a socket, which wake the receiver up) all ranks read and sum
the pieces. The memory is a double buffer: a rank at the next barrier has read the half of the barrier before.

A graph on CPU calls functions of Python in an order that differs from rank to rank, so that they can't wait for each
other; the order of its all-reduces doesn't. There a function copies the tensor into a segment of this rank's memory,
an all-reduce tells all ranks the offsets of all segments, and another function computes the result of them.

An element is summed in the group's order, in PyNative by one rank, so that all ranks get the same bits.
"""

import math
import os
import weakref
import zlib
from functools import partial

import numpy as np
from mindspore import dtype as mstype, nn, ops

from mindformers_core.communication.connecting import all_gather_texts, connect_ranks
from mindformers_core.communication.local import part_length
from mindformers_core.communication.shared_memory import PAGE, SegmentWriter, free_segment, segment_like, share_memory
from mindformers_core.communication.tensor_bytes import as_bytes, empty_tensor
from mindformers_core.communication.world import process_state
from mindformers_core.redistribution.arrays import exchanged

_TIMEOUT = 30.0  # seconds that a rank waits for the others, as in MindSpore's collectives on CPU
_HALF = 1 << 21  # bytes of half a rank's memory: the most that is copied at once, which should fit in a core's cache
_ALIGNED = 64  # bytes at whose multiples a rank's slot in a half begins
_RESERVED = 1 << 34  # bytes of address space for a rank's segments, which graphs use
_RESIZED = {"all_gather": ("longer",), "reduce_scatter": ("shorter",), "all_to_all": ("longer", "shorter")}
_TOKEN = 4  # bytes that ranks send each other at a barrier


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


def connected_group(group):
    """The `SharedGroup` of a `Group` that a large tensor has connected, on all of its ranks; else None."""
    return process_state().memo(__name__).get(group.ranks)


def yield_core():
    """Let MindSpore's thread of messages, which sleeps until they come, send what other ranks wait for, and go on.

    Beside a thread that computes on the same core, Linux runs it when a time slice has passed: on 6.18, 20 all-reduces
    of 64 bytes between products of 3 ms cost 69 ms in a graph on two pinned ranks, and 24 ms with this after each.
    """
    os.sched_yield()


class SharedGroup:
    """The ranks of a group, joined by memory and sockets; get it from `shared_group()`.

    All ranks call the same methods in the same order, with tensors of the same dtype and shape, of `exchange_rows` with
    rows of the same one. Each returns a new tensor, and raises a `RuntimeError` where a rank has ended, misses the time
    limit or calls another method; the group can't be used after that.

    Args:
        index: this rank's place in the group.
        connections: place -> `Connection` to that rank, for all others.
        memories: of every rank, in the group's order, an array of bytes of shape (2, bytes of a half).
        reserved: of every rank an array of bytes, for segments.

    Attributes:
        segments: the `SegmentWriter` of this rank's part of `reserved`.
    """

    def __init__(self, index, connections, memories, reserved):
        self.index, self.size = index, len(memories)
        self.connections, self.memories = connections, memories
        self.reserved, self.segments = reserved, SegmentWriter(reserved[index])
        self.slot_size = memories[0].shape[1] // self.size // _ALIGNED * _ALIGNED  # bytes of a rank's slot in a half
        self.barriers = 0
        weakref.finalize(self, _close, connections)  # also at the end of the process

    def all_gather(self, x, dim):
        """All ranks' tensors, of any dtype, joined along `dim`."""
        shape = x.shape
        result, memory = empty_tensor(x.dtype, (*shape[:dim], shape[dim] * self.size, *shape[dim + 1 :]))
        rows, call = math.prod(shape[:dim]), f"all_gather {x.dtype} {shape} {dim}"
        word = f"u{math.gcd(x.itemsize, 8)}"  # NumPy copies these as they are, and faster than bytes
        source, target = as_bytes(x).view(word).reshape(rows, -1), memory.view(word).reshape(rows, self.size, -1)
        for piece in _pieces(source.shape, self.slot_size // source.itemsize * self.size):
            self._share(source[piece], [target[:, place][piece] for place in range(self.size)], call)
        return result

    def reduce_scatter(self, x, dim):
        """This rank's part along `dim` of the sum of all ranks' tensors, of a dtype that NumPy adds."""
        shape, length = x.shape, part_length(x.shape, self.size, dim)
        result, memory = empty_tensor(x.dtype, (*shape[:dim], length, *shape[dim + 1 :]))
        rows, call = math.prod(shape[:dim]), f"reduce_scatter {x.dtype} {shape} {dim}"
        source = x.asnumpy().reshape(rows, self.size, -1)
        target = memory.view(source.dtype).reshape(rows, -1)
        for piece in _pieces(target.shape, self.slot_size // source.itemsize):
            self._add([source[:, place][piece] for place in range(self.size)], target[piece], call)
        return result

    def all_reduce(self, x):
        """The sum of all ranks' tensors, of a dtype that NumPy adds."""
        result, memory = empty_tensor(x.dtype, x.shape)
        source, call = x.asnumpy().reshape(1, -1), f"all_reduce {x.dtype} {x.shape}"
        target = memory.view(source.dtype).reshape(1, -1)
        for piece in _pieces(source.shape, self.slot_size // source.itemsize * self.size):
            parts, totals = (np.array_split(array[piece], self.size, 1) for array in (source, target))
            self._add(parts, totals[self.index], call)
            self._share(totals[self.index], totals, call)
        return result

    def exchange(self, parts, origins):
        """The tensors of the places `origins` for this rank, a list.

        Args:
            parts: place -> the tensor for it, all of one shape and any dtype, on all ranks.
            origins: places of which `parts` has one for this rank.
        """
        like = next(iter(parts.values()))
        made = [empty_tensor(like.dtype, like.shape) for _ in origins]
        if not like.nbytes:
            return [tensor for tensor, _ in made]
        sources = {place: as_bytes(part).reshape(1, -1) for place, part in parts.items()}
        for piece in _pieces((1, like.nbytes), self.slot_size):
            cut = {place: source[piece] for place, source in sources.items()}
            found = self._traded(cut, f"exchange {like.dtype} {like.shape}")
            for (_, memory), origin in zip(made, origins):
                memory.reshape(1, -1)[piece] = found[origin]
        return [tensor for tensor, _ in made]

    def exchange_rows(self, x, sent, received, count, most):
        """Rows of tensors (rows, …) of any dtype, first those for place 0: `count` ones, the last of them zeros.

        Args:
            sent, received: how many rows go to each place, and come from each.
            count: rows of the result.
            most: that go from a rank to another one, alike on all ranks.
        """
        result, memory = empty_tensor(x.dtype, (count, *x.shape[1:]))
        row, call = x.nbytes // x.shape[0], f"exchange {x.dtype} {most} {x.shape[1:]}"
        sources, targets = (
            np.split(array, np.cumsum(counts) * row)[:-1] for array, counts in ((as_bytes(x), sent), (memory, received))
        )
        memory[sum(received) * row :] = 0
        for _, piece in _pieces((1, most * row), self.slot_size):
            parts, wanted = ([array[piece] for array in arrays] for arrays in (sources, targets))
            for target, part in zip(wanted, self._traded(dict(enumerate(parts)), call, wanted)):
                target[:] = part
        return result

    def _share(self, mine, targets, call):
        """All-gather: fill `targets`, an array for every rank, with the arrays that are `mine` on these ranks."""
        _slot(self._half(), 0, mine)[:] = mine
        for half, target in zip(self._barrier(call), targets, strict=True):
            target[:] = mine if half is None else _slot(half, 0, target)

    def _traded(self, parts, call, likes=None):
        """Arrays of all ranks for this one, to be read before the next barrier; `parts` are for some places, or all.

        `likes`: arrays of the shapes of those from each place. Default: all have one.
        """
        for place, part in parts.items():
            if place != self.index:
                _slot(self._half(), place * self.slot_size, part)[:] = part
        start, mine = self.index * self.slot_size, parts.get(self.index, part)  # none for itself, of none from itself
        halves = zip(self._barrier(call), likes or [mine] * self.size)
        return [mine if half is None else _slot(half, start, like) for half, like in halves]

    def _add(self, parts, total, call):
        """Reduce-scatter: fill `total` with the sum of all ranks' parts for this rank; `parts` are for all."""
        first, second, *more = self._traded(dict(enumerate(parts)), call)
        np.add(first, second, out=total)
        for term in more:
            np.add(total, term, out=total)

    def _half(self):
        """The half of this rank's memory that no rank reads before the next barrier."""
        return self.memories[self.index][self.barriers % 2]

    def _barrier(self, call):
        """Wait until all ranks have filled their halves; returns these, None for this rank's own."""
        token = zlib.crc32(f"{self.barriers} {call}".encode()).to_bytes(_TOKEN, "little")
        try:
            for place in self.connections:
                self.connections[place].write([token])
            for place in self.connections:
                if self.connections[place].read(_TOKEN) != token:
                    raise ConnectionError("it called something else")
        except BaseException as error:  # the other ranks may have passed the barrier
            _close(self.connections)
            if isinstance(error, (ConnectionError, TimeoutError)):
                raise RuntimeError(f"{call} with the rank at place {place} of {self.size}: {error}") from error
            raise
        half = self.barriers % 2
        self.barriers += 1
        return [None if place == self.index else memory[half] for place, memory in enumerate(self.memories)]


def _slot(half, start, like):
    """The bytes of a half from `start`, as an array like another one."""
    return half[start : start + like.nbytes].view(like.dtype).reshape(like.shape)


def _pieces(shape, most):
    """Indices that cut an array of two dims into pieces of at most so many elements: rows, or parts of a row."""
    wide, high = min(shape[1], most), max(1, most // shape[1])
    for row in range(0, shape[0], high):
        for column in range(0, shape[1], wide):
            yield slice(row, row + high), slice(column, column + wide)


class BySegments(nn.Cell):
    """A collective in a graph, of any dtype but bfloat16.

    Args:
        shared: the `SharedGroup` of its ranks.
        reduce: MindSpore's all-reduce sum of these ranks.
        kind, arguments: as of `RawCollective`.
    """

    def __init__(self, shared, reduce, kind, *arguments):
        super().__init__(auto_prefix=False)
        index, size, others = shared.index, shared.size, shared.connections.keys()
        self.reduce = reduce

        def write(x):
            pages = np.zeros(size, np.float32)  # which has all numbers of pages of `_RESERVED`
            pages[index] = shared.segments.write([np.ascontiguousarray(x).reshape(-1).view(np.uint8)], others) // PAGE
            return pages

        def read(pages, x):
            yield_core()
            offsets = [int(page) * PAGE for page in pages]
            tensors = [segment_like(shared.reserved[place], offsets[place], x) for place in range(size)]
            tensors[index] = x
            result = exchanged(kind, tensors, index, *arguments)
            result = result.copy() if kind == "permute" else result  # which is a segment itself
            for place in others:
                free_segment(shared.reserved[place], offsets[place], index)
            return result

        def shape_of(_, shape):
            shape = list(shape)
            for what, dim in zip(_RESIZED.get(kind, ()), arguments):
                shape[dim] = shape[dim] * size if what == "longer" else part_length(shape, size, dim)
            return shape

        self.write = ops.Custom(write, lambda _: [size], lambda _: mstype.float32, "pyfunc")
        self.read = ops.Custom(read, shape_of, lambda _, dtype: dtype, "pyfunc")

    def construct(self, x):
        return self.read(self.reduce(self.write(x)), x)


class RowsBySegments(nn.Cell):
    """`dispatch` and `combine` in a graph, see `RawCollective`; behind a rank's rows are zeros.

    Each place's rows have a segment, from which it reads them; so has a rank's own part, which is then no input of
    `read`: MindSpore copies all inputs of functions of Python.

    Args:
        shared, reduce: as of `BySegments`.
        kind, rows, to_rows: of the collective, and lengths of its tensors before and after.
    """

    def __init__(self, shared, reduce, kind, rows, to_rows):
        super().__init__(auto_prefix=False)
        index, size, is_first = shared.index, shared.size, kind == "dispatch"
        self.reduce = reduce

        def parts(x, counts, in_turn):
            """The rows of each place, and those behind them."""
            counts = counts.astype(int)
            starts = counts.cumsum() - counts if in_turn else np.arange(size) * (len(x) // size)
            ends = zip(starts + counts, [*starts[1:], len(x)])
            return [(x[start:filled], x[filled:end]) for start, (filled, end) in zip(starts, ends)]

        def write(x, sizes):
            pages = np.zeros((size, size), np.float32)
            for place, (filled, _) in enumerate(parts(x, sizes[0], is_first)):
                filled = np.ascontiguousarray(filled).reshape(-1).view(np.uint8)
                pages[index, place] = shared.segments.write([filled], (place,)) // PAGE
            return pages

        def read(pages, sizes, row):
            yield_core()
            result = np.empty((to_rows, *row.shape[1:]), row.dtype)
            for place, (filled, others) in enumerate(parts(result, sizes[1], not is_first)):
                offset, memory = int(pages[place, index]) * PAGE, shared.reserved[place]
                filled[:] = segment_like(memory, offset, filled)
                free_segment(memory, offset, index)
                others[:] = 0
            return result

        self.write = ops.Custom(write, lambda *_: [size, size], lambda *_: mstype.float32, "pyfunc")
        self.read = ops.Custom(read, lambda _, __, row: [to_rows, *row[1:]], lambda *dtypes: dtypes[2], "pyfunc")

    def construct(self, x, sizes):
        return self.read(self.reduce(self.write(x, sizes)), sizes, x[:1])


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
    shared = share_memory(index, connections, 2 * _HALF + _RESERVED)
    halves, reserved = zip(*[np.split(shared[place], [2 * _HALF]) for place in sorted(shared)])
    return SharedGroup(index, connections, [each.reshape(2, _HALF) for each in halves], reserved)


def _close(connections):
    for connection in connections.values():
        connection.close()
