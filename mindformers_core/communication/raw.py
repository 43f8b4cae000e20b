"""Collectives without gradient, one tensor in and one out: the base of all backends, and the backend of dry runs.

PyNative, which calls the Cell and so runs `eager`, can do more than a graph: `@ms.jit` compiles `construct`.

In a dry run nothing is sent: a result has the right shape and dtype, as if all ranks of the group held this rank's
tensor, summed or gathered, but zeros of `dispatch` and `combine`; values mean nothing. It works on the meta device.

Every rank must compile the same graph: MindSpore runs a graph's collectives one after another in an order that follows
from its structure. So ranks differ in constants only, never in the operators of their graphs.
"""

from contextlib import nullcontext
from itertools import accumulate, pairwise
from math import prod

from mindspore import dtype as mstype, nn, ops

from mindformers_core.communication.counter import record
from mindformers_core.communication.local import chunk, parts_of_rows, rows_of_parts
from mindformers_core.communication.world import process_state, world
from mindformers_core.redistribution.steps import ring, wire_bytes

_COMPLEX = ops.Complex()  # no library takes complex numbers: their real and imaginary parts go one after the other


class RawCollective(nn.Cell):
    """A collective of one group without gradient. A backend's subclass overrides the methods named as the kinds.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute`, `dispatch` or `combine`.
        arguments: those of the kind's method after the tensor.
    """

    def __init__(self, group, kind, *arguments):
        super().__init__(auto_prefix=False)
        self.group, self.size, self.index = group, group.size, group.index
        self.kind, self.arguments = kind, arguments
        self.routes = kind in ("dispatch", "combine")
        if self.routes:  # the most rows that go from a rank to another one
            room = arguments[kind == "dispatch"]
            if room % self.size:
                raise ValueError(f"{kind} over {group}: room for {room} rows isn't as many for each rank")
            self.most = room // self.size
        self.without_sizes = ""  # an error
        if self.routes and world().backend != "fake":
            self.without_sizes = (
                f"{kind} over {group} also takes sizes: how many rows go to each rank, and come from each"
            )
        self.sends, self.has_idle = True, False  # whether this place sends, and whether any doesn't
        if kind == "permute":  # its tables of all places are too long to show
            self.sends, self.has_idle = arguments[0][self.index] is not None, None in arguments[0]
            is_ring = self.has_idle or arguments == ring(self.size, arguments[0][0])
            arguments = [f"to {arguments[0]}" if self.has_idle else f"by {arguments[0][0]}"] * is_ring
        self.options = ", ".join(map(str, arguments))  # what all ranks have to agree on
        self.forward_places = None  # of the collective of a gradient: a deque, see `Recorder.issue`

    def __call__(self, x, *sizes):
        if process_state().counters:
            row = prod(x.shape[1:]) * x.itemsize
            whole = row * self.arguments[self.kind == "combine"] if self.routes else prod(x.shape) * x.itemsize
            whole *= self.size if self.kind == "all_gather" else self.sends
            sent = wire_bytes(self.kind, self.size, whole)
            if sizes and world().backend != "fake":
                sent = (sum(sizes[0][0]) - sizes[0][0][self.index]) * row
            record(self.kind, self.group.axes, sent)
        return self.uncounted(x, *sizes)

    def uncounted(self, x, *sizes):
        """Run the collective without counting: for calls that are no part of the program.

        `sizes`: of `dispatch` and `combine`: how many rows go to each place, and come from each, two lists.

        Raises:
            RuntimeError: the report of a hang: another rank has died, is late, or calls other collectives.
            TypeError: a `dispatch` or `combine` without sizes.
            ValueError: one that has no rows or no room for its sizes.
        """
        watch, group, error = process_state().watch, self.group, None
        if self.without_sizes and not sizes:
            raise TypeError(self.without_sizes)
        if sizes:
            self.check_rows(len(x), *sizes[0])
        shape = x.shape[1:] if sizes else x.shape  # ranks have as many rows as they are sent
        issued = self.kind, group.axes, group.ranks, shape, x.dtype, self.options, self.forward_places
        with nullcontext(True) if watch is None else watch.recorder.issue(*issued) as agrees:
            try:
                if agrees:
                    parts = (ops.real(x), ops.imag(x)) if x.dtype == mstype.complex64 else (x,)
                    found = [self.eager(part, *sizes) for part in parts]
                    return _COMPLEX(*found) if found[1:] else found[0]
            except RuntimeError as failure:
                error = failure
            said = [f" ({line})" for line in str(error or "").splitlines() if line and line[0] != "-"]
            report = "" if watch is None else f"\n{watch.report()}"
            raise RuntimeError(
                f"{self.kind} over {group} failed on rank {world().rank}: another rank has died, is more than the "
                f"timeout late, or calls other collectives{''.join(said[:1])}{report}"
            ) from (error if watch is None else None)  # with a report, without MindSpore's call stack in C++

    def eager(self, x, *sizes):
        """The collective in PyNative."""
        return ops.zeros((self.rows_of_result(sizes[0][1]), *x.shape[1:]), x.dtype) if sizes else self._in_graph(x)

    def check_rows(self, count, sent, received):
        """Raise `ValueError` where a `dispatch` or `combine` of so many rows has no rows or no room for sizes."""
        if max(*sent, *received) > self.most or sum(sent) > count or sum(received) > self.rows_of_result(received):
            raise ValueError(
                f"{self.kind} over {self.group} of {count} rows into {self.arguments[1]}, at most {self.most} between "
                f"two ranks, has no rows or no room for sizes {[sent, received]}"
            )

    def rows_of_result(self, received):
        """Of a `dispatch` or `combine` in PyNative: how many rows its result has."""
        return max(1, sum(received)) if self.kind == "dispatch" else self.arguments[1]

    def construct(self, x, sizes=None):  # not by a function that takes a method: MindSpore drops its graph too early
        if self.without_sizes != "" and sizes is None:
            raise TypeError(self.without_sizes)
        if x.dtype == mstype.complex64:
            return _COMPLEX(self._in_graph(ops.real(x), sizes), self._in_graph(ops.imag(x), sizes))
        return self._in_graph(x, sizes)

    def _in_graph(self, x, sizes=None):
        """The collective in a graph. `sizes`: float32 (2, ranks), as of `uncounted`; None: of none, or in a dry run."""
        if sizes is None:
            return getattr(self, self.kind)(x, *self.arguments)
        return getattr(self, self.kind)(x, *self.arguments, sizes)

    def all_reduce(self, x, op):
        """The reduction of all ranks' tensors. `op`: `sum`, `max` or `min`."""
        return x

    def all_gather(self, x, dim):
        """All ranks' tensors, joined along `dim` in the group's order."""
        return ops.cat((x,) * self.size, dim)

    def reduce_scatter(self, x, dim, op):
        """Part i of the reduction of all tensors along `dim`, on rank i of the group. `op`: `sum`, `max` or `min`."""
        return chunk(x, self.index, self.size, dim)

    def all_to_all(self, x, dim, to_dim):
        """Part i of every rank's tensor along `to_dim`, on rank i; joined along `dim` in the group's order."""
        return ops.cat((chunk(x, self.index, self.size, to_dim),) * self.size, dim)

    def dispatch(self, x, rows, to_rows, sizes=None):
        """As many rows of a tensor (rows, …) as `sizes` says for each rank, first those for the first one.

        In PyNative the result has those that came, in the order of ranks, or a row of zeros where none did. Shapes of
        graphs are static: there it has `to_rows`, and those of rank i begin at row i * to_rows / ranks, behind which
        are any.
        """
        if sizes is None:
            return ops.zeros((to_rows, *x.shape[1:]), x.dtype)
        return self._parts_exchanged(parts_of_rows(x, sizes[:1], self.size, self.most))

    def combine(self, x, rows, to_rows, sizes=None):
        """The way back, of what `dispatch` gives: (to_rows, …), of which those behind all that came are zeros."""
        if sizes is None:
            return ops.zeros((to_rows, *x.shape[1:]), x.dtype)
        return rows_of_parts(self._parts_exchanged(x), sizes[1:], self.size, to_rows)

    def _parts_exchanged(self, x):
        """Part i of every rank's tensor, on rank i, in the group's order."""
        parts = ops.reshape(x, (1, self.size, -1, *x.shape[1:]))
        return ops.reshape(self.all_to_all(parts, 0, 1), x.shape)

    def permute(self, x, destinations, origins):
        """The tensor of another place: place i sends to place `destinations[i]`, and receives from `origins[i]`.

        None for a place that sends nothing, or that receives nothing, which gets zeros.
        """
        return x


def cut_rows(x, counts):
    """For each of `counts` so many rows of a tensor in turn; None for 0."""
    ends = [*accumulate(counts, initial=0)]
    return [x[start:end] if end > start else None for start, end in pairwise(ends)]


def joined_rows(parts, count, like):
    """Parts that `cut_rows` gives, and zeros: `count` rows, of the dtype and other dims of a tensor."""
    parts = [part for part in parts if part is not None]
    missing = count - sum(map(len, parts))
    return ops.cat([*parts, *[ops.zeros((missing, *like.shape[1:]), like.dtype)] * (missing > 0 or not parts)], 0)
