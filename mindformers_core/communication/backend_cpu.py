"""The backend of CPU (MCCL): it has an all-reduce sum of float32 and float16, and in PyNative point-to-point messages.

Everything else is made of these, as was measured cheapest: in PyNative from messages, which are buffered, so that all
ranks may send first; in a graph from all-reduce sums of buffers that are empty except for the own part. The
emptiness is -0.0, the one float that changes nothing it is added to, -0.0 included.

In PyNative, large tensors of ranks on one host bypass MindSpore: see `shared_collectives`. 13 MB of float32 between two
pinned ranks (two cores of an AMD EPYC), in ms: all-reduce 42 by MindSpore, 2.7 through shared memory; reduce-scatter 22
by messages, 1.5; all-gather 21, 1.5.
"""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindformers_core.communication import raw
from mindformers_core.communication.raw import chunk, placed
from mindformers_core.communication.shared_collectives import shared_group

__all__ = ["AllGather", "AllReduce", "AllToAll", "Broadcast", "Permute", "ReduceScatter"]

_ZEROS_LIKE = ops.ZerosLike()
_SUMMED = (mstype.float32, mstype.float16)
_SHARED_FROM = 1 << 16  # bytes of a tensor that is worth the connecting of a first call
_CARRIED = {mstype.bool_: mstype.int32, mstype.int16: mstype.int32}  # types that messages can't hold


class _Emulated(raw.RawCollective):
    """What they are made of: `gather` in a graph, messages to and from `peers` in PyNative."""

    def __init__(self, group, *arguments):
        super().__init__(group, *arguments)
        self.gather = _Gather(group)
        self.peers = _peers(group)


class AllReduce(_Emulated, raw.AllReduce):
    """See `raw.AllReduce`."""

    def __init__(self, group, op):
        super().__init__(group, op)
        self.sum = _Sum(group)

    def eager(self, x):
        if self.op == "sum" and x.dtype == mstype.float32 and (shared := _shared(self.group, x)):
            return shared.all_reduce(x)
        if self.op == "sum" and x.dtype in _SUMMED:
            return self.sum.reduce(x)
        return _reduce(_exchange([x] * self.size, self.group, self.peers), self.op)

    def construct(self, x):
        if self.op == "sum":
            return self.sum(x)
        return _reduce(ops.unstack(self.gather(ops.unsqueeze(x, 0), 0)), self.op)


class AllGather(_Emulated, raw.AllGather):
    """See `raw.AllGather`."""

    def eager(self, x):
        if shared := _shared(self.group, x):
            return shared.all_gather(x, self.dim)
        return ops.cat(_exchange([x] * self.size, self.group, self.peers), self.dim)

    def construct(self, x):
        return self.gather(x, self.dim)


class ReduceScatter(_Emulated, raw.ReduceScatter):
    """See `raw.ReduceScatter`."""

    def __init__(self, group, dim, op):
        super().__init__(group, dim, op)
        self.reduce = AllReduce(group, op)

    def eager(self, x):
        if self.op == "sum" and x.dtype == mstype.float32 and (shared := _shared(self.group, x)):
            return shared.reduce_scatter(x, self.dim)
        parts = [chunk(x, part, self.size, self.dim) for part in range(self.size)]
        return _reduce(_exchange(parts, self.group, self.peers), self.op)

    def construct(self, x):
        return chunk(self.reduce(x), self.index, self.size, self.dim)


class AllToAll(_Emulated, raw.AllToAll):
    """See `raw.AllToAll`."""

    def eager(self, x):
        parts = [chunk(x, part, self.size, self.to_dim) for part in range(self.size)]
        return ops.cat(_exchange(parts, self.group, self.peers), self.dim)

    def construct(self, x):
        return chunk(self.gather(x, self.dim), self.index, self.size, self.to_dim)


class Permute(_Emulated, raw.Permute):
    """See `raw.Permute`."""

    def eager(self, x):
        if self.destination != self.index:
            _send(x, self.destination, self.group)
        return x if self.origin == self.index else _receive(x, self.origin, self.group)

    def construct(self, x):
        gathered = self.gather(ops.unsqueeze(x, 0), 0)
        return ops.reshape(chunk(gathered, self.origin, self.size, 0), x.shape)


class Broadcast(_Emulated, raw.Broadcast):
    """See `raw.Broadcast`."""

    def eager(self, x):
        if self.index != self.root:
            return _receive(x, self.root, self.group)
        for peer, _ in self.peers:
            _send(x, peer, self.group)
        return x

    def construct(self, x):
        gathered = self.gather(ops.unsqueeze(x, 0), 0)
        return ops.reshape(chunk(gathered, self.root, self.size, 0), x.shape)


class _Sum(nn.Cell):
    """All-reduce sum in a graph, of any dtype but float64.

    Integers travel as 16-bit parts in float32, whose sums are exact for up to 256 ranks. Denormal floats become zero.
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


class _Gather(nn.Cell):
    """All-gather along a dim in a graph, by a sum of buffers that are empty but for the own part."""

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.sum = _Sum(group)
        self.index = group.index
        self.size = group.size
        self.empty = Tensor(-0.0, mstype.float32)

    def construct(self, x, dim):
        return self.sum(placed(x, self.index, self.size, dim, self.empty))


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


def _peers(group):
    """The other ranks, nearest first, as pairs: the one to send to, and the one as far behind, to hear from."""
    steps = range(1, group.size)
    return tuple(((group.index + step) % group.size, (group.index - step) % group.size) for step in steps)


def _exchange(parts, group, peers):
    """Send `parts[i]` to rank i of the group, for all others; gives what they sent to this one, in their order."""
    for to, _ in peers:
        _send(parts[to], to, group)
    received = list(parts)
    for _, behind in peers:
        received[behind] = _receive(parts[group.index], behind, group)
    return received


def _send(x, index, group):
    x = ops.cast(x, _CARRIED[x.dtype]) if x.dtype in _CARRIED else x
    dist_comm_isend_op(x, group.places[index], group.name, 0)


def _receive(like, index, group):
    """A tensor of the shape and dtype of `like` from rank `index` of the group."""
    carried = _CARRIED.get(like.dtype)
    buffer = _ZEROS_LIKE(like) if carried is None else ops.zeros(like.shape, carried)
    received = dist_comm_irecv_op(buffer, 0, group.places[index], group.name)[0]
    return received if carried is None else ops.cast(received, like.dtype)


def _reduce(parts, op):
    """Elementwise `sum`, `max` or `min` of tensors, in their order, so that all ranks get the same bits."""
    total = parts[0]
    for part in parts[1:]:
        if op == "max":
            total = ops.maximum(total, part)
        elif op == "min":
            total = ops.minimum(total, part)
        else:
            total = ops.add(total, part)
    return total
