"""Collectives without gradient, one tensor in and one out: the base of all backends, and the backend of dry runs.

CPU can do more in PyNative than in a graph: `@ms.jit` compiles `construct`, while PyNative calls the Cell and so runs
`eager`. In the other backends, `eager` is `construct`.

In a dry run nothing is sent: a result has the right shape and dtype, as if all ranks of the group held this rank's
tensor, summed or gathered; values mean nothing. Works on MindSpore's meta device.

Every rank must compile the same graph: MindSpore runs a graph's collectives one after another in an order that follows
from its structure. So ranks differ in constants only, never in the operators of their graphs.
"""

from contextlib import nullcontext
from math import prod

from mindspore import dtype as mstype, nn, ops

from mindformers_core.communication.counter import record
from mindformers_core.communication.local import chunk
from mindformers_core.communication.world import process_state, world
from mindformers_core.redistribution.steps import ring, wire_bytes

_COMPLEX = ops.Complex()  # no library takes complex numbers: their real and imaginary parts go one after the other


class RawCollective(nn.Cell):
    """A collective of one group without gradient. A backend's subclass overrides the methods named as the kinds.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `exchange`.
        arguments: those of the kind's method after the tensor.
    """

    def __init__(self, group, kind, *arguments):
        super().__init__(auto_prefix=False)
        self.group, self.size, self.index = group, group.size, group.index
        self.kind, self.arguments = kind, arguments
        self.sends, self.has_idle = True, False  # whether this place sends, and whether any doesn't
        if kind == "permute":  # its tables of all places are too long to show
            self.sends, self.has_idle = arguments[0][self.index] is not None, None in arguments[0]
            is_ring = self.has_idle or arguments == ring(self.size, arguments[0][0])
            arguments = [f"to {arguments[0]}" if self.has_idle else f"by {arguments[0][0]}"] * is_ring
        self.options = ", ".join(map(str, arguments))  # what all ranks have to agree on
        self.forward_places = None  # of the collective of a gradient: a deque, see `Recorder.issue`

    def __call__(self, x, *sizes):
        if process_state().counters:
            whole = prod(x.shape) * x.itemsize * (self.size if self.kind == "all_gather" else self.sends)
            sent = wire_bytes(self.kind, self.size, whole)
            if self.kind == "exchange" and world().backend != "fake":
                rows = sizes[0][0] if sizes else filled_rows(x)
                sent = (sum(rows) - rows[self.index]) * x[0, 0].nbytes
            record(self.kind, self.group.axes, sent)
        return self.uncounted(x, *sizes)

    def uncounted(self, x, *sizes):
        """Run the collective without counting: for calls that are no part of the program.

        `sizes`: of an exchange, if they are known: how many rows go to each place, and come from each, two lists.

        Raises:
            RuntimeError: the report of a hang: another rank has died, is late, or calls other collectives.
        """
        watch, group, error = process_state().watch, self.group, None
        issued = self.kind, group.axes, group.ranks, x.shape, x.dtype, self.options, self.forward_places
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
        return self._in_graph(x)

    def construct(self, x, sizes=None):  # not by a function that takes a method: MindSpore drops its graph too early
        if x.dtype == mstype.complex64:
            return _COMPLEX(self._in_graph(ops.real(x), sizes), self._in_graph(ops.imag(x), sizes))
        return self._in_graph(x, sizes)

    def _in_graph(self, x, sizes=None):
        """The collective in a graph. `sizes`: of an exchange, float32 (2, ranks), as of `uncounted`."""
        return getattr(self, self.kind)(x, *self.arguments)

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

    def exchange(self, x):
        """Row i of every rank's tensor (ranks, rows, …), on rank i; in the group's order."""
        return ops.reshape(self.all_to_all(ops.unsqueeze(x, 0), 0, 1), x.shape)

    def permute(self, x, destinations, origins):
        """The tensor of another place: place i sends to place `destinations[i]`, and receives from `origins[i]`.

        None for a place that sends nothing, or that receives nothing, which gets zeros.
        """
        return x


def filled_rows(x):
    """For each part of a tensor (parts, rows, …) the number of its rows up to the last one that isn't all zeros."""
    x = ops.cast(x, mstype.float32) if x.dtype == mstype.bfloat16 else x
    filled = x.asnumpy().reshape(*x.shape[:2], -1).any(2)
    return [int(row.size - row[::-1].argmax()) if row.any() else 0 for row in filled]
