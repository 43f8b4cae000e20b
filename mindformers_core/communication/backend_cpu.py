"""The backend of CPU (MCCL): it has an all-reduce sum of float32 and float16, and in PyNative point-to-point messages.

All other collectives are composed of these, in the form that was measured fastest: in PyNative of messages, which are
buffered, so that all ranks can send first; in a graph of all-reduce sums of buffers that are -0.0 except for the rank's
own part: x + -0.0 is x for every float x, also for -0.0.

Large tensors of ranks on one host bypass MindSpore, and small ones that are moved in PyNative, once a large one has
connected these ranks: see `shared_collectives`. 13 MB of float32 between two pinned ranks (two cores of an AMD EPYC),
in PyNative, in ms: all-reduce 42 by MindSpore, 2.7 through shared memory; reduce-scatter 22 by messages, 1.5;
all-gather 21, 1.5.
"""

from functools import cached_property
from math import prod

from mindspore import Tensor, dtype as mstype, nn, ops
from mindspore.ops import constexpr
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindformers_core.communication import raw
from mindformers_core.communication.local import chunk, pad_part
from mindformers_core.communication.shared_collectives import (
    BySegments,
    RowsBySegments,
    connected_group,
    shared_group,
    yield_core,
)
from mindformers_core.communication.shared_memory import MOST_READERS

_ZEROS_LIKE = ops.ZerosLike()
_REDUCTIONS = {"sum": ops.Add(), "max": ops.Maximum(), "min": ops.Minimum()}
_SUMMED = (mstype.float32, mstype.float16)
_YIELDED_UP_TO = 1 << 20  # bytes of a sum whose copies cost a graph less than the wait for another rank
_SHARED_FROM = 1 << 16  # bytes of a tensor that is worth connecting the ranks at a first call
_CARRIED = {mstype.bool_: mstype.int32, mstype.int16: mstype.int32}  # messages have no such dtypes


class CpuCollective(raw.RawCollective):
    """A collective that is made of all-reduce sums in a graph, and of messages in PyNative (`eager_…`)."""

    def __init__(self, group, kind, *arguments):
        super().__init__(group, kind, *arguments)
        self.sum = _Sum(group)
        self.op = arguments[-1] if arguments else None  # of a reduction
        self.reduction = _REDUCTIONS.get(self.op)
        self.empty = Tensor(-0.0, mstype.float32)
        origin = arguments[1][self.index] if kind == "permute" else 0
        self.row = self.size if origin is None else origin  # of what this place gets, behind which are zeros

    @cached_property
    def by_segments(self):
        """This collective for large tensors in graphs; None where ranks are on several hosts, or too many."""
        shared = shared_group(self.group) if self.size <= MOST_READERS else None  # all ranks compile the same graph
        made = RowsBySegments if self.routes else BySegments
        return shared and made(shared, self.sum.reduce, self.kind, *self.arguments)

    def _in_graph(self, x, sizes=None):
        if x.dtype == mstype.bfloat16:  # which few operators of CPU take, and no function of Python
            return ops.cast(self._exact(ops.cast(x, mstype.float32), sizes), x.dtype)
        return self._exact(x, sizes)

    def _exact(self, x, sizes):
        if self.routes:
            if self._routes_much(x) and self.by_segments is not None:
                return self.by_segments(x, sizes)
            return getattr(self, self.kind)(x, *self.arguments, sizes)
        if _is_large(x.shape, x.itemsize) and self.by_segments is not None:
            return self.by_segments(x)
        return getattr(self, self.kind)(x, *self.arguments)

    def _routes_much(self, x):
        """Whether all rows that may come from rows like these are large, which is alike on all ranks."""
        return _is_large((self.most * self.size, *x.shape[1:]), x.itemsize)

    def eager(self, x, *sizes):
        found = getattr(self, f"eager_{self.kind}")(x, *sizes, *self.arguments)
        yield_core()
        return found

    def all_reduce(self, x, op):
        if self.op == "sum":  # an attribute, so that the graph has no branch
            return self.sum(x)
        return self._reduce(ops.unstack(self.all_gather(ops.unsqueeze(x, 0), 0)))

    def eager_all_reduce(self, x, op):
        if op == "sum" and x.dtype in _SUMMED:
            shared = x.dtype == mstype.float32 and _shared(self.group, x)
            return shared.all_reduce(x) if shared else self.sum.reduce(x)
        return self._reduce(self._exchange(dict.fromkeys(range(self.size), x)))

    def all_gather(self, x, dim):
        return self.sum(pad_part(x, self.index, self.size, dim, self.empty))

    def eager_all_gather(self, x, dim):
        if shared := _shared(self.group, x):
            return shared.all_gather(x, dim)
        return ops.cat(self._exchange(dict.fromkeys(range(self.size), x)), dim)

    def reduce_scatter(self, x, dim, op):
        return chunk(self.all_reduce(x, op), self.index, self.size, dim)

    def eager_reduce_scatter(self, x, dim, op):
        if shared := op == "sum" and x.dtype == mstype.float32 and _shared(self.group, x):
            return shared.reduce_scatter(x, dim)
        return self._reduce(self._exchange({place: chunk(x, place, self.size, dim) for place in range(self.size)}))

    def all_to_all(self, x, dim, to_dim):
        return chunk(self.all_gather(x, dim), self.index, self.size, to_dim)

    def eager_all_to_all(self, x, dim, to_dim):
        return ops.cat(self._exchange({place: chunk(x, place, self.size, to_dim) for place in range(self.size)}), dim)

    def eager_dispatch(self, x, sizes, rows, to_rows):
        sent, received = sizes
        count = self.rows_of_result(received)
        if shared := self._routes_much(x) and shared_group(self.group):
            return shared.exchange_rows(x, sent, received, count, self.most)
        found = raw.cut_rows(x, sent)
        for to in sorted(range(self.size), key=lambda to: (to - self.index) % self.size)[1:]:
            if sent[to]:
                _send(found[to], to, self.group)
        for origin, come in enumerate(received):
            if origin != self.index:
                found[origin] = _receive(ops.zeros((come, *x.shape[1:]), x.dtype), origin, self.group) if come else None
        return raw.joined_rows(found, count, x)

    eager_combine = eager_dispatch

    def permute(self, x, destinations, origins):
        found = self.all_gather(ops.unsqueeze(x, 0), 0)
        if not self.has_idle:
            return ops.reshape(chunk(found, origins[self.index], self.size, 0), x.shape)
        found = ops.cat((found, ops.unsqueeze(_ZEROS_LIKE(x), 0)), 0)  # a product with 0 would drop the collective
        return ops.reshape(chunk(found, self.row, self.size + 1, 0), x.shape)

    def eager_permute(self, x, destinations, origins):
        to, origin = destinations[self.index], origins[self.index]
        parts = {self.index if to is None else to: x}
        parts |= {self.index: x} if origin is None else {}
        found = self._exchange(parts, [self.index if origin is None else origin])[0]
        return _ZEROS_LIKE(x) if origin is None else found

    def _exchange(self, parts, origins=None):
        """Give `parts[place]` to each place, the nearest first; a list of what the places `origins`, or all, give."""
        like, origins = next(iter(parts.values())), range(self.size) if origins is None else origins
        if shared := _shared(self.group, like) or connected_group(self.group):
            return shared.exchange(parts, origins)
        for to in sorted(parts.keys() - {self.index}, key=lambda to: (to - self.index) % self.size):
            _send(parts[to], to, self.group)
        return [parts[self.index] if each == self.index else _receive(like, each, self.group) for each in origins]

    def _reduce(self, parts):
        """The elementwise reduction of tensors, in their order, so that all ranks get the same bits."""
        total = parts[0]
        for part in parts[1:]:
            total = self.reduction(total, part)
        return total


@constexpr
def _is_large(shape, itemsize):
    return prod(shape) * itemsize >= _SHARED_FROM


class _Sum(nn.Cell):
    """All-reduce sum in a graph, of any dtype but float64.

    Integers are sent as 16-bit parts in float32, whose sums are exact for up to 256 ranks. Denormal floats become zero.
    """

    def __init__(self, group):
        super().__init__(auto_prefix=False)
        self.reduce = ops.AllReduce("sum", group.name)
        self.yielded = ops.Custom(_yielded, lambda shape: shape, lambda dtype: dtype, "pyfunc")

    def construct(self, x):
        if x.dtype == mstype.float32 or x.dtype == mstype.float16:
            return self.summed(x)
        if x.dtype == mstype.float64:
            raise TypeError("float64 can't be communicated inside @ms.jit on CPU: cast to float32, or run in PyNative")
        if x.dtype == mstype.int64:
            return _joined(self.summed(_limbs(x, 4)), 4, x.dtype)
        return ops.cast(_joined(self.summed(_limbs(ops.cast(x, mstype.int32), 2)), 2, mstype.int32), x.dtype)

    def summed(self, x):
        """The sum of floats."""
        total = self.reduce(x)
        return self.yielded(total) if _yields(x.shape, x.itemsize) else total


def _yielded(x):
    yield_core()
    return x


@constexpr
def _yields(shape, itemsize):
    return 0 < prod(shape) * itemsize <= _YIELDED_UP_TO


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
    """The `SharedGroup` for a large tensor, which connects the ranks; None of a small one, or on several hosts."""
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
