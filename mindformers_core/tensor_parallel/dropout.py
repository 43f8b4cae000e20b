"""Dropout that drops the same elements on any mesh: each is drawn by its global position."""

from mindspore import Tensor, get_seed, ops
from mindspore.common.initializer import Uniform

from mindformers_core.communication import world
from mindformers_core.tensor_parallel.initialize import draw_slice

__all__ = ["Dropout"]


class Dropout:
    """The algorithms that run in the place of MindSpore's dropout operators.

    Every call draws from a stream of its own: the calls are counted, in step on all ranks. The seed is
    `mindspore.get_seed()`. A recomputation sets `calls` back to what it was in the forward pass (see
    `interception.py`).

    Attributes:
        calls: number of calls so far.
    """

    def __init__(self):
        self.calls = 0

    def with_mask(self, _, args, cut):
        """`Dropout`: the tensor with some elements zeroed and the others scaled, and the mask.

        It is given the probability of keeping.
        """
        x, keep_probability = args[0], args[1] if len(args) > 1 else 0.5
        self.calls += 1
        shape = cut.shapes[0]
        slices = cut.layouts[0].local_slices(shape, world().rank)
        numbers = draw_slice(Uniform(1.0), shape, slices, get_seed() or 0, f"dropout {self.calls}")
        stays = Tensor(numbers < 2 * keep_probability - 1)
        mask = ops.cast(stays, x.dtype)
        return x * mask * (1.0 / keep_probability if keep_probability else 0.0), stays

    def functional(self, operator, args, cut):
        """`FuncDropoutExt`: the same without the mask; given the probability of dropping."""
        return self.with_mask(operator, (args[0], 1.0 - (args[1] if len(args) > 1 else 0.5)), cut)[0]
