"""The backend of Ascend (HCCL) and GPU (NCCL): MindSpore's own operators.

A process group counts its ranks in ascending order, a `Group` in the order of its axes; where these differ, parts are
reordered locally. MindSpore's operators gather and scatter along dim 0; other dims are moved there and back locally.
"""

from mindspore import ops

from mindformers_core.communication import raw
from mindformers_core.communication.local import chunk
from mindformers_core.communication.world import world

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "Permute", "ReduceScatter"]


class AllReduce(raw.AllReduce):
    """See `raw.AllReduce`."""

    def __init__(self, group, op):
        super().__init__(group, op)
        self.reduce = ops.AllReduce(op, group.name)

    def construct(self, x):
        return self.reduce(x)


class AllGather(raw.AllGather):
    """See `raw.AllGather`."""

    def __init__(self, group, dim):
        super().__init__(group, dim)
        self.gather = ops.AllGather(group.name)
        self.places = group.places

    def construct(self, x):
        return _gather_along(self.gather, x, self.places, self.dim)


class ReduceScatter(raw.ReduceScatter):
    """See `raw.ReduceScatter`."""

    def __init__(self, group, dim, op):
        super().__init__(group, dim, op)
        self.scatter = ops.ReduceScatter(op, group.name)
        self.parts = _parts(group)

    def construct(self, x):
        parts = tuple([chunk(x, part, self.size, self.dim) for part in self.parts])
        return self.scatter(ops.cat(parts, 0))


class AllToAll(raw.AllToAll):
    """See `raw.AllToAll`.

    MindSpore has the operator for Ascend only; elsewhere all is gathered, and the own part taken.
    """

    def __init__(self, group, dim, to_dim):
        super().__init__(group, dim, to_dim)
        self.on_ascend = world().device_target == "Ascend"
        self.exchange = (
            ops.AlltoAll(group.size, to_dim, dim, group.name) if self.on_ascend else ops.AllGather(group.name)
        )
        self.places = group.places
        self.parts = _parts(group)

    def construct(self, x):
        if self.on_ascend:
            return _reordered(self.exchange(_reordered(x, self.parts, self.to_dim)), self.places, self.dim)
        return chunk(_gather_along(self.exchange, x, self.places, self.dim), self.index, self.size, self.to_dim)


class Permute(raw.Permute):
    """See `raw.Permute`."""

    def __init__(self, group, destination, origin):
        super().__init__(group, destination, origin)
        self.gather = ops.AllGather(group.name)
        self.place = group.places[origin]

    def construct(self, x):
        return ops.reshape(self.gather(ops.reshape(x, (1, -1)))[self.place], x.shape)


class Broadcast(raw.Broadcast):
    """See `raw.Broadcast`."""

    def __init__(self, group, root):
        super().__init__(group, root)
        self.broadcast = ops.Broadcast(group.ranks[root], group.name)

    def construct(self, x):
        return self.broadcast((x,))[0]


def _parts(group):
    """For every place in the process group, the index in the group's order of its part."""
    return tuple(group.ranks.index(rank) for rank in sorted(group.ranks))


def _gather_along(gather, x, places, dim):
    gathered = gather(x)
    if dim == 0:
        return _reordered(gathered, places, 0)
    return ops.cat(tuple([chunk(gathered, place, len(places), 0) for place in places]), dim)


def _reordered(x, order, dim):
    """`x`, cut along `dim` into as many parts as `order` has entries, joined again in that order of parts."""
    if order == tuple(range(len(order))):
        return x
    return ops.cat(tuple([chunk(x, part, len(order), dim) for part in order]), dim)
