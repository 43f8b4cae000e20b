"""Attention of chunks of queries to chunks of keys of one part of a sequence, added to that of other parts.

Tensors are stacks of chunks (chunks, batch, length of a chunk, …). A call multiplies pairs of chunks, slots, that are
alike on all ranks; which chunks these are is a constant of the rank.
"""

import mindspore as ms
from mindspore import ops

from mindformers_core.algorithms.attention import LOWEST, attend_gradient, attend_part

_largest, _product, _cast, _sum = ops.ReduceMax(), ops.MatMul(), ops.Cast(), ops.ReduceSum()


def add_part(output, sums, query, both, first, last, places, queries, keys, of_query, scale, blocks):
    """Output and logarithms of sums of all chunks of queries, after those that slots add to them.

    Args:
        output, sums: float32 (chunks, batch, length, heads, value_size), (chunks, batch, heads, length): those so far.
        query, first, last: a rank's chunks.
        both, places: chunks of keys and values, side by side, and places of the keys.
        queries, keys: int32 (slots,), which chunks.
        of_query: float32 (chunks, slots): 1 where a slot adds to a chunk.
        scale, blocks: as of `attend_part`, of one chunk each.
    """
    batch = query.shape[1]
    given = _picked(query, both, first, last, places, queries, keys)
    part, own = attend_part(*given, scale, blocks)
    part, own = _deep(part, batch), _deep(own, batch)
    mine = ops.reshape(of_query, (*of_query.shape, 1, 1, 1))
    top = ops.maximum(sums, _largest(ops.expand_dims(own, 0) * mine + (1.0 - mine) * LOWEST, 1))
    before, weights = ops.exp(sums - top), ops.exp(ops.minimum(own - ops.gather(top, queries, 0), 0.0))
    total = before + placed(of_query, weights)
    output = output * _for_tokens(before) + placed(of_query, part * _for_tokens(weights))
    return output / _for_tokens(total), ops.log(total) + top


def part_gradient(
    query, both, first, last, places, queries, keys, of_query, of_key, sums, delta, gradient, scale, blocks
):
    """The gradients of the chunks of queries, and of keys and values side by side, through slots.

    Args:
        sums, delta, gradient: stacks of chunks, of `attend_gradient`.
        of_key: float32 (chunks, slots): 1 where a slot has a chunk of keys.
        query, both, first, last, places, queries, keys, of_query, scale, blocks: as of `add_part`.
    """
    batch = query.shape[1]
    active = ops.reshape(_sum(of_query, 0), (-1, 1, 1, 1))
    sums = _flat(ops.gather(sums, queries, 0) * active + (1.0 - active) * LOWEST)
    delta, gradient = _flat(ops.gather(delta, queries, 0)), _flat(ops.gather(gradient, queries, 0))
    given = _picked(query, both, first, last, places, queries, keys)
    of_own, of_keys, of_values = attend_gradient(*given, scale, blocks, sums, delta, gradient)
    of_both = ops.cat((of_keys, of_values), 3)
    return placed(of_query, _deep(of_own, batch)), placed(of_key, _deep(of_both, batch))


def _picked(query, both, first, last, places, queries, keys):
    """The chunks of the slots as further rows of a batch."""
    _, batch, length, _, size = query.shape
    rows, columns = _flat(ops.gather(query, queries, 0)), _flat(ops.gather(both, keys, 0))
    shape = queries.shape[0], batch, length
    first, last = ops.gather(first, queries, 0), ops.gather(last, queries, 0)
    ranges = [_flat(ops.broadcast_to(each, shape)) for each in (first, last, ops.gather(places, keys, 0))]
    return rows, columns[:, :, :, :size], columns[:, :, :, size:], *ranges


def placed(selected, x):
    """The sums (chunks, …) of those slots of `x` (slots, …) that are `selected` (chunks, slots)."""
    shape = selected.shape[0], *x.shape[1:]
    return ops.reshape(_product(_cast(selected, x.dtype), ops.reshape(x, (x.shape[0], -1))), shape)


def _flat(x):
    return ops.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _deep(x, batch):
    return ops.reshape(x, (x.shape[0] // batch, batch, *x.shape[1:]))


def _for_tokens(x):
    """(chunks, batch, heads, length) as (chunks, batch, length, heads, 1)."""
    return ops.expand_dims(ops.transpose(x, (0, 1, 3, 2)), 4)
