"""LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020) of parameters that lie in slices on a mesh."""

import math

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.optimizers.adamw import moments
from mindformers_core.tensor_parallel.clipping import sums_over_parts


class Lamb(nn.Optimizer):
    """LAMB: Adam's step for each parameter, scaled to the norm of its weight. Shards are updated as the whole would be.

    With m and v the bias-corrected moments, `update = m / (sqrt(v) + eps) + weight_decay * weight` and
    `weight -= learning_rate * norm(weight) / norm(update) * update`; the ratio is 1 where one of the norms is 0. Norms
    are taken in float32 over the mesh axes that shard the parameter (`parameter.layout`, a `Layout`; none: this rank
    alone): one all-reduce for each set of axes, of all its parameters' norms together. The same in PyNative and
    compiled by `jit`. (`mindspore.nn.Lamb` has no CPU kernel, and takes the norms of shards.)

    It is a `mindspore.nn.Optimizer`: parameter groups (`params`, `lr`, `weight_decay`, `order_params`), schedules and
    lists of learning rates, `parameters`, `global_step`. As there, a weight decay that no group gives leaves parameters
    out that have `beta` or `gamma` in their names.

    State: two float32 moments a parameter, of its local shape. A step needs room for one more such copy, the updates.

    Args:
        parameters: list of this rank's Parameters, or of groups (dicts).
        learning_rate: a float, a list or 1-D tensor with one for each step, or a `LearningRateSchedule`.
        beta1, beta2: decay of the moments at each step, between 0 and 1.
        eps: above 0.
        weight_decay: from 0 up, or a Cell that gives it for a step; decoupled, as in AdamW.

    Inputs:
        A tuple of plain local gradients in the order of `parameters`, final: replicated over the axes that don't shard
        their parameter. Any floating dtype.

    Outputs:
        True.

    Raises:
        ValueError: a beta or eps outside its range; `grad_centralization` in a group.
    """

    def __init__(self, parameters, learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0):
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 < beta < 1.0:
                raise ValueError(f"Lamb({name}={beta}): it has to lie between 0 and 1, both excluded")
        if not eps > 0.0:
            raise ValueError(f"Lamb(eps={eps}): it has to be above 0")
        super().__init__(learning_rate, parameters, weight_decay)
        if self.is_group and any(self.grad_centralization_flags):
            name = self.parameters[self.grad_centralization_flags.index(True)].name
            raise ValueError(f"Lamb: the group of {name} asks for grad_centralization, which Lamb doesn't do: drop it")
        self.betas, self.eps = (beta1, beta2), eps
        self.gradient_shares = (1 - beta1, 1 - beta2)  # a graph would subtract them in float32
        self.log_betas = (math.log(beta1), math.log(beta2))
        self.moments1 = moments(self.parameters, "lamb.moment1.")
        self.moments2 = moments(self.parameters, "lamb.moment2.")
        self.places, self.sums = sums_over_parts(self.parameters, range(self.param_length))

    def construct(self, gradients):
        if len(gradients) != self.param_length:
            raise ValueError(f"Lamb got {len(gradients)} gradients for {self.param_length} parameters")
        rates, decays = self.get_lr(), self.get_weight_decay()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        step = ops.reshape(ops.cast(self.global_step, ms.float32), ())
        corrections = _one_minus_exp(step * self.log_betas[0]), _one_minus_exp(step * self.log_betas[1])
        for index, places in enumerate(self.places):
            updates, weight_squares, update_squares = (), (), ()
            for place in places:
                weight = ops.cast(self.parameters[place], ms.float32)
                update = self._adam_update(place, gradients[place], corrections)
                if self.decay_flags[place]:
                    update = update + (decays[place] if self.is_group else decays) * weight
                updates = updates + (update,)
                weight_squares = weight_squares + (ops.square(weight).sum(),)
                update_squares = update_squares + (ops.square(update).sum(),)
            ratios = self._trust_ratios(index, weight_squares + update_squares, len(places))
            for number, place in enumerate(places):
                rate, weight = ratios[number] * (rates[place] if self.is_group_lr else rates), self.parameters[place]
                moved = ops.cast(weight, ms.float32) - rate * updates[number]
                ops.assign(weight, ops.cast(moved, weight.dtype))
        return True

    def _adam_update(self, place, gradient, corrections):
        """Adam's direction for one parameter, whose moments it moves on."""
        gradient = ops.cast(gradient, ms.float32)
        moment1 = self.betas[0] * self.moments1[place] + self.gradient_shares[0] * gradient
        moment2 = self.betas[1] * self.moments2[place] + self.gradient_shares[1] * ops.square(gradient)
        ops.assign(self.moments1[place], moment1)
        ops.assign(self.moments2[place], moment2)
        return moment1 / corrections[0] / (ops.sqrt(moment2 / corrections[1]) + self.eps)

    def _trust_ratios(self, index, squares, count):
        """norm(weight) / norm(update) of the `count` parameters of a set of axes, from this rank's sums of squares."""
        norms = ops.sqrt(self.sums[index](ops.stack(squares)))
        weights, updates = norms[:count], norms[count:]
        both = ops.logical_and(weights > 0, updates > 0)
        return ops.select(both, weights / updates, ops.ones_like(weights))


def _one_minus_exp(x):
    """`1 - exp(x)` of a float32 tensor `x` below 0, with all its digits.

    Near 0 the difference has few left, and so has MindSpore's `expm1` on CPU; `-tanh(x / 2) * (1 + exp(x))` is the same
    number. Far from 0 it is MindSpore's `tanh` that is coarse: it is 1 from 5 on.
    """
    power = ops.exp(x)
    return ops.select(x < -1.0, 1.0 - power, ops.tanh(-0.5 * x) * (1.0 + power))
