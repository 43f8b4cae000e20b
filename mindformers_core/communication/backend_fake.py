"""The backend of dry runs: results of the right shape and dtype, made locally; nothing is sent.

As if all ranks of the group held what this one does, summed or gathered; values mean nothing. Works on MindSpore's
meta device.
"""

from mindspore import ops

from mindformers_core.communication.raw import RawCollective, chunk

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "Permute", "ReduceScatter"]


class AllReduce(RawCollective):
    """See `backend_native.AllReduce`."""

    kind = "all_reduce"

    def __init__(self, group, op):
        super().__init__(group)
        self.op = op

    def construct(self, x):
        return x


class AllGather(RawCollective):
    """See `backend_native.AllGather`."""

    kind = "all_gather"

    def __init__(self, group, dim):
        super().__init__(group)
        self.dim = dim

    def construct(self, x):
        return ops.cat((x,) * self.size, self.dim)


class ReduceScatter(RawCollective):
    """See `backend_native.ReduceScatter`."""

    kind = "reduce_scatter"

    def __init__(self, group, dim, op):
        super().__init__(group)
        self.dim = dim
        self.op = op

    def construct(self, x):
        return chunk(x, self.index, self.size, self.dim)


class AllToAll(RawCollective):
    """See `backend_native.AllToAll`."""

    kind = "all_to_all"

    def __init__(self, group, dim, to_dim):
        super().__init__(group)
        self.dim = dim
        self.to_dim = to_dim

    def construct(self, x):
        return ops.cat((chunk(x, self.index, self.size, self.to_dim),) * self.size, self.dim)


class Permute(RawCollective):
    """See `backend_native.Permute`."""

    kind = "permute"

    def __init__(self, group, destination, origin):
        super().__init__(group)
        self.destination = destination
        self.origin = origin

    def construct(self, x):
        return x


class Broadcast(RawCollective):
    """See `backend_native.Broadcast`."""

    kind = "broadcast"

    def __init__(self, group, root):
        super().__init__(group)
        self.root = root

    def construct(self, x):
        return x
