"""Attention of queries to the keys whose places lie in their ranges: the computation of one rank on its parts.

Blocks of queries, each with all keys that it sees (Dao, "FlashAttention-2", arXiv 2307.08691): a block's weights exist
while it is computed, and again in the backward pass. On CPU a kernel that broadcasts or sums takes ten times as long as
a product of numbers, so what differs from row to row is a further column of a matrix product.
"""

from functools import lru_cache

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.algorithms.attention_dropout import drawn_halves, kept
from mindformers_core.algorithms.attention_rows import HIDDEN, block_rows, is_known, of_seen_keys, token_rows
from mindformers_core.algorithms.compiled import in_graph, on_cpu
from mindformers_core.algorithms.fused_attention import attend_fused, attend_fused_gradient, fits_kernel
from mindformers_core.batches import BLOCK, chunk_length
from mindformers_core.mindspore_private import forbid_reuse
from mindformers_core.operators.visible_blocks import is_band, place_runs, visible_band, visible_blocks

LOWEST = -3.4028234663852886e38  # of float32: the logarithm of a sum of nothing
_SCORES = 1 << 20  # of a block, in all heads of a batch: they fit in a processor's cache
_product, _by_rows, _of_columns = ops.BatchMatMul(), ops.BatchMatMul(False, True), ops.BatchMatMul(True, False)
_largest, _positive, _ones_like = ops.ArgMaxWithValue(-1), ops.ReLU(), ops.OnesLike()
_cast = ops.Cast()
_KEPT = 64  # shapes whose blocks are remembered: prompts have many lengths


def attend_part(query, key, value, first, last, places, scale, blocks, drop=0.0, own=None, draws=None):
    """Attention to a part of the keys, and the logarithms of its sums, by which outputs of several parts are merged.

    Args:
        query, key, value, first, last, places, scale: as of `attention`.
        blocks: of `visible_blocks`, whose ranges are masked by `first`, `last` and `places`; or a `visible_band`.
        drop, own, draws: as of `attend`.

    Returns:
        float32 (batch, length, heads, value_size), and float32 (batch, heads, length), `LOWEST` where nothing is seen.
    """
    if is_band(blocks):
        return attend_fused(query, key, value, scale, blocks)
    return of_seen_keys(_attend_blocks, (query, key, value, first, last, places, own, draws), scale, drop, blocks)


def _attend_blocks(query, key, value, first, last, places, own, draws, scale, drop, blocks, is_whole=True):
    """`attend_part` of these blocks; `is_whole`: see `block_rows`."""
    batch, _, heads, _ = query.shape
    groups = key.shape[2]
    queries, keys, values = _rows(query, scale), _rows(key), _rows(value)
    halves = drawn_halves(own, draws, places) if drop else None
    ranges = _distances(first, last, places, batch, blocks)
    outputs, sums = [], []
    for columns, sides, taken, _, parts in block_rows(batch, heads, groups, key.shape[1], blocks, is_whole):
        sides = [_taken(keys, each, batch, groups) for each in sides]
        block_values = _taken(values, taken, batch, groups)
        for start, stop, hidden, rows in parts:
            mask = hidden, ranges, start, stop, columns
            scores = _scores(_taken(queries, rows, batch, groups), sides, mask)
            index, top = _largest(scores)
            weights = ops.softmax(scores, -1)
            largest = ops.gather_elements(weights, 3, ops.expand_dims(index, 3))
            if drop:
                weights = weights * kept(halves, drop, start, stop, columns, weights)
            outputs.append(ops.reshape(_product(weights, block_values), (-1, values.shape[1])))
            sums.append(ops.reshape(ops.expand_dims(top, 3) - ops.log(largest), (batch, heads, stop - start)))
    sums = ops.cat(sums, 2)
    seen = _cast(ops.greater(sums, HIDDEN / 10), ms.float32)
    output = ops.gather(ops.cat(outputs, 0), token_rows(batch, heads, blocks), 0)
    output = output * _wide(ops.transpose(seen, (0, 2, 1)), output)
    return ops.reshape(output, (*query.shape[:3], value.shape[3])), sums * seen + (1.0 - seen) * LOWEST


def attend_gradient(
    query, key, value, first, last, places, scale, blocks, sums, delta, gradient, drop=0.0, own=None, draws=None
):
    """The gradients of query, key and value through a part of the keys, in float32.

    Args:
        query, key, value, first, last, places, scale, blocks, drop, own, draws: as of `attend_part`.
        sums: float32 (batch, heads, length), the logarithms of the sums of all parts.
        delta: float32 (batch, heads, length), the sum of the product of the whole output, of all parts, and its
            gradient, minus the gradient of `sums`.
        gradient: of the whole output, (batch, length, heads, value_size).
    """
    if is_band(blocks):
        return attend_fused_gradient(query, key, value, scale, blocks, sums, delta, gradient)
    given = query, key, value, first, last, places, own, draws, sums, delta, gradient
    return of_seen_keys(_blocks_gradient, given, scale, drop, blocks)


def _blocks_gradient(
    query, key, value, first, last, places, own, draws, sums, delta, gradient, scale, drop, blocks, is_whole=True
):  # fmt: skip
    """`attend_gradient` of these blocks; `is_whole`: see `block_rows`."""
    batch, _, heads, size = query.shape
    groups, key_length = key.shape[2], key.shape[1]
    queries, gradients = _rows(query, scale), _rows(gradient)
    keys, values = _rows(key), _rows(value)
    longer_keys, longer_values = _with_column(keys), _with_column(values)
    halves = drawn_halves(own, draws, places) if drop else None
    ranges = _distances(first, last, places, batch, blocks)
    sums = ops.where(ops.less(sums, LOWEST / 10), -LOWEST / 10, sums)  # rows that see nothing: all weights are 0
    of_query, of_key, of_value, of_taken, all_taken = [], 0.0, 0.0, [], []
    # the largest block of a causal mask first: what it frees has room for the others
    for columns, sides, taken, back, parts in block_rows(batch, heads, groups, key_length, blocks, is_whole)[::-1]:
        sides = [_taken(longer_keys, each, batch, groups) for each in sides]
        block_keys, block_values = (_taken(each, taken, batch, groups) for each in (keys, longer_values))
        of_block_keys, of_block_values = 0.0, 0.0
        for start, stop, hidden, rows in parts[::-1]:
            block = [_taken(each, rows, batch, groups) for each in (queries, gradients)]
            of_rows = [ops.reshape(each[:, :, start:stop], (*block[0].shape[:3], 1)) for each in (sums, delta)]
            mask = hidden, ranges, start, stop, columns
            found = _block_gradient(*block, *of_rows, sides, block_keys, block_values, mask, drop, halves)
            of_query.append(ops.reshape(found[0], (-1, size)))
            of_block_keys, of_block_values = of_block_keys + found[1], of_block_values + found[2]
        if is_whole:
            of_key = of_key + _placed(of_block_keys, back)
            of_value = of_value + _placed(of_block_values, back)
        else:
            of_taken.append([ops.reshape(each, (-1, each.shape[3])) for each in (of_block_keys, of_block_values)])
            all_taken.append(taken)
    if not is_whole:
        taken, count = ops.cat(all_taken, 0), batch * key_length * groups
        of_key, of_value = [ops.unsorted_segment_sum(ops.cat(each, 0), taken, count) for each in zip(*of_taken)]
    of_query = ops.gather(ops.cat(of_query[::-1], 0), token_rows(batch, heads, blocks), 0) * scale
    return ops.reshape(of_query, query.shape), ops.reshape(of_key, key.shape), ops.reshape(of_value, value.shape)


def _block_gradient(query, gradient, sums, delta, sides, keys, values, mask, drop, halves):
    """The gradients of a block's queries, keys and values: a function, at whose end scores and weights are freed."""
    weights = ops.exp(_scores(ops.cat((query, -sums), 3), sides, mask))
    of_weights, mixing = _by_rows(ops.cat((gradient, -delta), 3), values), weights
    if drop:
        stays = kept(halves, drop, *mask[2:], weights)
        of_weights, mixing = of_weights * stays + (stays - 1.0) * delta, weights * stays
    of_scores = weights * of_weights
    return _product(of_scores, keys), _of_columns(of_scores, query), _of_columns(mixing, gradient)


def output_delta(output, gradient):
    """(batch, heads, length): of each row the sum of the product of an output and its gradient."""
    dtype = score_dtype(output)
    products = ops.reshape(_cast(output, dtype) * _cast(gradient, dtype), (-1, output.shape[3]))
    delta = _product(ops.expand_dims(products, 0), ops.reshape(_ones_like(products[:1]), (1, -1, 1)))
    return ops.transpose(ops.reshape(delta, output.shape[:3]), (0, 2, 1))


def score_dtype(x):
    """The dtype of scores, sums and gradients of a query, key or value: float32, and float64 of float64."""
    return ms.float64 if x.dtype == ms.float64 else ms.float32


RESULT_DTYPES = {  # of the operators of attention, by their arguments
    "Attention": lambda query, key, value, *_, **__: (value.dtype, score_dtype(query)),
    "AttentionToChunks": lambda query, both, *_, **__: (both.dtype, score_dtype(query)),
    "AttentionPart": lambda output, sums, query, *_, **__: (score_dtype(query),) * 2,
    "AttentionPartGradient": lambda query, *_, **__: (score_dtype(query),) * 2,
}


def _rows(x, factor=1.0):
    """(batch, length, heads, size) in its `score_dtype`, (batch * length * heads, size), times a number.

    Not a view, since in PyNative each gather of some rows of a view copies all of it before.
    """
    return ops.reshape(_cast(x, score_dtype(x)), (-1, x.shape[3])) * factor


def _taken(x, rows, batch, groups):
    """Rows of a block (batch, groups, rows, size)."""
    return ops.reshape(ops.gather(x, rows, 0), (batch, groups, -1, x.shape[1]))


def _with_column(x):
    """Rows with a 1 at their ends, which multiplies what is subtracted from each row of a product."""
    return ops.cat((x, _ones_like(x[:, :1])), 1)


def _wide(x, like):
    """A number for every row, as wide as the row."""
    one = ops.reshape(_ones_like(like[:1]), (1, 1, -1))
    return ops.reshape(_product(ops.reshape(_cast(x, like.dtype), (1, -1, 1)), one), (-1, like.shape[1]))


def _distances(first, last, places, batch, blocks):
    """Of queries the factors of distances to keys, before their ranges and after them, and of keys the other factor.

    None where all masks are known: on CPU a cast of a few numbers takes as long as one of a million.
    """
    if is_known(blocks):
        return None
    first, last, places = _columns(first, batch), _columns(last, batch), _columns(places, batch)
    one, ones = _ones_like(first), _ones_like(places)
    return ops.cat((first, -one), 2), ops.cat((one - last, one), 2), ops.cat((ones, places), 2)


def _columns(x, batch):
    """(batch or 1, length) as float32 (batch, length, 1)."""
    return ops.expand_dims(ops.cat((_cast(x, ms.float32),) * (batch // x.shape[0]), 0), 2)


def _scores(rows, sides, mask):
    """Scores (batch, groups, rows, keys) of a block, much lower than all others where a query doesn't see a key.

    Args:
        rows: of queries, (batch, groups, rows, size).
        sides: of keys, likewise; a mask is of the last one. (On CPU joining products costs less than a mask of 0s.)
        mask: whether and how keys are `hidden`, see `block_rows`; `_distances`; start and stop; columns.
    """
    parts = tuple([_by_rows(rows, each) for each in sides])  # graphs have no gradient of a list's parts
    if mask[0] is not None:
        parts = *parts[:-1], parts[-1] + _hidden(*mask, parts[-1].shape)
    return ops.cat(parts, 3) if parts[1:] else parts[0]


def _hidden(hidden, ranges, start, stop, columns, shape):
    """What makes scores (batch, groups, rows, keys) of keys that a query doesn't see lower than all others."""
    batch, groups, rows, _ = shape
    copies = groups * rows // (stop - start)
    if ranges is None:
        return ops.reshape(ops.cat((hidden,) * (batch * copies), 0), shape)
    before, after, places = ranges
    before, after, places = before[:, start:stop], after[:, start:stop], ops.gather(places, columns, 1)
    hidden = (_positive(_exact(before, places)) + _positive(_exact(after, places))) * HIDDEN
    return ops.reshape(ops.cat((ops.expand_dims(hidden, 1),) * copies, 1), shape)


def _exact(rows, columns):
    """Products of rows and columns of two numbers; devices may round those of float32 matrices, but not of numbers."""
    if on_cpu():
        return _by_rows(rows, columns)
    columns = ops.transpose(columns, (0, 2, 1))
    return rows[:, :, :1] * columns[:, :1] + rows[:, :, 1:] * columns[:, 1:]


def _placed(x, back):
    """What a block adds to all keys: its rows, of (batch, groups, keys, size), and 0; `back`: of `block_rows`."""
    rows = ops.reshape(x, (-1, x.shape[3]))
    return ops.gather(ops.cat((rows, ops.zeros((1, x.shape[3]), x.dtype)), 0), back, 0)


class _OwnGradient(nn.Cell):
    """The results of `attended`, with `slopes` as their gradient, for PyNative: see `with_own_gradient`."""

    def __init__(self, attended, slopes, known):
        super().__init__(auto_prefix=False)
        self.attended, self.slopes, self.known = attended, slopes, known

    def construct(self, *given):
        return self.attended(*given, *self.known)

    def bprop(self, *given):
        *given, results, gradients = given
        found = self.slopes(*given, *self.known, results, gradients)
        return *found, *[ops.zeros_like(each) for each in given[len(found) :]]


class _OwnGraphGradient(nn.Cell):
    """Results that are given, with `slopes` as their gradient, for graphs: see `with_own_gradient`.

    Results are arguments, and the Cell's have a dim more, since in a compiled function that PyNative differentiates a
    `bprop` gets the results of the Cell's last call; no integers pass through it (see docs/mindspore.md).
    """

    def __init__(self, slopes, known):
        super().__init__(auto_prefix=False)
        self.slopes, self.known = slopes, known
        forbid_reuse(self)

    def construct(self, query, key, value, first, last, places, own, draws, output, sums):
        return ops.expand_dims(output, 0), ops.expand_dims(sums, 0)

    def bprop(self, query, key, value, first, last, places, own, draws, output, sums, out, dout):
        given, results = (query, key, value, first, last, places, own, draws), (output, sums)
        gradients = [ops.reshape(gradient, result.shape) for gradient, result in zip(dout, results)]
        found = self.slopes(*given, *self.known, results, gradients)
        return *found, *[ops.zeros_like(each) for each in (*given[len(found) :], output, sums)]


_in_pynative, _in_graph = (lru_cache(2 * _KEPT)(cell) for cell in (_OwnGradient, _OwnGraphGradient))


def with_own_gradient(attended, slopes, trained, given, known):
    """Output and sums of `attended(*trained, *given, *known)`.

    Args:
        attended, slopes: functions of a module, since the Cells of equal calls are kept. `slopes` gets the same
            arguments, both results and both of their gradients, and gives the gradients of `trained`.
        trained, given: eight tensors.
        known: what is static, hashable.
    """
    if not in_graph():
        return _in_pynative(attended, slopes, known)(*trained, *given)
    given = tuple([_cast(each, ms.float32) for each in given])
    output, sums = attended(*[ops.stop_gradient(each) for each in trained], *given, *known)
    outputs, all_sums = _in_graph(slopes, known)(*trained, *given, output, sums)
    return ops.reshape(outputs, output.shape), ops.reshape(all_sums, sums.shape)


def _attended(query, key, value, first, last, places, own, draws, scale, blocks, drop):
    output, sums = attend_part(query, key, value, first, last, places, scale, blocks, drop, own, draws)
    return _cast(output, value.dtype), sums


def _slopes(query, key, value, first, last, places, own, draws, scale, blocks, drop, results, gradients):
    """The gradients of query, key and value from those of both results."""
    output, sums = results
    gradient, of_sums = gradients
    delta = output_delta(output, gradient) - of_sums
    given = query, key, value, first, last, places
    found = attend_gradient(*given, scale, blocks, sums, delta, gradient, drop, own, draws)
    return [_cast(each, x.dtype) for each, x in zip(found, given)]


def attend(
    query, key, value, first, last, places, scale, order=None, reach=(None, None), exact=False, algorithm="auto",
    drop=0.0, own=None, draws=None,
):  # fmt: skip
    """The operator `Attention`, whose arguments its function for models describes.

    Args:
        drop: the probability with which a weight is 0.
        own, draws: the places of queries, int32 (batch, length) or (1, length), and whole numbers below 2**24 that are
            drawn, (batch, heads, 2); None where nothing is dropped.
    """
    kernel = query.dtype, query.shape[3], value.shape[3], drop
    known = scale, _blocks(query.shape, key.shape, order, reach, exact, kernel), drop
    ranges = (first, last, places, own, draws) if drop else (first, last, places, first, places)
    return with_own_gradient(_attended, _slopes, (query, key, value), ranges, known)


@lru_cache(_KEPT)
def _blocks(query, key, order, reach, is_exact, kernel):
    """`visible_blocks` of tensors of these shapes, or a `visible_band`; `kernel`: arguments of `fits_kernel`."""
    (batch, length, heads, _), key_length = query, key[1]
    if order == (0,) and length == key_length and fits_kernel(*kernel):
        band = visible_band(length, 0, reach, is_exact)
        if band:
            return band
    rows = max(BLOCK, min(length // 8, _SCORES // (batch * heads * key_length)))
    if order is None:
        order, reach, is_exact = (0,), (None, None), False
    queries, keys = (place_runs(order, chunk_length(order, each)) for each in (length, key_length))
    return visible_blocks(queries, keys, reach, is_exact, rows)
