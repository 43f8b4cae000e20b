"""The backend of Ascend (HCCL) and GPU (NCCL): MindSpore's own operators.

A process group counts its ranks in ascending order, a `Group` in the order of its axes; where these differ, parts are
reordered locally. MindSpore's operators gather and scatter along dim 0; other dims are moved there and back locally.
"""

from mindspore import ops

from mindformers_core.communication import raw
from mindformers_core.communication.local import chunk
from mindformers_core.communication.world import world


class NativeCollective(raw.RawCollective):
    """A collective by one operator of MindSpore.

    MindSpore has an operator of `all_to_all` for Ascend only; elsewhere all is gathered, and the own part taken.
    """

    def __init__(self, group, kind, *arguments):
        super().__init__(group, kind, *arguments)
        self.places = group.places
        self.parts = tuple(group.ranks.index(rank) for rank in sorted(group.ranks))  # the inverse of `places`
        self.on_ascend = world().device_target == "Ascend"
        if kind in ("all_reduce", "reduce_scatter"):
            make = ops.AllReduce if kind == "all_reduce" else ops.ReduceScatter
            self.operator = make(arguments[-1], group.name)
        elif kind == "all_to_all" and self.on_ascend:
            dim, to_dim = arguments
            self.operator = ops.AlltoAll(group.size, to_dim, dim, group.name)
        else:
            self.operator = ops.AllGather(group.name)

    def all_reduce(self, x, op):
        return self.operator(x)

    def all_gather(self, x, dim):
        gathered = self.operator(x)
        if dim == 0:
            return _reordered(gathered, self.places, 0)
        return ops.cat(tuple([chunk(gathered, place, self.size, 0) for place in self.places]), dim)

    def reduce_scatter(self, x, dim, op):
        return self.operator(ops.cat(tuple([chunk(x, part, self.size, dim) for part in self.parts]), 0))

    def all_to_all(self, x, dim, to_dim):
        if self.on_ascend:
            return _reordered(self.operator(_reordered(x, self.parts, to_dim)), self.places, dim)
        return chunk(self.all_gather(x, dim), self.index, self.size, to_dim)

    def permute(self, x, destinations, origins):
        return ops.reshape(self.operator(ops.reshape(x, (1, -1)))[self.places[origins[self.index]]], x.shape)


def _reordered(x, order, dim):
    """`x`, cut along `dim` into as many parts as `order` has entries, joined again in that order of parts."""
    if order == tuple(range(len(order))):
        return x
    return ops.cat(tuple([chunk(x, part, len(order), dim) for part in order]), dim)
