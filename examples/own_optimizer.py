"""An optimizer and a learning rate of one's own that a recipe names: docs/optimizers.md explains them.

PYTHONPATH=examples python -m mindformers_core train --config examples/own_optimizer.yaml
"""

import mindspore as ms
from mindspore import nn, ops


class Lion(nn.Cell):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): steps by the sign of a moment.

    Its keyword arguments are the keys of section `optimizer`, with the types of their defaults.
    """

    def __init__(self, parameters, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(auto_prefix=False)  # parameters keep their names
        self.parameters, self.betas, self.weight_decay = ms.ParameterTuple(parameters), betas, weight_decay
        states = [ms.Parameter(ops.zeros(p.shape, ms.float32), name=f"lion.{p.name}") for p in parameters]
        self.moments = ms.ParameterTuple(states)  # each is saved as its parameter is: the name says so

    def construct(self, gradients, rate):
        """One step: local gradients in the order of the parameters, and this step's learning rate, a scalar tensor."""
        for index, gradient in enumerate(gradients):
            weight, moment = self.parameters[index], self.moments[index]
            step = ops.sign(self.betas[0] * moment + (1 - self.betas[0]) * gradient)
            ops.assign(moment, self.betas[1] * moment + (1 - self.betas[1]) * gradient)
            moved = weight - rate * (step + self.weight_decay * weight)  # in float32, also of a weight in float16
            ops.assign(weight, ops.cast(moved, weight.dtype))


def cycles(step, steps, learning_rate=1e-3, count=2):
    """The rate falls from `learning_rate` to 0 `count` times; `steps` is `training.steps`."""
    return learning_rate * (1 - count * (step - 1) / steps % 1)
