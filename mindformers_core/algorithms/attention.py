"""Attention of queries to the keys whose places lie in their ranges: the computation of one rank on its parts."""

import mindspore as ms
from mindspore import ops

_LOWEST = -3.4028234663852886e38  # of float32


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
    scores = scores + hidden * _LOWEST
    top = ops.stop_gradient(ops.amax(scores, -1, keepdims=True))
    weights = ops.exp(scores - top) * (1.0 - hidden)
    total = ops.sum(weights, -1, keepdim=True)
    seen = ops.cast(ops.greater(total, 0.0), ms.float32)
    total = total + (1.0 - seen)
    mixed = ops.matmul(ops.cast(weights / total, value.dtype), value)
    sums = ops.log(total) + ops.maximum(top, _LOWEST) * seen + (1.0 - seen) * _LOWEST
    return ops.transpose(mixed, (0, 2, 1, 3)), ops.reshape(sums, (batch, heads, length))


def _of_heads(x, count):
    """Keys or values (batch, length, groups, size), each for `count` heads: (batch, heads, length, size)."""
    x = ops.transpose(x, (0, 2, 1, 3))
    if count == 1:
        return x
    batch, groups, length, size = x.shape
    copies = ops.broadcast_to(ops.expand_dims(x, 2), (batch, groups, count, length, size))
    return ops.reshape(copies, (batch, groups * count, length, size))
