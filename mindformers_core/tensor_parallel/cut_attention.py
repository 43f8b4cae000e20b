"""Attention over a cut sequence: keys and values go round in a ring, or are gathered, or lie where they are.

The outputs of parts of the keys are averaged by the sums of their exponentials (Liu, Zaharia, Abbeel, "Ring Attention
with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889). Where places are known, only those chunks
are sent and multiplied that some query sees: see `sequence_exchange`. All ranks have equal graphs: which chunks a rank
multiplies are constants. The gradient sends keys and values again, and their gradients home; it keeps none of the
others'. All is sent as it was given, and added up in the dtype of scores, but gradients of gathered keys, in theirs.
"""

from functools import lru_cache

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.algorithms.attention import output_delta, score_dtype
from mindformers_core.algorithms.attention_parts import add_part, part_gradient
from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.algorithms.fused_attention import fits_kernel
from mindformers_core.operators.sequence_exchange import chunk_blocks, chunk_order, exchanges

_add_part = custom_operator("AttentionPart", add_part)
_part_gradient = custom_operator("AttentionPartGradient", part_gradient)
_SCORES, _ROWS = 1 << 20, 128  # of a block of queries; fewer rows take longer each


def merge(operator, args, context):
    """The attention of all queries, where each rank has a part of the keys."""
    output, sums = operator(*args[:7], None, *args[8:])
    top = context.combined(ops.stop_gradient(sums), "max")
    weights = ops.exp(sums - top)
    total = context.combined(weights)
    mixed = context.combined(ops.cast(output, weights.dtype) * _for_tokens(weights)) / _for_tokens(total)
    return ops.cast(mixed, output.dtype), ops.log(total) + top


def ring(_, args, context):
    """The attention of a rank's queries to its own part of the keys, and to those that come round."""
    return _Cut(args, context, _Ring).forward()


def ring_gradient(args, results, gradients, context):
    """The gradients of query, key and value."""
    return _Cut(args, context, _Ring).backward(*results, *gradients)


def gathered(_, args, context):
    """The attention of a rank's queries to all keys, which it has."""
    return _Cut(args, context, _Gathered).forward()


def gathered_gradient(args, results, gradients, context):
    """The gradients of query, and of all keys and values through this rank's queries."""
    return _Cut(args, context, _Gathered).backward(*results, *gradients)


class _Ring:
    """Parts of keys, of which each rank has one, as lists of chunks."""

    def __init__(self, context, each):
        self.context, self.each, self.count, self.own = context, each, each, [None] * each

    def take(self, x, exchange, dtype):
        """The stack of chunks of the rank whose part comes at this distance; any one in place of what nobody needs."""
        chunks = [(chunk, givers) for chunk, givers in zip(x, exchange.givers) if givers]
        found = [ops.cast(self.context.shift(chunk, exchange.distance, givers), dtype) for chunk, givers in chunks]
        some, rest = found[0], iter(found)
        return ops.stack([next(rest) if givers else some for givers in exchange.givers])

    def give_back(self, chunks, exchange, dtype):
        """Add the gradients of the chunks that came, which are sent in this dtype, to those of their owners."""
        for place, givers in enumerate(exchange.givers):
            if givers:
                home, distance = chunks[place], exchange.distance
                takers = sorted((giver + distance) % self.context.count for giver in givers)
                if distance:
                    home = ops.cast(self.context.shift(ops.cast(home, dtype), -distance, takers), home.dtype)
                self.own[place] = home if self.own[place] is None else self.own[place] + home

    def total(self):
        """The gradients of a rank's own part."""
        return _whole(ops.stack(self.own))


class _Gathered:
    """All keys, which each rank has, likewise."""

    def __init__(self, context, each):
        self.context, self.each, self.count, self.found = context, each, each * context.count, {}

    def take(self, x, exchange, dtype):
        """As of `_Ring`."""
        return ops.cast(self._part(x, exchange.distance), dtype)

    def give_back(self, chunks, exchange, dtype):
        """Keep the gradients of some chunks, of which no further parts come."""
        self.found[exchange.distance] = ops.cast(chunks, dtype)

    def total(self):
        """The gradients of all keys."""
        nothing, distances = ops.zeros_like(next(iter(self.found.values()))), range(self.context.count)
        chunks = ops.cat([self.found.get(distance, nothing) for distance in distances], 0)
        return _whole(ops.cat([self._part(chunks, giver) for giver in distances], 0))

    def _part(self, x, distance):
        """The chunks of the rank at this distance; or of a stack by distance those of the rank of this number."""
        place = (self.context.number - distance) % self.context.count * self.each
        return x[place : place + self.each]


class _Cut:
    """One attention of a rank's queries; tensors are stacks of chunks (chunks, batch, …)."""

    def __init__(self, args, context, way):
        query, key, value, first, last, places, self.scale, order, reach, exact, _, *dropped = args
        self.dtype, self.size, self.given = score_dtype(query), key.shape[3], (query.dtype, key.dtype, value.dtype)
        ranks, self.shape = context.count, query.shape
        self.order = chunk_order(order, ranks)
        self.each = len(self.order) // ranks
        self.length = query.shape[1] // self.each
        self.is_known = order is not None
        cached = _SCORES // (query.shape[0] * query.shape[2] * self.length)
        rows = max(16, min(self.length // 8, max(_ROWS, cached)))
        drop, own, draws = dropped or (0.0, None, None)
        has_kernel = fits_kernel(query.dtype, query.shape[3], value.shape[3], drop)
        self.context, self.way = context, way(context, self.each)
        if key.shape[1] % self.way.count:
            raise ValueError(
                f"attention of a sequence that {ranks} ranks share takes keys in as many parts: the {key.shape[1]} of "
                f"key {key.shape} don't divide, so use algorithm all_to_all, or keys that are padded"
            )
        known = self.length, order, reach, exact, rows, has_kernel, key.shape[1] // self.way.count
        self.exchanges = _exchanges(self.order, ranks, known)
        self.computed = query.dtype if has_kernel else self.dtype  # in blocks, CPU computes no bfloat16
        query, both = ops.cast(query, self.computed), ops.cat((key, value), -1)
        self.query, self.first, self.last = (_chunks(each, self.each) for each in (query, first, last))
        self.both, self.places = (_chunks(each, self.way.count) for each in (both, places))
        self.dropped = (drop, _chunks(own, self.each), draws) if drop else ()

    def forward(self):
        """Output and sums."""
        output = sums = None
        for exchange in self.exchanges:
            chunks = self._taken(exchange)
            for known, table in self._tables(exchange):
                output, sums = _add_part(output, sums, *chunks, table, self.scale, known, *self.dropped)
        return ops.cast(_whole(output), self.given[2]), _rows(sums)

    def backward(self, output, sums, gradient, of_sums):
        """The gradients of query, key and value."""
        gradient = ops.cast(gradient, self.dtype)
        delta = output_delta(output, gradient) - of_sums
        sums, delta, gradient = _of_rows(sums, self.each), _of_rows(delta, self.each), _chunks(gradient, self.each)
        of_query = None
        for exchange in self.exchanges:
            chunks, of_both = self._taken(exchange), None
            for known, table in self._tables(exchange):
                found = _part_gradient(*chunks, table, sums, delta, gradient, self.scale, known, *self.dropped)
                of_query = found[0] if of_query is None else of_query + found[0]
                of_both = found[1] if of_both is None else of_both + found[1]
            self.way.give_back(of_both, exchange, self.given[1])
        of_both = self.way.total()
        found = _whole(of_query), of_both[..., : self.size], of_both[..., self.size :]
        return tuple(ops.cast(gradient, dtype) for gradient, dtype in zip(found, self.given))

    def _taken(self, exchange):
        """The chunks of an exchange, as `add_part` takes them."""
        if self.is_known:  # of the giver
            start = (self.context.number - exchange.distance) % self.context.count * self.each
            chunks = np.array(self.order[start : start + self.each])[:, None, None]
            places = Tensor((chunks * self.length + np.arange(self.length)).astype(np.int32))
        else:
            places = self.way.take(self.places, exchange, self.places.dtype)
        return self.query, self.way.take(self.both, exchange, self.computed), self.first, self.last, places

    def _tables(self, exchange):
        """Pairs of what is known and the table of slots of each `Product`: see `add_part`."""
        for number, product in enumerate(exchange.products):
            queries, keys, active = (np.array(values) for values in zip(*product.slots[self.context.number]))
            chosen = [(np.arange(self.each)[:, None] == chunks) & active for chunks in (queries, keys)]
            name = np.full_like(queries, 1000 * exchange.distance + number)
            yield product.known, Tensor(np.vstack([name, queries, keys, *chosen]).astype(np.int32))


@lru_cache(64)
def _exchanges(order, ranks, known):
    return exchanges(order, ranks, chunk_blocks(*known))


def _chunks(x, count):
    """(batch, length, …) as (chunks, batch, length of a chunk, …)."""
    x = ops.reshape(x, (x.shape[0], count, x.shape[1] // count, *x.shape[2:]))
    return ops.transpose(x, (1, 0, *range(2, x.ndim)))


def _whole(x):
    """The inverse of `_chunks`."""
    count, batch, length, *others = x.shape
    return ops.reshape(ops.transpose(x, (1, 0, *range(2, x.ndim))), (batch, count * length, *others))


def _of_rows(x, count):
    """(batch, heads, length) as (chunks, batch, heads, length of a chunk)."""
    return ops.transpose(_chunks(ops.transpose(x, (0, 2, 1)), count), (0, 1, 3, 2))


def _rows(x):
    """The inverse of `_of_rows`."""
    return ops.transpose(_whole(ops.transpose(x, (0, 1, 3, 2))), (0, 2, 1))


def _for_tokens(x):
    """(batch, heads, length) as (batch, length, heads, 1)."""
    return ops.expand_dims(ops.transpose(x, (0, 2, 1)), 3)
