"""Attention of queries to the keys whose places lie in their ranges: the computation of one rank on its parts.

Blocks of queries, each with all keys that it sees (Dao, "FlashAttention-2", arXiv 2307.08691): a block's weights exist
while it is computed, and again in the backward pass. On CPU a kernel that broadcasts or sums takes ten times as long as
a product of numbers, so what differs from row to row is a further column of a matrix product.
"""

from functools import cache

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.visible_blocks import place_runs, visible_blocks

LOWEST = -3.4028234663852886e38  # of float32: the logarithm of a sum of nothing
_HIDDEN = -1e28  # of a score, for each place between a key and its query's range: the farthest, 2**31, is finite, too
_SCORES = 1 << 20  # of a block, in all heads of a batch: they fit in a processor's cache
_product, _by_rows, _of_columns = ops.BatchMatMul(), ops.BatchMatMul(False, True), ops.BatchMatMul(True, False)
_largest = ops.ArgMaxWithValue(-1)


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
    outputs, sums = [], []
    for start, stop, ranges in blocks:
        rows = _by_groups(query[:, start:stop], groups) * scale
        output, total = _block(rows, key, value, first[:, start:stop], last[:, start:stop], places, ranges)
        outputs.append(_by_tokens(output, stop - start, heads))
        sums.append(ops.reshape(total, (batch, heads, stop - start)))
    return _joined(outputs, 1), _joined(sums, 2)


def _block(rows, key, value, first, last, places, ranges):
    """A block's output, and the logarithms of its sums (batch, groups, rows, 1)."""
    if len(ranges) == 0:
        nothing = ops.zeros_like(rows[:, :, :, :1])
        return _product(nothing, ops.zeros_like(value[:, :, :1])), nothing + LOWEST
    scores, values = [], []
    for low, high, is_masked in ranges:
        scores.append(_scores(rows, key, first, last, places, low, high, is_masked))
        values.append(value[:, :, low:high])
    scores = _joined(scores, 3)
    index, top = _largest(scores)
    weights = ops.softmax(scores, -1)
    output = _product(weights, _joined(values, 2))
    top = ops.expand_dims(top, 3)
    total = top - ops.log(ops.gather_elements(weights, 3, ops.expand_dims(index, 3)))
    seen = ops.cast(ops.greater(top, _HIDDEN / 10), ms.float32)
    return output * seen, total * seen + (1.0 - seen) * LOWEST


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
    ones = ops.ones((*key.shape[:3], 1), ms.float32)
    keys, values = ops.cat((key, ones), 3), ops.cat((value, ones), 3)
    sums = ops.where(ops.less(sums, LOWEST / 10), -LOWEST / 10, sums)  # rows that see nothing: all weights are 0
    of_query, of_key, of_value = [], ops.zeros_like(key), ops.zeros_like(value)
    for start, stop, ranges in blocks:
        shape = batch, groups, heads // groups * (stop - start), 1
        rows, of_rows = (_by_groups(each[:, start:stop], groups) for each in (query, gradient))
        rows, result = rows * scale, ops.zeros_like(rows)
        shifted = ops.cat((rows, -ops.reshape(sums[:, :, start:stop], shape)), 3)
        of_shifted = ops.cat((of_rows, -ops.reshape(delta[:, :, start:stop], shape)), 3)
        block = first[:, start:stop], last[:, start:stop], places
        for low, high, is_masked in ranges:
            weights = ops.exp(_scores(shifted, keys, *block, low, high, is_masked))
            of_scores = weights * _by_rows(of_shifted, values[:, :, low:high])
            result = result + _product(of_scores, key[:, :, low:high])
            of_key = _added(of_key, _of_columns(of_scores, rows), low, high)
            of_value = _added(of_value, _of_columns(weights, of_rows), low, high)
        of_query.append(_by_tokens(result * scale, stop - start, heads))
    of_key, of_value = (_by_tokens(each, each.shape[2], groups) for each in (of_key, of_value))
    return _joined(of_query, 1), of_key, of_value


def _by_groups(x, groups):
    """(batch, length, heads, size) as float32 (batch, groups, heads of a group * length, size)."""
    batch, length, heads, size = x.shape
    x = ops.reshape(ops.cast(x, ms.float32), (batch, length, groups, heads // groups, size))
    return ops.reshape(ops.transpose(x, (0, 2, 3, 1, 4)), (batch, groups, heads // groups * length, size))


def _by_tokens(x, length, heads):
    """(batch, groups, heads of a group * length, size) as (batch, length, heads, size)."""
    return ops.transpose(ops.reshape(x, (x.shape[0], heads, length, x.shape[3])), (0, 2, 1, 3))


def _scores(rows, key, first, last, places, low, high, is_masked):
    """The products of a block's rows with a range of keys; far below all others where a query doesn't see a key."""
    scores = _by_rows(rows, key[:, :, low:high])
    if not is_masked:
        return scores
    first, last = ops.expand_dims(ops.cast(first, ms.float32), 2), ops.expand_dims(ops.cast(last, ms.float32), 2)
    places = ops.expand_dims(ops.cast(places[:, low:high], ms.float32), 2)
    one, batch = ops.ones_like(first), max(first.shape[0], places.shape[0])
    columns = _copies(ops.cat((ops.ones_like(places), places), 2), batch)
    before = ops.relu(_by_rows(_copies(ops.cat((first, -one), 2), batch), columns))
    after = ops.relu(_by_rows(_copies(ops.cat((one - last, one), 2), batch), columns))
    hidden = ops.expand_dims((before + after) * _HIDDEN, 1)
    hidden = ops.cat((hidden,) * (rows.shape[2] // first.shape[1]), 2)
    return scores + _copies(ops.cat((hidden,) * rows.shape[1], 1), rows.shape[0])


def _copies(x, batch):
    """One row of a batch for all; a concatenation copies eight times as fast as what broadcasts."""
    return x if x.shape[0] == batch else ops.cat((x,) * batch, 0)


def _joined(parts, dim):
    return parts[0] if len(parts) == 1 else ops.cat(parts, dim)


def _added(x, part, low, high):
    """`x` (batch, groups, length, size) with a part added to its tokens low … high - 1."""
    parts = x[:, :, :low], x[:, :, low:high] + part, x[:, :, high:]
    return _joined([each for each in parts if each.shape[2]], 2)


class _Attention(nn.Cell):
    """`attend` for known blocks."""

    def __init__(self, scale, blocks):
        super().__init__(auto_prefix=False)
        self.scale, self.blocks = scale, blocks

    def construct(self, query, key, value, first, last, places):
        output, sums = attend_part(query, key, value, first, last, places, self.scale, self.blocks)
        return ops.cast(output, value.dtype), sums

    def bprop(self, query, key, value, first, last, places, out, dout):
        (output, sums), (gradient, of_sums) = out, dout
        delta = ops.sum(ops.cast(output, ms.float32) * ops.cast(gradient, ms.float32), 3)
        delta = ops.transpose(delta, (0, 2, 1)) - of_sums
        found = attend_gradient(
            query, key, value, first, last, places, self.scale, self.blocks, sums, delta, gradient
        )  # fmt: skip
        zeros = [ops.zeros_like(each) for each in (first, last, places)]
        return *[ops.cast(each, of.dtype) for each, of in zip(found, (query, key, value))], *zeros


_attention_cell = cache(_Attention)


def attend(query, key, value, first, last, places, scale, order=None, reach=(None, None), exact=False):
    """The operator `Attention`, whose arguments its function for models describes."""
    blocks = _blocks(query.shape, key.shape, order, reach, exact)
    return _attention_cell(scale, blocks)(query, key, value, first, last, places)


@cache
def _blocks(query, key, order, reach, is_exact):
    """`visible_blocks` of tensors of these shapes."""
    (batch, length, heads, _), key_length = query, key[1]
    rows = max(16, min(length // 8, _SCORES // (batch * heads * key_length)))
    if order is None:
        order, reach, is_exact = (0,), (None, None), False
    queries, keys = (place_runs(order, each // len(order)) for each in (length, key_length))
    return visible_blocks(queries, keys, reach, is_exact, rows)
