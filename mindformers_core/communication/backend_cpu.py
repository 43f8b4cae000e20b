"""The backend of CPU (MCCL): it has an all-reduce sum of float32 and float16, and in PyNative point-to-point messages.

All other collectives are made of these, in the way that was measured cheapest: in PyNative of messages, which are
buffered, so that all ranks may send first; in a graph of all-reduce sums of buffers that hold -0.0 except for the own
part: x + -0.0 is x for every float x, -0.0 included.

In PyNative, large tensors of ranks on one host bypass MindSpore: see `shared_collectives`. 13 MB of float32 between two
pinned ranks (two cores of an AMD EPYC), in ms: all-reduce 42 by MindSpore, 2.7 through shared memory; reduce-scatter 22
by messages, 1.5; all-gather 21, 1.5.
"""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindformers_core.communication import raw
from mindformers_core.communication.local import chunk, pad_part
from mindformers_core.communication.shared_collectives import shared_group

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "Permute", "ReduceScatter"]

_ZEROS_LIKE = ops.ZerosLike()
_COMBINE = {"sum": ops.Add(), "max": ops.Maximum(), "min": ops.Minimum()}
_SUMMED = (mstype.float32, mstype.float16)
_SHARED_FROM = 1 << 16  # bytes of a tensor that is worth connecting the ranks at a first call
_CARRIED = {mstype.bool_: mstype.int32, mstype.int16: mstype.int32}  # dtypes that messages can't hold


class _Emulated(raw.RawCollective):
    """A collective that is made of all-reduce sums in a graph, and of messages in PyNative."""

    def __init__(self, group, *arguments):
        super().__init__(group, *arguments)
        self.sum = _Sum(group)
        self.empty = Tensor(-0.0, mstype.float32)

    def gather(self, x, dim):
        """All-gather along a dim in a graph."""
        return self.sum(pad_part(x, self.index, self.size, dim, self.empty))

    def from_place(self, x, place):
        """The tensor of the rank at a place of the group, in a graph."""
        return ops.reshape(chunk(self.gather(ops.unsqueeze(x, 0), 0), place, self.size, 0), x.shape)

    def exchange(self, parts):
        """In PyNative, send `parts[i]` to rank i of the group; returns the parts for this rank, in the group's order.

        The nearest ranks come first.
        """
        for step in range(1, self.size):
            to = (self.index + step) % self.size
            _send(parts[to], to, self.group)
        received = list(parts)
        for step in range(1, self.size):
            origin = (self.index - step) % self.size
            received[origin] = _receive(parts[self.index], origin, self.group)
        return received


class AllReduce(_Emulated, raw.AllReduce):
    """See `raw.AllReduce`."""

    def __init__(self, group, op):
        super().__init__(group, op)
        self.combine = _COMBINE[op]

    def eager(self, x):
        if self.op == "sum" and x.dtype == mstype.float32 and (shared := _shared(self.group, x)):
            return shared.all_reduce(x)
        if self.op == "sum" and x.dtype in _SUMMED:
            return self.sum.reduce(x)
        return self.reduce(self.exchange([x] * self.size))

    def construct(self, x):
        if self.op == "sum":
            return self.sum(x)
        return self.reduce(ops.unstack(self.gather(ops.unsqueeze(x, 0), 0)))

    def reduce(self, parts):
        """The elementwise reduction of tensors, in their order, so that all ranks get the same bits."""
        total = parts[0]
        for part in parts[1:]:
            total = self.combine(total, part)
        return total


class AllGather(_Emulated, raw.AllGather):
    """See `raw.AllGather`."""

    def eager(self, x):
        if shared := _shared(self.group, x):
            return shared.all_gather(x, self.dim)
        return ops.cat(self.exchange([x] * self.size), self.dim)

    def construct(self, x):
        return self.gather(x, self.dim)


class ReduceScatter(_Emulated, raw.ReduceScatter):
    """See `raw.ReduceScatter`."""

    def __init__(self, group, dim, op):
        super().__init__(group, dim, op)
        self.all_reduce = AllReduce(group, op)

    def eager(self, x):
        if self.op == "sum" and x.dtype == mstype.float32 and (shared := _shared(self.group, x)):
            return shared.reduce_scatter(x, self.dim)
        return self.all_reduce.reduce(self.exchange([chunk(x, i, self.size, self.dim) for i in range(self.size)]))

    def construct(self, x):
        return chunk(self.all_reduce(x), self.index, self.size, self.dim)


class AllToAll(_Emulated, raw.AllToAll):
    """See `raw.AllToAll`."""

    def eager(self, x):
        return ops.cat(self.exchange([chunk(x, i, self.size, self.to_dim) for i in range(self.size)]), self.dim)

    def construct(self, x):
        return chunk(self.gather(x, self.dim), self.index, self.size, self.to_dim)


class Permute(_Emulated, raw.Permute):
    """See `raw.Permute`."""

    def eager(self, x):
        if self.destination != self.index:
            _send(x, self.destination, self.group)
        return x if self.origin == self.index else _receive(x, self.origin, self.group)

    def construct(self, x):
        return self.from_place(x, self.origin)


class Broadcast(_Emulated, raw.Broadcast):
    """See `raw.Broadcast`."""

    def eager(self, x):
        if self.index != self.root:
            return _receive(x, self.root, self.group)
        for step in range(1, self.size):
            _send(x, (self.index + step) % self.size, self.group)
        return x

    def construct(self, x):
        return self.from_place(x, self.root)


class _Sum(nn.Cell):
    """All-reduce sum in a graph, of any dtype but float64.

    Integers are sent as 16-bit parts in float32, whose sums are exact for up to 256 ranks. Denormal floats become zero.
    """

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.reduce = ops.AllReduce("sum", group.name)

    def construct(self, x):
        if x.dtype == mstype.float32 or x.dtype == mstype.float16:
            return self.reduce(x)
        if x.dtype == mstype.bfloat16:
            return ops.cast(self.reduce(ops.cast(x, mstype.float32)), x.dtype)
        if x.dtype == mstype.float64:
            raise TypeError("float64 can't be communicated inside @ms.jit on CPU: cast to float32, or run in PyNative")
        if x.dtype == mstype.int64:
            return _joined(self.reduce(_limbs(x, 4)), 4, x.dtype)
        return ops.cast(_joined(self.reduce(_limbs(ops.cast(x, mstype.int32), 2)), 2, mstype.int32), x.dtype)


def _limbs(x, count):
    """The 16-bit parts of integers, lowest first, as float32 along a new dim 0; the highest keeps the sign."""
    limbs = ()
    for _ in range(count - 1):
        higher = ops.floor_div(x, 65536)
        limbs = limbs + (ops.cast(x - higher * 65536, mstype.float32),)
        x = higher
    return ops.stack(limbs + (ops.cast(x, mstype.float32),), 0)


def _joined(limbs, count, dtype):
    total = ops.cast(limbs[count - 1], dtype)
    for place in range(count - 1):
        total = total * 65536 + ops.cast(limbs[count - 2 - place], dtype)
    return total


def _shared(group, x):
    """The `SharedGroup` for a tensor; None where it is small, or ranks are on several hosts."""
    return shared_group(group) if x.nbytes >= _SHARED_FROM else None


def _send(x, index, group):
    x = ops.cast(x, _CARRIED[x.dtype]) if x.dtype in _CARRIED else x
    dist_comm_isend_op(x, group.places[index], group.name, 0)


def _receive(like, index, group):
    """A tensor of the shape and dtype of `like` from rank `index` of the group."""
    carried = _CARRIED.get(like.dtype)
    buffer = _ZEROS_LIKE(like) if carried is None else ops.zeros(like.shape, carried)
    received = dist_comm_irecv_op(buffer, 0, group.places[index], group.name)[0]
    return received if carried is None else ops.cast(received, like.dtype)
