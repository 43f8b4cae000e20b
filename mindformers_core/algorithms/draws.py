"""Random draws with the same numbers on any mesh: one transform of `uniform_bits` a distribution.

Four operators draw: `RandExt`, `Randn`, `RandInt` and `RandpermExt`; those of a tensor's shape (`RandLikeExt`, …) are
the same algorithms. All other draws are composed of these. Normal numbers are those of Box and
Muller ("A note on the generation of random normal deviates", 1958); integers are high words of products (Lemire, "Fast
random integer generation in an interval", arXiv 1805.10941, without the rejection: the bias is range / 2**32).
"""

import math
from functools import partial
from types import SimpleNamespace

from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.algorithms import dropout
from mindformers_core.algorithms.dropout import counters, next_random_state, uniform_bits
from mindformers_core.algorithms.redistribute import meta_of
from mindformers_core.mindspore_private import type_id_to_type
from mindformers_core.operators import TensorMeta, signature_of
from mindformers_core.program.structure import tree_fill, tree_leaves, tree_map

_DIGITS = {"float16": 11, "bfloat16": 8}  # of a fraction below 1; others: 24


def whole_context(shape, random_state=next_random_state, float_dtype=None):
    """What the draw of a whole tensor needs of a `ShardContext`."""
    return SimpleNamespace(
        next_random_state=random_state,
        random_counters=tuple(map(Tensor, counters(shape, [slice(0, size) for size in shape]))),
        local_shape=tuple(shape),
        output=(None, tuple(shape)),
        float_dtype=float_dtype,
    )


def draw_whole(name, args, kwargs):
    """The whole result of a draw among plain tensors, by its rule; on any rank the same."""
    signature = signature_of(name, *tree_map(meta_of, (args, kwargs)))
    given, context = (*args, *kwargs.values()), whole_context(signature.output_shapes[0])
    return args[0] if signature.run is None else drawn_by(signature, given, context)


def drawn_by(signature, given, context):
    """The result of a draw with a `Signature`, from the arguments of its operator, in a `ShardContext`."""
    args, _ = signature.local.localized(given, {}, (), runs_algorithm=True)
    return DISTRIBUTIONS[signature.run](None, tree_fill(args, tree_leaves(given, Tensor), TensorMeta), context)


def _transformed(transform, _, args, context):
    """A draw, by a function of uniform bits.

    Args:
        transform: function of `bits`, the name of the result's dtype, the dtype to compute fractions in, and bounds;
            `bits(number)` are a uniform int32 for each element, independent for each number.
        args: the tensor whose shape is drawn or None, seed, offset, dtype, and bounds.
    """
    _, seed, offset, dtype, *bounds = args
    name, result = _name(dtype), dtype_of(dtype)
    if "float" in name and context.float_dtype is not None:
        result = context.float_dtype
    wide = context.float_dtype or (mstype.float64 if name == "float64" else mstype.float32)

    def bits(number=0):  # a draw moves the generator by more than these
        # an order of a whole dim has no rows
        return uniform_bits(seed, offset + number if number else offset, context, transform is not _permutation)

    return ops.cast(transform(bits, name, wide, *bounds), result)


def _uniform(bits, name, wide):
    """Uniform in [0, 1), a multiple of 2**-24 (of 2**-11 in float16, of 2**-8 in bfloat16)."""
    return _fraction(bits(), _DIGITS.get(name, 24), wide)


def _normal(bits, _, wide):
    """Normal with mean 0 and deviation 1, of two uniform numbers each; at most 5.8 in magnitude."""
    first, second = (_fraction(bits(number), 24, wide) for number in (0, 1))
    return ops.sqrt(ops.log(1.0 - first) * -2.0) * ops.cos(second * (2 * math.pi))


def _integers(bits, _, __, low, high):
    """Uniform among `low`, …, `high - 1`."""
    return ops.bitwise_right_shift((ops.cast(bits(), mstype.int64) + 2**31) * (high - low), 32) + low


def _permutation(bits, *_):
    """The order that sorts a uniform number for each element."""
    return ops.sort(bits())[1]


_TRANSFORMS = {"uniform": _uniform, "normal": _normal, "integers": _integers, "permutation": _permutation}
DISTRIBUTIONS = {
    **{name: partial(_transformed, transform) for name, transform in _TRANSFORMS.items()},
    **{"dropout": dropout.dropout_with_mask, "func_dropout": dropout.functional_dropout},
    "attention_dropout": dropout.attention_with_dropout,
}


def _fraction(bits, digits, dtype):
    """The number in [0, 1) with the first `digits` bits of an int32; float32 holds 24 of them exactly."""
    number = ops.cast(ops.bitwise_right_shift(bits, 32 - digits), dtype)
    return (number + 2.0 ** (digits - 1)) * 2.0**-digits


def _name(dtype):
    """The name of a dtype, which may be its number or a name."""
    return str(type_id_to_type(dtype) if isinstance(dtype, int) else dtype).lower()


def dtype_of(dtype):
    """A MindSpore dtype, of itself, its number or its name."""
    return getattr(mstype, _name(dtype).replace("bool", "bool_"))
