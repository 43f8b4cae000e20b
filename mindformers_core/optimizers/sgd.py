"""Stochastic gradient descent with momentum (Sutskever et al., "On the importance of initialization and momentum in
deep learning", 2013)."""

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.optimizers.adamw import moments


class SGD(nn.Cell):
    """`moment = momentum * moment + gradient + weight_decay * weight`, `weight -= rate * moment`; one float32 moment.

    Args:
        parameters: the trainable parameters.
        momentum: 0 keeps no moment.
        nesterov: whether the step is `gradient + momentum * moment`, a look ahead.
        weight_decay: added to the gradient, as `mindspore.nn.SGD` does.
    """

    def __init__(self, parameters, momentum=0.9, nesterov=False, weight_decay=0.0):
        super().__init__(auto_prefix=False)
        self.parameters, self.momentum, self.nesterov = ms.ParameterTuple(parameters), momentum, nesterov
        self.moments = moments(parameters, "sgd.moment.") if momentum else ()
        self.weight_decay = weight_decay

    def construct(self, gradients, rate):
        """One step; `rate` is a float32 scalar."""
        factors = self.factors(gradients)
        for index, gradient in enumerate(gradients):
            weight = ops.cast(self.parameters[index], ms.float32)
            step = factors[index] * (ops.cast(gradient, ms.float32) + self.weight_decay * weight)
            if self.momentum:
                moment = self.momentum * self.moments[index] + step
                ops.assign(self.moments[index], moment)
                step = step + self.momentum * moment if self.nesterov else moment
            ops.assign(self.parameters[index], ops.cast(weight - rate * step, self.parameters[index].dtype))

    def factors(self, gradients):
        """Of the steps of each parameter."""
        return [1.0] * len(gradients)
