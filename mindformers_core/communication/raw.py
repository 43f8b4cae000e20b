"""Collectives without gradient, one tensor in and one out: the base of all backends, and the backend of dry runs.

A backend derives its collectives from the ones here. Each is written twice, because CPU can do more in PyNative than in
a graph: `@ms.jit` compiles `construct`, while PyNative calls the Cell and so runs `eager`. Where both are the same,
`eager` is `construct`.

In a dry run nothing is sent: a result has the right shape and dtype, as if all ranks of the group held this rank's
tensor, summed or gathered; values mean nothing. Works on MindSpore's meta device.

Every rank must compile the same graph: MindSpore runs a graph's collectives one after another in an order that follows
from its structure. So ranks differ in constants only, never in the operators of their graphs.
"""

from math import prod

from mindspore import nn, ops

from mindformers_core.communication.counter import record
from mindformers_core.communication.local import chunk
from mindformers_core.communication.world import process_state, world
from mindformers_core.redistribution.steps import wire_bytes

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "Permute", "RawCollective", "ReduceScatter"]


class RawCollective(nn.Cell):
    """A collective of one group without gradient.

    Attributes:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `broadcast`.
        takes: names of the arguments after the group, which become attributes.
        group: the `Group`.
    """

    kind = ""
    takes = ()

    def __init__(self, group, *arguments):
        super().__init__(auto_prefix=False)
        self.group = group
        self.size = group.size
        self.index = group.index
        for name, argument in zip(self.takes, arguments, strict=True):
            setattr(self, name, argument)

    def __call__(self, x):
        if process_state().counters:
            whole = prod(x.shape) * x.itemsize * (self.size if self.kind == "all_gather" else 1)
            # a broadcast's pipeline along the ring: all ranks but one send the whole tensor, as in an all-gather
            cost = "all_gather" if self.kind == "broadcast" else self.kind
            record(self.kind, self.group.axes, wire_bytes(cost, self.size, whole))
        return self.uncounted(x)

    def uncounted(self, x):
        """A call that `count_collectives` doesn't count: one that is no part of the program."""
        try:
            return self.eager(x)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.kind} over {self.group} failed on rank {world().rank}: another rank has died, is more than the "
                "timeout late, or calls other collectives; every rank's log is in the launcher's log folder"
            ) from error

    def eager(self, x):
        """The collective in PyNative."""
        return self.construct(x)

    def construct(self, x):
        """The collective in a graph; here, in a dry run."""
        return x


class AllReduce(RawCollective):
    """Every rank gets the reduction of all ranks' tensors. `op`: `sum`, `max` or `min`."""

    kind, takes = "all_reduce", ("op",)


class AllGather(RawCollective):
    """Every rank gets all ranks' tensors, joined along `dim` in the group's order."""

    kind, takes = "all_gather", ("dim",)

    def construct(self, x):
        return ops.cat((x,) * self.size, self.dim)


class ReduceScatter(RawCollective):
    """Rank i of the group gets part i, along `dim`, of the reduction of all tensors. `op`: `sum`, `max` or `min`."""

    kind, takes = "reduce_scatter", ("dim", "op")

    def construct(self, x):
        return chunk(x, self.index, self.size, self.dim)


class AllToAll(RawCollective):
    """Rank i gets part i along `to_dim` of every rank's tensor, joined along `dim` in the group's order."""

    kind, takes = "all_to_all", ("dim", "to_dim")

    def construct(self, x):
        return ops.cat((chunk(x, self.index, self.size, self.to_dim),) * self.size, self.dim)


class Permute(RawCollective):
    """Every rank's whole tensor goes to place `destination` of the group, and that of place `origin` comes."""

    kind, takes = "permute", ("destination", "origin")


class Broadcast(RawCollective):
    """Every rank gets the tensor of place `root` of the group."""

    kind, takes = "broadcast", ("root",)
