"""Attention of queries to the keys whose places lie in their ranges: the computation of one rank on its parts."""

import mindspore as ms
from mindspore import ops

LOWEST = -3.4028234663852886e38  # of float32


def attend(
    query, key, value, first, last, places, scale, order=None, reach=(None, None), exact=False, algorithm="auto"
):
    """The operator `Attention`, whose arguments its function for models describes."""
    (batch, length, heads, _), groups = query.shape, key.shape[2]
    query = ops.transpose(query, (0, 2, 1, 3))
    key, value = (_of_heads(each, heads // groups) for each in (key, value))
    scores = ops.cast(ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))), ms.float32) * scale
    place = ops.expand_dims(places, 1)
    hidden = ops.logical_or(
        ops.less(place, ops.expand_dims(first, 2)), ops.greater_equal(place, ops.expand_dims(last, 2))
    )
    hidden = ops.cast(ops.expand_dims(hidden, 1), ms.float32)
    scores = scores + hidden * LOWEST
    top = ops.stop_gradient(ops.amax(scores, -1, keepdims=True))
    weights = ops.exp(scores - top) * (1.0 - hidden)
    total = ops.sum(weights, -1, keepdim=True)
    seen = ops.cast(ops.greater(total, 0.0), ms.float32)
    total = total + (1.0 - seen)
    mixed = ops.matmul(ops.cast(weights / total, value.dtype), value)
    sums = ops.log(total) + ops.maximum(top, LOWEST) * seen + (1.0 - seen) * LOWEST
    return ops.transpose(mixed, (0, 2, 1, 3)), ops.reshape(sums, (batch, heads, length))


def _of_heads(x, count):
    """Keys or values (batch, length, groups, size), each for `count` heads: (batch, heads, length, size)."""
    x = ops.transpose(x, (0, 2, 1, 3))
    if count == 1:
        return x
    batch, groups, length, size = x.shape
    copies = ops.broadcast_to(ops.expand_dims(x, 2), (batch, groups, count, length, size))
    return ops.reshape(copies, (batch, groups * count, length, size))


def attend_part(query, key, value, first, last, places, scale, blocks):
    """Naive."""
    kind = ms.float64 if query.dtype == ms.float64 else ms.float32
    output, sums = attend(*(ops.cast(each, kind) for each in (query, key, value)), first, last, places, scale)
    return output, sums


def attend_gradient(query, key, value, first, last, places, scale, blocks, sums, delta, gradient):
    """Naive."""
    kind = ms.float64 if query.dtype == ms.float64 else ms.float32
    (batch, length, heads, size), (_, other, groups, _) = query.shape, key.shape
    query, gradient = (ops.transpose(ops.cast(each, kind), (0, 2, 1, 3)) for each in (query, gradient))
    key, value = (_of_heads(ops.cast(each, kind), heads // groups) for each in (key, value))
    scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) * scale
    place = ops.expand_dims(places, 1)
    hidden = ops.logical_or(
        ops.less(place, ops.expand_dims(first, 2)), ops.greater_equal(place, ops.expand_dims(last, 2))
    )
    dead = ops.cast(ops.less(sums, LOWEST / 10), kind)
    weights = ops.exp(ops.minimum(scores - ops.expand_dims(sums * (1.0 - dead), 3), 80.0))
    weights = weights * ops.cast(ops.expand_dims(ops.logical_not(hidden), 1), kind) * ops.expand_dims(1.0 - dead, 3)
    of_scores = weights * (ops.matmul(gradient, ops.transpose(value, (0, 1, 3, 2))) - ops.expand_dims(delta, 3))

    def by_groups(x):
        x = ops.sum(ops.reshape(x, (batch, groups, heads // groups, other, x.shape[3])), 2)
        return ops.transpose(x, (0, 2, 1, 3))

    of_query = ops.transpose(ops.matmul(of_scores, key) * scale, (0, 2, 1, 3))
    of_key = by_groups(ops.matmul(ops.transpose(of_scores, (0, 1, 3, 2)), query) * scale)
    return of_query, of_key, by_groups(ops.matmul(ops.transpose(weights, (0, 1, 3, 2)), gradient))
