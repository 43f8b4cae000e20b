"""Attention of queries to the keys whose places lie in their ranges: the computation of one rank on its parts.

Blocks of queries, each with all keys that it sees (Dao, "FlashAttention-2", arXiv 2307.08691): a block's weights exist
while it is computed, and again in the backward pass. On CPU a kernel that broadcasts or sums takes ten times as long as
a product of numbers, so what differs from row to row is a further column of a matrix product.
"""

from functools import cache

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.algorithms.compiled import in_graph
from mindformers_core.operators.visible_blocks import place_runs, visible_blocks

LOWEST = -3.4028234663852886e38  # of float32: the logarithm of a sum of nothing
_HIDDEN = -1e28  # of a score, for each place between a key and its query's range: the farthest, 2**31, is finite, too
_SCORES = 1 << 20  # of a block, in all heads of a batch: they fit in a processor's cache
_product, _by_rows, _of_columns = ops.BatchMatMul(), ops.BatchMatMul(False, True), ops.BatchMatMul(True, False)
_largest, _positive, _ones_like = ops.ArgMaxWithValue(-1), ops.ReLU(), ops.OnesLike()
_cast, _sum = ops.Cast(), ops.ReduceSum()


def attend_part(query, key, value, first, last, places, scale, blocks):
    """Attention to a part of the keys, and the logarithms of its sums, by which outputs of several parts are merged.

    Args:
        query, key, value, first, last, places, scale: as of `attention`.
        blocks: of `visible_blocks`; ranges are masked by `first`, `last` and `places`.

    Returns:
        float32 (batch, length, heads, value_size), and float32 (batch, heads, length), `LOWEST` where nothing is seen.
    """
    batch, _, heads, _ = query.shape
    groups = key.shape[2]
    key, value = _by_groups(key, groups), _by_groups(value, groups)
    places = _place_columns(places, batch)
    outputs, sums = [], []
    for start, stop, ranges in blocks:
        rows = _by_groups(query[:, start:stop], groups) * scale
        limits = _limits(first, last, batch, start, stop)
        scores, values = [], []
        for low, high, is_masked in ranges:
            part = _by_rows(rows, key[:, :, low:high])
            if is_masked:
                part = part + _hidden(limits, places[:, low:high], rows)
            scores.append(part)
            values.append(value[:, :, low:high])
        scores = _joined(scores, 3)
        index, top = _largest(scores)
        weights = ops.softmax(scores, -1)
        top, largest = ops.expand_dims(top, 3), ops.gather_elements(weights, 3, ops.expand_dims(index, 3))
        seen = _cast(ops.greater(top, _HIDDEN / 10), ms.float32)
        total = (top - ops.log(largest)) * seen + (1.0 - seen) * LOWEST
        outputs.append(_by_tokens(_product(weights, _joined(values, 2)) * seen, stop - start, heads))
        sums.append(ops.reshape(total, (batch, heads, stop - start)))
    return ops.cat(outputs, 1), ops.cat(sums, 2)


def attend_gradient(query, key, value, first, last, places, scale, blocks, sums, delta, gradient):
    """The gradients of query, key and value through a part of the keys, in float32.

    Args:
        query, key, value, first, last, places, scale, blocks: as of `attend_part`.
        sums: float32 (batch, heads, length), the logarithms of the sums of all parts.
        delta: float32 (batch, heads, length), the sum of the product of the whole output, of all parts, and its
            gradient, minus the gradient of `sums`.
        gradient: of the whole output, (batch, length, heads, value_size).
    """
    batch, _, heads, _ = query.shape
    groups = key.shape[2]
    key, value = _by_groups(key, groups), _by_groups(value, groups)
    ones = ops.ones((*key.shape[:3], 1), key.dtype)
    places = _place_columns(places, batch)
    keys, values = ops.cat((key, ones), 3), ops.cat((value, ones), 3)
    sums = ops.where(ops.less(sums, LOWEST / 10), -LOWEST / 10, sums)  # rows that see nothing: all weights are 0
    of_query, of_key, of_value = [], ops.zeros_like(key), ops.zeros_like(value)
    for start, stop, ranges in blocks:
        shape = batch, groups, heads // groups * (stop - start), 1
        rows, of_rows = _by_groups(query[:, start:stop], groups) * scale, _by_groups(gradient[:, start:stop], groups)
        result = ops.zeros_like(rows)
        shifted = ops.cat((rows, -ops.reshape(sums[:, :, start:stop], shape)), 3)
        of_shifted = ops.cat((of_rows, -ops.reshape(delta[:, :, start:stop], shape)), 3)
        limits = _limits(first, last, batch, start, stop)
        for low, high, is_masked in ranges:
            scores = _by_rows(shifted, keys[:, :, low:high])
            if is_masked:
                scores = scores + _hidden(limits, places[:, low:high], rows)
            weights = ops.exp(scores)
            of_scores = weights * _by_rows(of_shifted, values[:, :, low:high])
            result = result + _product(of_scores, key[:, :, low:high])
            of_key = _added(of_key, _of_columns(of_scores, rows), low, high)
            of_value = _added(of_value, _of_columns(weights, of_rows), low, high)
        of_query.append(_by_tokens(result * scale, stop - start, heads))
    of_key, of_value = _by_tokens(of_key, of_key.shape[2], groups), _by_tokens(of_value, of_key.shape[2], groups)
    return ops.cat(of_query, 1), of_key, of_value


def _by_groups(x, groups):
    """(batch, length, heads, size) as float32, or float64, (batch, groups, heads of a group * length, size)."""
    batch, length, heads, size = x.shape
    x = ops.reshape(
        _cast(x, ms.float64 if x.dtype == ms.float64 else ms.float32), (batch, length, groups, heads // groups, size)
    )
    return ops.reshape(ops.transpose(x, (0, 2, 3, 1, 4)), (batch, groups, heads // groups * length, size))


def _by_tokens(x, length, heads):
    """(batch, groups, heads of a group * length, size) as (batch, length, heads, size)."""
    return ops.transpose(ops.reshape(x, (x.shape[0], heads, length, x.shape[3])), (0, 2, 1, 3))


def _limits(first, last, batch, start, stop):
    """The ranges of a block's queries: two factors of the distances before and after them (batch, rows, 2)."""
    first, last = _columns(first[:, start:stop], batch), _columns(last[:, start:stop], batch)
    one = _ones_like(first)
    return ops.cat((first, -one), 2), ops.cat((one - last, one), 2)


def _place_columns(places, batch):
    """Places of keys, the other factor (batch, key_length, 2)."""
    places = _columns(places, batch)
    return ops.cat((_ones_like(places), places), 2)


def _columns(x, batch):
    """(batch or 1, length) as float32 (batch, length, 1)."""
    return ops.expand_dims(_cast(ops.cat((x,) * (batch // x.shape[0]), 0), ms.float32), 2)


def _hidden(limits, places, rows):
    """What makes scores of keys that a query doesn't see lower than all others: (batch, groups, rows, keys)."""
    before, after = limits
    hidden = (_positive(_by_rows(before, places)) + _positive(_by_rows(after, places))) * _HIDDEN
    batch, groups, count, _ = rows.shape
    heads = ops.cat((ops.expand_dims(hidden, 1),) * (groups * count // hidden.shape[1]), 1)
    return ops.reshape(heads, (batch, groups, count, places.shape[1]))


def _joined(parts, dim):
    return parts[0] if len(parts) == 1 else ops.cat(parts, dim)


def _added(x, part, low, high):
    """`x` (batch, groups, length, size) with a part added to its tokens low … high - 1."""
    return ops.cat((x[:, :, :low], x[:, :, low:high] + part, x[:, :, high:]), 2)


class _Attention(nn.Cell):
    """`attend_part` of all keys with its gradient, for PyNative."""

    def __init__(self, scale, blocks):
        super().__init__(auto_prefix=False)
        self.scale, self.blocks = scale, blocks

    def construct(self, query, key, value, first, last, places):
        output, sums = attend_part(query, key, value, first, last, places, self.scale, self.blocks)
        return _cast(output, value.dtype), sums

    def bprop(self, query, key, value, first, last, places, out, dout):
        return _gradients(query, key, value, first, last, places, self.scale, self.blocks, out, dout)


class _WithGradient(nn.Cell):
    """The results of `attend_part` for all keys, with its gradient, for graphs.

    Results are arguments, and the Cell's have a dim more, since in a compiled function that PyNative differentiates a
    `bprop` gets the results of the Cell's last call; no integers pass through it (see docs/mindspore.md).
    """

    def __init__(self, scale, blocks):
        super().__init__(auto_prefix=False)
        self.scale, self.blocks = scale, blocks

    def construct(self, query, key, value, first, last, places, output, sums):
        return ops.expand_dims(output, 0), ops.expand_dims(sums, 0)

    def bprop(self, query, key, value, first, last, places, output, sums, out, dout):
        results, gradients = (output, sums), (dout[0][0], dout[1][0])
        found = _gradients(query, key, value, first, last, places, self.scale, self.blocks, results, gradients)
        return *found, ops.zeros_like(output), ops.zeros_like(sums)


_attention, _with_gradient = cache(_Attention), cache(_WithGradient)


def _gradients(query, key, value, first, last, places, scale, blocks, results, gradients):
    """Those of the first six arguments, for those of both results."""
    output, sums = results
    gradient, of_sums = gradients
    delta = _sum(_cast(output, sums.dtype) * _cast(gradient, sums.dtype), 3)
    delta = ops.transpose(delta, (0, 2, 1)) - of_sums
    of_query, of_key, of_value = attend_gradient(
        query, key, value, first, last, places, scale, blocks, sums, delta, gradient
    )
    found = _cast(of_query, query.dtype), _cast(of_key, key.dtype), _cast(of_value, value.dtype)
    return *found, ops.zeros_like(first), ops.zeros_like(last), ops.zeros_like(places)


def attend(
    query, key, value, first, last, places, scale, order=None, reach=(None, None), exact=False, algorithm="auto"
):
    """The operator `Attention`, whose arguments its function for models describes."""
    blocks = _blocks(query.shape, key.shape, order, reach, exact)
    if not in_graph():
        return _attention(scale, blocks)(query, key, value, first, last, places)
    ranges = _cast(first, ms.float32), _cast(last, ms.float32), _cast(places, ms.float32)
    free = ops.stop_gradient(query), ops.stop_gradient(key), ops.stop_gradient(value)
    output, sums = attend_part(*free, *ranges, scale, blocks)
    output = _cast(output, value.dtype)
    outputs, all_sums = _with_gradient(scale, blocks)(query, key, value, *ranges, output, sums)
    return ops.reshape(outputs, output.shape), ops.reshape(all_sums, sums.shape)


@cache
def _blocks(query, key, order, reach, is_exact):
    """`visible_blocks` of tensors of these shapes."""
    (batch, length, heads, _), key_length = query, key[1]
    rows = max(128, min(length // 8, _SCORES // (batch * heads * key_length)))
    if order is None:
        order, reach, is_exact = (0,), (None, None), False
    queries, keys = (place_runs(order, each // len(order)) for each in (length, key_length))
    return visible_blocks(queries, keys, reach, is_exact, rows)
