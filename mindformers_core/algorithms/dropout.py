"""Dropout that drops the same elements on any mesh, in PyNative and in a graph: each is drawn by its global position.

Rows and columns of the whole tensor, seen as a matrix, get 64 random bits each from SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014), whose counter is their number. Those of a row and a
column make the number of the element where they cross, as in the hash of pairs of Thorup, "High speed hashing for
integers and strings" (arXiv 1504.06804, section 3): two sums and one product an element. Integers wrap around.

An offset of the generator counts draws below bit `_BLOCK`, and above it blocks of rows, along dim 0: a pass over a part
of a step's batch (a micro-step, a micro-batch, a replica's part) draws for its row r as for row block * rows + r.
"""

import math
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from mindspore import Tensor, dtype as mstype, ops
from mindspore.common.generator import default_generator

from mindformers_core.mindspore_private import draw_state
from mindformers_core.operators.rules.attention import key_length
from mindformers_core.splitmix import GOLDEN

# Number of an operator's arguments before its seeds, which differ from layer to layer or from call to call.
WITHOUT_SEEDS = {"Dropout": 2}

_BLOCK = 40  # bits: 9e10 draws, and 8e6 blocks
SEEDS, _OFFSETS = 0xD1342543DE82EF95, 0xAF251AF3B0F025B5  # factors of seeds and offsets in a counter
FIRST_COLUMN = 1 << 62  # columns count from here, so that no row has the same counter


def signed(number):
    """The int64 with the last 64 bits of an unsigned number."""
    number %= 1 << 64
    return number - (1 << 64) if number >> 63 else number


_FACTORS = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)  # of SplitMix64's output function


def next_random_state():
    """Seed and offset of one draw from MindSpore's default generator, which moves on; two int64 tensors without dims.

    `mindspore.manual_seed` resets the generator, `mindspore.get_rng_state` saves its state, and a recomputation draws
    the numbers of the forward pass. All ranks have to make the same draws. Compiles.
    """
    seed, offset = draw_state()
    return ops.reshape(seed, ()), ops.reshape(offset, ())  # a graph gives them one dim


def next_draw():
    """The offset of the next draw from MindSpore's default generator, without its block."""
    return int(default_generator.get_state().asnumpy().view(np.int64)[1]) % (1 << _BLOCK)


def set_next_draw(offset, block=0):
    """Have the default generator go on at an offset, for a block of rows."""
    seed = default_generator.get_state().asnumpy().view(np.int64)[0]
    default_generator.set_state(Tensor(np.array([seed, offset + (block << _BLOCK)]).view(np.uint8)))


@contextmanager
def draws_of(block, first=None):
    """While open, draws are those of a block of rows; the first one has the offset `first`, by default the next one."""
    set_next_draw(next_draw() if first is None else first, block)
    try:
        yield
    finally:
        set_next_draw(next_draw())


def block_of(replica, run=0, micro_index=0, micro_batch_num=1):
    """The block of a pass: a batch is cut into runs, these over replicas (place, number), these into micro-batches."""
    return (run * replica[1] + replica[0]) * micro_batch_num + micro_index


def dropout_with_mask(_, args, context):
    """`Dropout`: the tensor with some elements zeroed and the others scaled, and the mask.

    The operator is given the probability of keeping. Every call draws by `next_random_state`.
    """
    return _dropped(args[0], args[1] if len(args) > 1 else 0.5, *context.next_random_state(), context)


def functional_dropout(_, args, context):
    """`FuncDropoutExt`: the same without the mask; given the probability of dropping, and the random state."""
    x, probability, _, _, seed, offset = args
    return _dropped(x, 1.0 - probability, seed, offset, context)[0]


def attention_with_dropout(operator, args, context):
    """`FlashAttentionScore` with a mask of the scores that stay: bit i of a byte is that of the i-th key of eight.

    A mask (batch, heads, rows, columns / 8) is drawn in eight draws, one for each bit, by global position.
    """
    (layout, shape), (seed, offset) = context.output, context.next_random_state()
    whole = *shape[:-1], key_length(args) // 8
    cut, mask = replace(context, output=(layout, whole)), 0
    for bit in range(8):  # a draw moves the generator by more than these
        stays = ops.less_equal(uniform_bits(seed, offset + bit, cut), threshold(args[11]))
        mask = ops.cast(stays, mstype.int32) * (1 << bit) + mask
    return operator(*args[:4], ops.cast(mask, mstype.uint8), *args[5:])


def _dropped(x, keep_probability, seed, offset, context):
    bits = uniform_bits(seed, offset, context)
    stays = ops.cast(ops.less_equal(bits, threshold(keep_probability)), x.dtype)
    return x * stays * (1.0 / keep_probability if keep_probability else 0.0), stays


def threshold(probability):
    """The number t for which a uniform int32 is at most t with this probability."""
    return max(round(probability * 2**32) - 2**31 - 1, -(2**31))


def uniform_bits(seed, offset, context, has_rows=True):
    """A uniform int32 for each element of the first result's local part, by its global position.

    Without rows of a batch (`has_rows`) all blocks have the same numbers.
    """
    block = ops.bitwise_right_shift(offset, _BLOCK)
    key = seed * signed(SEEDS) + offset * signed(_OFFSETS) - block * signed(_OFFSETS << _BLOCK)
    _, shape = context.output
    row_count = math.prod(shape[: _first_column_dim(shape)]) if has_rows and shape else 0
    keys = key + block * signed(row_count * GOLDEN), key
    halves = [random_halves(counter + each) for counter, each in zip(context.random_counters, keys)]
    (low_rows, high_rows), (low_columns, high_columns) = halves
    return ops.reshape((low_rows + low_columns) * (high_rows + high_columns), context.local_shape)


def random_halves(state):
    """SplitMix64's output function as two int32s. The shifts are those of int64: they bring a number's sign along."""
    state = ops.bitwise_xor(state, ops.bitwise_right_shift(state, 30)) * _FACTORS[0]
    state = ops.bitwise_xor(state, ops.bitwise_right_shift(state, 27)) * _FACTORS[1]
    high = ops.bitwise_right_shift(state, 32)
    return ops.cast(ops.bitwise_xor(state, high), mstype.int32), ops.cast(high, mstype.int32)


def counters(shape, slices):
    """SplitMix64's counters of a tensor's rows and columns: their positions in the whole tensor, equal on every mesh.

    The last dims, as many as make the fewest rows and columns for one index of dim 0, are the columns.

    Args:
        shape: global shape.
        slices: the local part, a `slice` of step 1 for every dim.

    Returns:
        Two int64 arrays, of shapes (rows, 1) and (columns,) of the local part.
    """
    split = _first_column_dim(shape)
    rows = _flat_positions(shape[:split], slices[:split])
    columns = _flat_positions(shape[split:], slices[split:]) + np.uint64(FIRST_COLUMN)
    return tuple(((places + np.uint64(1)) * np.uint64(GOLDEN)).view(np.int64) for places in (rows[:, None], columns))


def _first_column_dim(shape):
    dims = range(min(len(shape), 1), len(shape) + 1)
    return min(dims, key=lambda dim: math.prod(shape[1:dim]) + math.prod(shape[dim:]))


def _flat_positions(shape, slices):
    """Position in a whole tensor, flattened, of every element of a part."""
    index = np.ix_([0], *(np.arange(part.start, part.stop) for part in slices))  # no dims at all have one position
    return np.ravel_multi_index(index, (1, *shape)).ravel().astype(np.uint64)
