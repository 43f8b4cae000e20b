"""Which weights of attention stay: drawn by sample, head, and the places of query and key, so alike on any mesh.

As in `dropout`, two 32-bit numbers of a query and two of a key make that of their weight. Those of a query come from
numbers that are drawn for its sample and head, and from its place; those of a key from its place. So nothing but these
travels and is kept; blocks draw their weights' numbers again in the backward pass.
"""

from mindspore import dtype as mstype, ops

from mindformers_core.algorithms.dropout import FIRST_COLUMN, SEEDS, random_halves, signed, threshold
from mindformers_core.splitmix import GOLDEN

DRAW_BITS = 24  # of each number that is drawn: float32 holds it
_STREAM, _STEP, _FIRST = signed(SEEDS), signed(GOLDEN), FIRST_COLUMN + 1


def drawn_halves(own, draws, places):
    """The numbers of queries, two int32s (batch, heads, length), and of keys, two (batch or 1, key_length).

    Args:
        own, places: of queries (batch or 1, length), and of keys (batch or 1, key_length).
        draws: whole numbers of `DRAW_BITS` bits (batch, heads, 2).
    """
    own, draws, places = (ops.cast(each, mstype.int64) for each in (own, draws, places))
    streams = (draws[:, :, :1] * (1 << DRAW_BITS) + draws[:, :, 1:]) * _STREAM
    queries = streams + ops.expand_dims(own + 1, 1) * _STEP
    return random_halves(queries), random_halves((places + _FIRST) * _STEP)


def kept(halves, drop, start, stop, columns, like):
    """What a block's weights (batch, groups, rows, keys) are multiplied by: 0, or 1 / (1 - drop) of those that stay.

    Args:
        halves: of `drawn_halves`.
        drop: probability of 0.
        start, stop, columns: the block's queries and keys, see `block_rows`.
        like: the weights.
    """
    batch, groups, _, keys = like.shape
    (low, high), (low_keys, high_keys) = (
        [ops.reshape(each[:, :, start:stop], (batch, groups, -1, 1)) for each in halves[0]],
        [ops.reshape(ops.gather(each, columns, 1), (-1, 1, 1, keys)) for each in halves[1]],
    )
    stays = ops.less_equal((low + low_keys) * (high + high_keys), threshold(1.0 - drop))
    return ops.cast(stays, like.dtype) * (1.0 / (1.0 - drop))
