"""Attention of chunks of queries to chunks of keys of one part of a sequence, added to that of other parts.

Tensors are stacks of chunks (chunks, batch, length of a chunk, …). A call multiplies some pairs of chunks, its slots,
as many and alike on all ranks. A constant of the rank says which they are, so that graphs differ in nothing else: of a
product with a constant 0, say, MindSpore's compiler keeps nothing.

The table of slots is int32 (3 + 2 * chunks, slots). Row 0 is a number that no other table of a program has, since equal
constants would be one; rows 1 and 2 are the chunks of queries and of keys; then comes, for every chunk of queries and
for every chunk of keys, a row with 1 for the slots that have it, and 0 for the others; slots of no chunk don't count.
"""

import mindspore as ms
from mindspore import ops

from mindformers_core.algorithms.attention import LOWEST, attend_gradient, attend_part
from mindformers_core.operators.visible_blocks import known_blocks

_largest, _product, _cast, _sum = ops.ReduceMax(), ops.MatMul(), ops.Cast(), ops.ReduceSum()


def add_part(output, sums, query, both, first, last, places, table, scale, known, drop=0.0, own=None, draws=None):
    """Output and logarithms of sums of all chunks of queries, after those that slots add to them.

    Args:
        output, sums: float32 (chunks, batch, length, heads, value_size), (chunks, batch, heads, length): those so far;
            None: of nothing.
        query, first, last: a rank's chunks.
        both, places: chunks of keys and values, side by side, and places of the keys.
        table: of slots.
        scale: as of `attention`.
        known: a `visible_band`, or arguments of `visible_blocks`, of one chunk each.
        drop, own, draws: as of `attend_part`, places as a stack of chunks; draws are those of all.
    """
    count, batch, queries = query.shape[0], query.shape[1], table[1]
    dropped, blocks = (drop, *_drawn(own, draws, table)), known_blocks(known)
    part, own = attend_part(*_picked(query, both, first, last, places, table), scale, blocks, *dropped)
    part, own = _deep(part, batch), _deep(own, batch)
    if output is None:
        sums = ops.zeros((count, *own.shape[1:]), own.dtype) + LOWEST
        output = ops.zeros((count, *part.shape[1:]), part.dtype)
    of_query = _cast(table[3 : 3 + count], own.dtype)
    mine = ops.reshape(ops.greater(of_query, 0.5), (*of_query.shape, 1, 1, 1))
    top = ops.maximum(sums, _largest(ops.where(mine, ops.expand_dims(own, 0), LOWEST), 1))
    before, weights = ops.exp(sums - top), ops.exp(ops.minimum(own - ops.gather(top, queries, 0), 0.0))
    total = before + _placed(of_query, weights)
    size = part.shape[4]
    output = output * _for_tokens(before / total, size)
    added = _placed(of_query, part * _for_tokens(weights / ops.gather(total, queries, 0), size))
    return output + added, ops.log(total) + top


def part_gradient(
    query, both, first, last, places, table, sums, delta, gradient, scale, known, drop=0.0, own=None, draws=None
):
    """The gradients of the chunks of queries, and of keys and values side by side, through slots.

    Args:
        sums, delta, gradient: stacks of chunks, of `attend_gradient`.
        query, both, first, last, places, table, scale, known, drop, own, draws: as of `add_part`.
    """
    count, batch, queries = query.shape[0], query.shape[1], table[1]
    of_query, of_key = table[3 : 3 + count], table[3 + count :]
    active = ops.reshape(ops.greater(_sum(_cast(of_query, ms.float32), 0), 0.5), (-1, 1, 1, 1))
    sums = _flat(ops.where(active, ops.gather(sums, queries, 0), LOWEST))
    delta, gradient = _flat(ops.gather(delta, queries, 0)), _flat(ops.gather(gradient, queries, 0))
    given = _picked(query, both, first, last, places, table)
    of_own, of_keys, of_values = attend_gradient(
        *given, scale, known_blocks(known), sums, delta, gradient, drop, *_drawn(own, draws, table)
    )
    of_both = ops.cat((of_keys, of_values), 3)
    return _placed(of_query, _deep(of_own, batch)), _placed(of_key, _deep(of_both, batch))


def _picked(query, both, first, last, places, table):
    """The chunks of the slots as further rows of a batch."""
    queries, keys, size = table[1], table[2], query.shape[4]
    rows, columns = _flat(ops.gather(query, queries, 0)), _flat(ops.gather(both, keys, 0))
    first, last, places = ops.gather(first, queries, 0), ops.gather(last, queries, 0), ops.gather(places, keys, 0)
    lengths = ((first, query.shape[2]), (last, query.shape[2]), (places, both.shape[2]))
    shape = table.shape[1], query.shape[1]
    ranges = tuple([_flat(ops.broadcast_to(each, (*shape, length))) for each, length in lengths])
    return rows, columns[:, :, :, :size], columns[:, :, :, size:], *ranges


def _drawn(own, draws, table):
    """The places of the queries of the slots, and the draws of their samples and heads, likewise."""
    if draws is None:
        return None, None
    own, batch = ops.gather(own, table[1], 0), draws.shape[0]
    own = _flat(ops.broadcast_to(own, (own.shape[0], batch, own.shape[2])))
    return own, ops.cat((draws,) * table.shape[1], 0)


def _placed(selected, x):
    """The sums (chunks, …) of those slots of `x` (slots, …) that are `selected` (chunks, slots)."""
    shape = selected.shape[0], *x.shape[1:]
    return ops.reshape(_product(_cast(selected, x.dtype), ops.reshape(x, (x.shape[0], -1))), shape)


def _flat(x):
    return ops.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def _deep(x, batch):
    return ops.reshape(x, (x.shape[0] // batch, batch, *x.shape[1:]))


def _for_tokens(x, size):
    """(chunks, batch, heads, length) as (chunks, batch, length, heads, size)."""
    x = ops.transpose(x, (0, 1, 3, 2))
    return ops.reshape(_product(ops.reshape(x, (-1, 1)), ops.ones((1, size), x.dtype)), (*x.shape, size))
