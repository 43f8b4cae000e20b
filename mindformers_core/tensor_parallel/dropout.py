"""Dropout that drops the same elements on any mesh: each is drawn by its global position."""

from mindspore import Tensor, get_seed, ops
from mindspore import dtype as mstype
from mindspore.common.generator import default_generator
from mindspore.common.initializer import Uniform

from mindformers_core.communication import world
from mindformers_core.tensor_parallel.initialize import draw_slice

__all__ = ["dropout_with_mask", "functional_dropout"]


def dropout_with_mask(_, args, cut):
    """`Dropout`: the tensor with some elements zeroed and the others scaled, and the mask.

    The operator is given the probability of keeping. Every call draws from a stream of its own, numbered by MindSpore's
    default generator, which it moves on: `mindspore.manual_seed` starts anew, `mindspore.get_rng_state` saves where it
    is, and a recomputation finds the numbers of the forward pass. All ranks have to make the same calls.
    """
    x, keep_probability = args[0], args[1] if len(args) > 1 else 0.5
    slices = cut.layouts[0].local_slices(cut.shapes[0], world().rank)
    numbers = draw_slice(Uniform(1.0), cut.shapes[0], slices, get_seed() or 0, _next_stream())
    stays = Tensor(numbers < 2 * keep_probability - 1)
    scale = 1.0 / keep_probability if keep_probability else 0.0
    return x * ops.cast(stays, x.dtype) * scale, stays


def functional_dropout(operator, args, cut):
    """`FuncDropoutExt`: the same without the mask; given the probability of dropping."""
    keep_probability = 1.0 - (args[1] if len(args) > 1 else 0.5)
    return dropout_with_mask(operator, (args[0], keep_probability), cut)[0]


def _next_stream():
    """A name that no other call has, until the generator is seeded anew."""
    seed, offset = default_generator._step(Tensor(1, mstype.int64))
    return f"dropout {int(seed)} {int(offset)}"
