"""LARS (You et al., "Large Batch Training of Convolutional Networks", 2017) of parameters in slices on a mesh."""

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.optimizers.adamw import moments
from mindformers_core.tensor_parallel.clipping import sums_over_parts


class LARS(nn.Cell):
    """Momentum whose step is scaled to the norm of each weight: shards are updated as the whole would be.

    `ratio = trust * norm(weight) / (norm(gradient) + weight_decay * norm(weight))`, 1 where a norm is 0;
    `moment = momentum * moment + rate * ratio * (gradient + weight_decay * weight)`, `weight -= moment`. Norms are
    taken in float32 over the mesh axes that shard a parameter: one all-reduce for each set of axes. One float32 moment.

    Args:
        parameters: the trainable parameters.
        momentum, trust: as above.
        weight_decay: as above, not decoupled.
    """

    def __init__(self, parameters, momentum=0.9, trust=0.001, weight_decay=0.0):
        super().__init__(auto_prefix=False)
        self.parameters, self.moments = ms.ParameterTuple(parameters), moments(parameters, "lars.moment.")
        self.momentum, self.trust, self.weight_decay = momentum, trust, weight_decay
        self.places, self.sums = sums_over_parts(parameters, range(len(parameters)))

    def construct(self, gradients, rate):
        """One step; `rate` is a float32 scalar."""
        for index, places in enumerate(self.places):
            squares = ()
            for place in places:
                for tensor in (self.parameters[place], gradients[place]):
                    squares = squares + (ops.square(ops.cast(tensor, ms.float32)).sum(),)
            norms = ops.sqrt(self.sums[index](ops.stack(squares)))
            for number, place in enumerate(places):
                weight, gradient = (ops.cast(each, ms.float32) for each in (self.parameters[place], gradients[place]))
                of_weight, of_gradient = norms[2 * number], norms[2 * number + 1]
                ratio = self.trust * of_weight / (of_gradient + self.weight_decay * of_weight)
                ratio = ops.select(ops.logical_and(of_weight > 0, of_gradient > 0), ratio, ops.ones_like(ratio))
                step = rate * ratio * (gradient + self.weight_decay * weight)
                moment = self.momentum * self.moments[place] + step
                ops.assign(self.moments[place], moment)
                ops.assign(self.parameters[place], ops.cast(weight - moment, self.parameters[place].dtype))
