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

from mindformers_core.algorithms.attention import (
    LOWEST,
    attend_gradient,
    attend_part,
    output_delta,
    score_dtype,
    with_own_gradient,
)
from mindformers_core.algorithms.attention_rows import side_rows
from mindformers_core.algorithms.compiled import on_cpu
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


def part_gradient(query, both, first, last, places, table, *others):
    """The gradients of the chunks of queries, and of keys and values side by side, through slots.

    Args:
        query, both, first, last, places, table: as of `add_part`.
        others: the further arguments of `_slot_gradients`.
    """
    of_query, of_slots = _slot_gradients(query, both, first, last, places, table, *others)
    return of_query, _placed(table[3 + query.shape[0] :], of_slots)


def _slot_gradients(
    query, both, first, last, places, table, sums, delta, gradient, scale, known, drop=0.0, own=None, draws=None
):
    """The gradients of the chunks of queries, and of each slot's keys and values, side by side.

    Args:
        sums, delta, gradient: stacks of chunks, of `attend_gradient`.
        query, both, first, last, places, table, scale, known, drop, own, draws: as of `add_part`.
    """
    count, batch, queries = query.shape[0], query.shape[1], table[1]
    of_query = table[3 : 3 + count]
    active = ops.reshape(ops.greater(_sum(_cast(of_query, ms.float32), 0), 0.5), (-1, 1, 1, 1))
    sums = _flat(ops.where(active, ops.gather(sums, queries, 0), LOWEST))
    delta, gradient = _flat(ops.gather(delta, queries, 0)), _flat(ops.gather(gradient, queries, 0))
    given = _picked(query, both, first, last, places, table)
    of_own, of_keys, of_values = attend_gradient(
        *given, scale, known_blocks(known), sums, delta, gradient, drop, *_drawn(own, draws, table)
    )
    return _placed(of_query, _deep(of_own, batch)), _deep(ops.cat((of_keys, of_values), 3), batch)


def attend_chunks(
    query, both, table, first, last, places, scale, products, is_fused=False, drop=0.0, own=None, draws=None
):
    """The operator `AttentionToChunks`: of a rank's queries to all chunks of keys that slots have, with its gradient.

    Args:
        query, first, last, own: of a rank, (batch, length, …), as of `attend`.
        both, places: chunks of keys and values, side by side, and places of the keys.
        table: the slots of all products, side by side.
        scale, drop, draws: as of `attend`.
        products: of each the first and the last + 1 of its slots, and its `known`, see `add_part`.
        is_fused: whether there is a kernel, see `fits_kernel`.

    Returns:
        As `attend`.
    """
    known = scale, products, is_fused, drop
    ranges = (first, last, places, own, draws) if drop else (first, last, places, first, places)
    return with_own_gradient(_attended, _slopes, (query, both), (table, *ranges), known)


def _attended(query, both, table, first, last, places, own, draws, scale, products, is_fused, drop):
    """Results of `attend_chunks`."""
    given, table, dropped = _stacked(query, both, table, first, last, places, own, draws, is_fused, drop)
    output = sums = None
    for start, stop, known in products:
        output, sums = add_part(output, sums, *given, table[:, start:stop], scale, known, *dropped)
    return _cast(whole(output), both.dtype), rows_of(sums)


def _slopes(query, both, table, first, last, places, own, draws, scale, products, is_fused, drop, results, gradients):
    """The gradients of query and of keys and values from those of both results."""
    given, table, dropped = _stacked(query, both, table, first, last, places, own, draws, is_fused, drop)
    output, sums = results
    gradient, of_sums = gradients
    gradient, count = _cast(gradient, sums.dtype), given[0].shape[0]
    delta = output_delta(output, gradient) - of_sums
    sums, delta, gradient = stack_of_rows(sums, count), stack_of_rows(delta, count), stack(gradient, count)
    of_query, of_slots = 0.0, []
    for start, stop, known in products:
        slots = table[:, start:stop], sums, delta, gradient, scale, known
        found = _slot_gradients(*given, *slots, *dropped)
        of_query = of_query + found[0]
        of_slots.append(found[1])
    of_both = _placed(table[3 + count :], ops.cat(of_slots, 0))
    return _cast(whole(of_query), query.dtype), _cast(of_both, both.dtype)


def _stacked(query, both, table, first, last, places, own, draws, is_fused, drop):
    """Arguments of `add_part`: stacks of chunks, the table; and what is dropped."""
    count = table.shape[0] - 3 - both.shape[0]
    dtype = query.dtype if is_fused else score_dtype(query)  # in blocks, CPU computes no bfloat16
    given = stack(_cast(query, dtype), count), _cast(both, dtype), stack(first, count), stack(last, count), places
    return given, _cast(table, ms.int32), (drop, stack(own, count), draws) if drop else ()


def _picked(query, both, first, last, places, table):
    """The chunks of the slots as further rows of a batch."""
    queries, keys, size = table[1], table[2], query.shape[4]
    rows, columns = _flat(ops.gather(query, queries, 0)), _flat(ops.gather(both, keys, 0))
    first, last, places = ops.gather(first, queries, 0), ops.gather(last, queries, 0), ops.gather(places, keys, 0)
    lengths = ((first, query.shape[2]), (last, query.shape[2]), (places, both.shape[2]))
    shape = table.shape[1], query.shape[1]
    ranges = tuple([_flat(ops.broadcast_to(each, (*shape, length))) for each, length in lengths])
    return rows, *sides(columns, size), *ranges


def sides(x, size):
    """Keys (…, size) and values (…, value_size) of those that lie side by side; on CPU no slices, see `side_rows`."""
    if not on_cpu():
        return x[..., :size], x[..., size:]
    step, first, second = side_rows(x.shape, size)
    pieces, shape = ops.reshape(x, (-1, step)), x.shape[:-1]
    first, second = ops.gather(pieces, first, 0), ops.gather(pieces, second, 0)
    return ops.reshape(first, (*shape, -1)), ops.reshape(second, (*shape, -1))


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


def stack(x, count):
    """(batch, length, …) as a stack of chunks (chunks, batch, length of a chunk, …)."""
    x = ops.reshape(x, (x.shape[0], count, x.shape[1] // count, *x.shape[2:]))
    return ops.transpose(x, (1, 0, *range(2, x.ndim)))


def whole(x):
    """The inverse of `stack`."""
    count, batch, length, *others = x.shape
    return ops.reshape(ops.transpose(x, (1, 0, *range(2, x.ndim))), (batch, count * length, *others))


def stack_of_rows(x, count):
    """(batch, heads, length) as (chunks, batch, heads, length of a chunk)."""
    return ops.transpose(stack(ops.transpose(x, (0, 2, 1)), count), (0, 1, 3, 2))


def rows_of(x):
    """The inverse of `stack_of_rows`."""
    return ops.transpose(whole(ops.transpose(x, (0, 1, 3, 2))), (0, 2, 1))
