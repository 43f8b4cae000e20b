"""The backend of dry runs: results of the right shape and dtype, made locally; nothing is sent.

As if all ranks of the group held what this one does, summed or gathered; values mean nothing. Works on MindSpore's
meta device.
"""

from mindspore import ops

from mindformers_core.communication import raw
from mindformers_core.communication.raw import chunk

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "Permute", "ReduceScatter"]


class AllReduce(raw.AllReduce):
    """See `raw.AllReduce`."""

    def construct(self, x):
        return x


class AllGather(raw.AllGather):
    """See `raw.AllGather`."""

    def construct(self, x):
        return ops.cat((x,) * self.size, self.dim)


class ReduceScatter(raw.ReduceScatter):
    """See `raw.ReduceScatter`."""

    def construct(self, x):
        return chunk(x, self.index, self.size, self.dim)


class AllToAll(raw.AllToAll):
    """See `raw.AllToAll`."""

    def construct(self, x):
        return ops.cat((chunk(x, self.index, self.size, self.to_dim),) * self.size, self.dim)


class Permute(raw.Permute):
    """See `raw.Permute`."""

    def construct(self, x):
        return x


class Broadcast(raw.Broadcast):
    """See `raw.Broadcast`."""

    def construct(self, x):
        return x
