"""Attention over a cut sequence: keys and values go round in a ring, or are gathered, or lie where they are.

The outputs of parts of the keys are averaged by the sums of their exponentials (Liu, Zaharia, Abbeel, "Ring Attention
with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889). Where places are known, only those chunks
are sent and multiplied that some query sees: see `sequence_exchange`. All ranks have equal graphs: which chunks a rank
multiplies are constants. The ring's gradient sends keys and values again, and their gradients home; it keeps none of
the others'. All is sent as it was given; gradients are added in the dtype of scores, those of all keys in theirs.
"""

from functools import lru_cache

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.algorithms.attention import output_delta, score_dtype
from mindformers_core.algorithms.attention_parts import (
    add_part,
    attend_chunks,
    part_gradient,
    rows_of,
    sides,
    stack,
    stack_of_rows,
    whole,
)
from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.algorithms.fused_attention import fits_kernel
from mindformers_core.operators.sequence_exchange import chunk_blocks, chunk_order, exchanges

_add_part = custom_operator("AttentionPart", add_part)
_part_gradient = custom_operator("AttentionPartGradient", part_gradient)
_attend_chunks = custom_operator("AttentionToChunks", attend_chunks)
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
    return _Cut(args, context).forward()


def ring_gradient(args, results, gradients, context):
    """The gradients of query, key and value."""
    return _Cut(args, context).backward(*results, *gradients)


def gathered(_, args, context):
    """The attention of a rank's queries to all keys, which it has."""
    cut = _Cut(args, context, context.count)
    starts = [cut.giver(exchange) * cut.each for exchange in cut.exchanges]
    places = cut.places_of(range(context.count)) if cut.is_known else stack(args[5], len(cut.order))
    return cut.to_chunks(stack(ops.cat(args[1:3], -1), len(cut.order)), places, starts)


def seen(_, args, context):
    """The attention of a rank's queries to those keys that it sees, which others send; gradients go home likewise."""
    cut = _Cut(args, context)
    sent = args[1].dtype
    both = ops.cast(stack(ops.cat(args[1:3], -1), cut.each), cut.dtype)  # gradients from several ranks are added so
    taken = [cut.taken(both, exchange, sent, sent) for exchange in cut.exchanges]
    places = cut.places_of(map(cut.giver, cut.exchanges))
    return cut.to_chunks(ops.cat(taken, 0), places, range(0, len(taken) * cut.each, cut.each))


class _Cut:
    """One attention of a rank's queries; tensors are stacks of chunks (chunks, batch, …).

    Args:
        parts: of the keys, which the rank has. Default: its own.
    """

    def __init__(self, args, context, parts=1):
        query, key, value, _, _, _, self.scale, order, reach, exact, _, *self.dropped = args
        self.args, self.context, ranks = args, context, context.count
        self.dtype, self.size = score_dtype(query), key.shape[3]
        self.order = chunk_order(order, ranks)
        self.each = len(self.order) // ranks
        self.length = query.shape[1] // self.each
        self.is_known = order is not None
        cached = _SCORES // (query.shape[0] * query.shape[2] * self.length)
        rows = max(16, min(self.length // 8, max(_ROWS, cached)))
        drop = self.dropped[0] if self.dropped else 0.0
        self.is_fused = fits_kernel(query.dtype, query.shape[3], value.shape[3], drop)
        if key.shape[1] % (self.each * parts):
            raise ValueError(
                f"attention of a sequence that {ranks} ranks share takes keys in as many parts: the {key.shape[1]} of "
                f"key {key.shape} don't divide, so use algorithm all_to_all, or keys that are padded"
            )
        known = self.length, order, reach, exact, rows, self.is_fused, key.shape[1] // (self.each * parts)
        self.exchanges = _exchanges(self.order, ranks, known)

    def forward(self):
        """Output and sums of the ring."""
        output = sums = None
        given = self._given()
        for exchange in self.exchanges:
            chunks = self._chunks(given, exchange)
            for known, table in self._tables(exchange):
                output, sums = _add_part(output, sums, *chunks, Tensor(table), self.scale, known, *given[5:])
        return ops.cast(whole(output), self.args[2].dtype), rows_of(sums)

    def backward(self, output, sums, gradient, of_sums):
        """The gradients of query, key and value in the ring."""
        gradient = ops.cast(gradient, self.dtype)
        delta = output_delta(output, gradient) - of_sums
        sums, delta, gradient = (
            stack_of_rows(sums, self.each), stack_of_rows(delta, self.each), stack(gradient, self.each)
        )  # fmt: skip
        given, of_query, own = self._given(), None, [None] * self.each
        for exchange in self.exchanges:
            chunks, of_both = self._chunks(given, exchange), None
            for known, table in self._tables(exchange):
                slots = Tensor(table), sums, delta, gradient, self.scale, known
                found = _part_gradient(*chunks, *slots, *given[5:])
                of_query = found[0] if of_query is None else of_query + found[0]
                of_both = found[1] if of_both is None else of_both + found[1]
            self._give_back(own, of_both, exchange)
        of_both = whole(ops.cat(own, 0))
        found = whole(of_query), *sides(of_both, self.size)
        return tuple(ops.cast(gradient, x.dtype) for gradient, x in zip(found, self.args))

    def to_chunks(self, both, places, starts):
        """Output and sums of queries and all `both`, where the chunks of each exchange start in it."""
        tables, products, stop = [], [], 0
        for exchange, start in zip(self.exchanges, starts, strict=True):
            for known, table in self._tables(exchange, start, both.shape[0]):
                tables.append(table)
                products.append((stop, stop + table.shape[1], known))
                stop += table.shape[1]
        query, first, last = self.args[0], *self.args[3:5]
        given = query, both, Tensor(np.hstack(tables)), first, last, places
        return _attend_chunks(*given, self.scale, tuple(products), self.is_fused, *self.dropped)

    def giver(self, exchange):
        """The number of the part that comes in an exchange."""
        return (self.context.number - exchange.distance) % self.context.count

    def places_of(self, parts):
        """The places of all chunks of some parts, by their numbers."""
        chunks = np.array([self.order[part * self.each : (part + 1) * self.each] for part in parts]).reshape(-1, 1, 1)
        return Tensor((chunks * self.length + np.arange(self.length)).astype(np.int32))

    def taken(self, x, exchange, dtype, sent=None):
        """The stack of chunks of the rank whose part comes; any one in place of what nobody needs.

        They are sent in a dtype, by default their own.
        """
        found = {}
        for place, givers in enumerate(exchange.givers):
            if givers:
                chunk = x[place : place + 1]  # CPU has no gradient of a slice in bfloat16
                chunk = chunk if sent is None else ops.cast(chunk, sent)
                found[place] = ops.cast(self.context.shift(chunk, exchange.distance, givers), dtype)
        some = next(iter(found.values()))
        return ops.cat([found.get(place, some) for place in range(self.each)], 0)

    def _given(self):
        """A ring's stacks: query, keys and values, first, last, places; and what is dropped."""
        query, key, value, first, last, places = self.args[:6]
        query = query if self.is_fused else ops.cast(query, self.dtype)  # in blocks, CPU computes no bfloat16
        given = [stack(each, self.each) for each in (query, ops.cat((key, value), -1), first, last, places)]
        drop, own, draws = self.dropped or (0.0, None, None)
        return (*given, drop, stack(own, self.each), draws) if drop else tuple(given)

    def _chunks(self, given, exchange):
        """The chunks of an exchange, as `add_part` takes them."""
        query, both, first, last, places = given[:5]
        both, known = self.taken(both, exchange, query.dtype), self.places_of([self.giver(exchange)])
        return query, both, first, last, known if self.is_known else self.taken(places, exchange, places.dtype)

    def _give_back(self, own, chunks, exchange):
        """Add the gradients of the chunks that came, which are sent in the keys' dtype, to those of their owners."""
        dtype, distance = self.args[1].dtype, exchange.distance
        for place, givers in enumerate(exchange.givers):
            if givers:
                home = chunks[place : place + 1]
                takers = sorted((giver + distance) % self.context.count for giver in givers)
                if distance:
                    home = ops.cast(self.context.shift(ops.cast(home, dtype), -distance, takers), home.dtype)
                own[place] = home if own[place] is None else own[place] + home

    def _tables(self, exchange, start=0, count=None):
        """Pairs of what is known and the table of slots of each `Product`, see `add_part`.

        The exchange's chunks start at a number among so many; default: they are all.
        """
        for number, product in enumerate(exchange.products):
            queries, keys, active = (np.array(values) for values in zip(*product.slots[self.context.number]))
            keys = keys + start
            of_query = (np.arange(self.each)[:, None] == queries) & active
            of_key = (np.arange(count or self.each)[:, None] == keys) & active
            name = np.full_like(queries, 1000 * exchange.distance + number)
            yield product.known, np.vstack([name, queries, keys, of_query, of_key]).astype(np.int32)


@lru_cache(64)
def _exchanges(order, ranks, known):
    return exchanges(order, ranks, chunk_blocks(*known))


def _for_tokens(x):
    """(batch, heads, length) as (batch, length, heads, 1)."""
    return ops.expand_dims(ops.transpose(x, (0, 2, 1)), 3)
