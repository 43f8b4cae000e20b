"""Attention as one operator with a rule of its own, for keys in ranges of places."""

from mindspore import ops

from mindformers_core.algorithms.attention import attend
from mindformers_core.algorithms.attention_dropout import DRAW_BITS
from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.operators import Algorithm, register_algorithm, register_operator
from mindformers_core.operators.registry import NO_GRADIENT
from mindformers_core.operators.rules import attention as rules
from mindformers_core.operators.saved import ALL, SavedByOperator
from mindformers_core.tensor_parallel.cut_attention import gathered, merge, ring, ring_gradient, seen

_ALGORITHMS = (
    ("attention_gather", "each part of the queries sees all keys", gathered),
    ("attention_seen", "those keys and values that queries see are sent", seen),
    ("attention_ring", "keys and values go round; outputs are merged by their sums", ring, ring_gradient),
    ("attention_merge", "outputs of the parts of the keys are merged by their sums", merge),
)
for _name, _text, *_functions in _ALGORITHMS:
    register_algorithm(Algorithm(_name, _text, True, *_functions, by_shapes=True))
_SOURCE, _SAVED = "mindformers_core.algorithms", SavedByOperator(ALL, outputs=(0, 1))
register_operator(
    "Attention", source=f"{_SOURCE}.attention.attend", saves=_SAVED,
    operations=rules.attention_operations, algorithms=tuple(name for name, *_ in _ALGORITHMS),
)(rules.ranged_attention)  # fmt: skip
for _name, _source, _rule in (  # of algorithms
    ("AttentionPart", "add_part", rules.attention_part),
    ("AttentionPartGradient", "part_gradient", rules.attention_part_gradient),
):
    register_operator(_name, source=f"{_SOURCE}.attention_parts.{_source}", gradient=NO_GRADIENT)(_rule)
register_operator("AttentionToChunks", source=f"{_SOURCE}.attention_parts.attend_chunks", saves=_SAVED)(
    rules.attention_to_chunks
)
_attention = custom_operator("Attention", attend)
_check = ops.constexpr(rules.check_attention)


def attention(
    query, key, value, first, last, places, scale, order=None, reach=(None, None), exact=False, algorithm="auto",
    dropout=0.0, own=None, sinks=None,
):  # fmt: skip
    """Softmax attention of each query to the keys at its places, and the logarithm of softmax's sum.

    Every mask is a range of places for each query: query i sees key j where `first[i] <= places[j] < last[i]`. Causal:
    0 and its own place + 1; a window of w: its own place + 1 - w and its own place + 1; a prefix of n: 0 and the
    greater one of n and its own place + 1; documents: `first` is their first place. Places travel with keys, so that a
    sequence may be permuted. A query that sees no key gives zeros, without a gradient.

    Args:
        query: (batch, length, heads, head_size).
        key: (batch, key_length, key_value_heads, head_size), of the same dtype; key_value_heads divides heads.
        value: (batch, key_length, key_value_heads, value_size), of the same dtype.
        first, last: of queries, int32 (batch, length), or (1, length) where all rows have the same.
        places: of keys, int32 (batch, key_length) or (1, key_length); at most 2**24, up to which float32 is exact.
        scale: factor of the products.
        order: where queries and keys lie at the same places, and these are 0 … length - 1 in equal chunks, the
            numbers of the chunks in order of appearance, a tuple: `(0,)` for a sequence as it is, `(0, 3, 1, 2)` for
            one that is balanced over two ranks. Default: nothing is known. Statically known, as `reach` is: blocks
            that no query sees aren't computed. It is the caller's word, and must be true of `first`, `last`, `places`.
        reach: (before, after): the greatest distances from a query's own place to keys before and after it that it may
            see; None: any. `(None, 0)` for causal masks, `(w - 1, 0)` for windows.
        exact: whether each query sees all keys within its reach. Default: no.
        algorithm: where an axis cuts the sequence: `gather` (of keys and values, with an `order` of the chunks that are
            seen), `ring` (keys and values go round), `all_to_all` (the axis cuts heads in the sequence's place: it
            divides key_value_heads), or `auto`, by price.
        dropout: the probability, below 1, with which a weight is 0; others are divided by 1 - dropout. Which ones,
            depends on sample, head, places of query and key, and on MindSpore's generator, so is alike on any mesh.
        own: places of queries, as `places`, which dropout needs. Default: those of the keys.
        sinks: (heads,), logits of what each query of a head sees besides, without a value: an entry of softmax's sum
            (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023, section 3.3).

    Returns:
        (batch, length, heads, value_size), of the dtype of `value`; and float32 (batch, heads, length), the lowest
        number where a query sees no key and no sink.

    Raises:
        ValueError: shapes that don't fit each other; an unknown algorithm; a dropout outside of [0, 1); an `order` that
            is no permutation, or where queries and keys have different lengths.
    """
    order, reach = None if order is None else tuple(order), tuple(reach)
    ranges = first.shape, last.shape, first.shape if own is None else own.shape, places.shape
    _check(query.shape, key.shape, value.shape, ranges, order, algorithm)
    given = query, key, value, first, last, places, scale, order, reach, exact, algorithm
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout {dropout} of attention should be at least 0 and below 1")
    if dropout:
        draws = ops.randint(0, 1 << DRAW_BITS, (query.shape[0], query.shape[2], 2))
        given = *given, dropout, places if own is None else own, draws
    if sinks is None:
        return _attention(*given)  # whose results are called Attention in patterns, since they have no name here
    output, sums = _attention(*given)
    sinks = ops.reshape(ops.cast(sinks, sums.dtype), (-1, 1))
    share = ops.expand_dims(ops.transpose(ops.sigmoid(sums - sinks), (0, 2, 1)), 3)
    total = ops.maximum(sums, sinks) + ops.log(ops.exp(-ops.abs(sums - sinks)) + 1.0)
    return output * ops.cast(share, output.dtype), total
