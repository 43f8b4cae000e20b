"""Algorithms of scans and of the largest elements along a dim that is cut; see `distributed_operators`.

A scan runs on each part. The totals of the parts, of size 1 along the dim, are gathered; each part combines what it has
with those of the parts in front of it: the scheme of Blelloch (CMU-CS-90-190, section 1.4). The k largest elements are
among the k largest of every part, so these alone are gathered.
"""

import math
from functools import partial

import numpy as np
from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.dtypes import dtype_name


def finite_top(top):
    """What to take off before exponentials: 0 for a row of -inf only, whose exponentials are then 0, and not NaN."""
    return ops.where(ops.equal(top, -math.inf), ops.zeros_like(top), top)


def _log_total(x, dim):
    """The logarithm of the sum of exponentials along a dim, which may all be 0."""
    top = finite_top(ops.amax(ops.stop_gradient(x), dim, keepdims=True))
    return ops.log(ops.sum(ops.exp(x - top), dim, keepdim=True)) + top


def _log_sum(x, y):
    """The same of two tensors."""
    return _log_total(ops.stack([x, ops.broadcast_to(y, x.shape)]), 0)[0]


# kind of a scan -> its neutral element, the total of elements along a dim, and of two tensors
_KINDS = {
    "cumsum": (0, lambda x, dim: ops.sum(x, dim, keepdim=True), ops.add),
    "logcumsumexp": (-math.inf, _log_total, _log_sum),
    "cumprod": (1, lambda x, dim: ops.prod(x, dim, True), ops.mul),
}


def _scan(kind, operator, args, context):
    """A cumulative sum or product.

    Args:
        args: the tensor, the dim, and the operator's further arguments: bools are whether an element is left out of
            its own total, and whether the scan begins at the end.
    """
    neutral, total_along, total_of = _KINDS[kind]
    x, dim, *more = args
    exclusive, reverse = more if len(more) == 2 else (False, False)
    local = operator(*args)
    total = _last(local, dim, reverse)
    total = total_of(total, _last(x, dim, reverse)) if exclusive else total
    totals = context.gathered(total, dim, varying=True)
    own, numbers = context.number, np.arange(context.count)
    shape = [1] * x.ndim
    shape[dim] = context.count
    skipped = Tensor((numbers <= own if reverse else numbers >= own).reshape(shape))
    totals = ops.where(skipped, Tensor(neutral, local.dtype), totals)
    return total_of(local, ops.cast(total_along(totals, dim), local.dtype))


def _scan_of_extremes(is_better, operator, args, context):
    """A cumulative extreme and its positions: the last one of equal elements; a NaN stays, as on one card."""
    x, dim = args
    value, index = operator(x, dim)
    position = _position(index, x.shape[dim], context)
    tops, found = operator(context.gathered(_last(value, dim), dim, varying=True), dim)
    places = context.gathered(_last(position, dim), dim)
    places = ops.gather_elements(places, dim, ops.stop_gradient(found))
    before = Tensor([max(context.number - 1, 0)], mstype.int32)
    top, place = ops.gather(tops, before, dim), ops.gather(places, before, dim)
    better = is_better(top, value)
    if "float" in dtype_name(x.dtype):
        better = ops.logical_and(ops.logical_or(better, ops.isnan(top)), ops.logical_not(ops.isnan(value)))
    better = ops.logical_and(better, Tensor(np.full([1] * x.ndim, context.number > 0)))
    return ops.where(better, top, value), ops.where(better, place, position) - 1


def _top_k(operator, args, context):
    """The largest, or smallest, elements and their positions. Which ones of equal elements is as undefined as on one
    card: MindSpore's kernel on CPU takes any of them.

    Args:
        args: the tensor, the number of elements, and the operator's further arguments, the dim first.
    """
    x, count, *more = args
    dim = more[0] % x.ndim if more else x.ndim - 1
    value, index = operator(x, min(count, x.shape[dim]), *more)
    position = _position(index, x.shape[dim], context)
    best, found = operator(context.gathered(value, dim), count, *more)
    return best, ops.gather_elements(context.gathered(position, dim), dim, ops.stop_gradient(found)) - 1


def _position(index, size, context):
    """The global position of an element of this part, counted from 1: MindSpore drops the addition of 0 on the first
    rank, whose graph then has its collectives in another order.
    """
    return ops.stop_gradient(index) + (context.start(size, index.dtype) + 1)


def _last(x, dim, reverse=False):
    """The last element along a dim; with `reverse` the first."""
    return part_along(x, dim, 0 if reverse else x.shape[dim] - 1, 1)


def part_along(x, dim, start, size):
    """`size` elements of `x` along a dim, from `start` on."""
    begin, sizes = [0] * x.ndim, list(x.shape)
    begin[dim], sizes[dim] = start, size
    return ops.slice(x, tuple(begin), tuple(sizes))


SCANS = {
    **{kind: partial(_scan, kind) for kind in _KINDS},
    "cummax": partial(_scan_of_extremes, ops.greater),
    "cummin": partial(_scan_of_extremes, ops.less),
    "top_k": _top_k,
}
