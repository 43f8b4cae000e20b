"""The moving average of weights.

The idea is that of Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992.
"""

from contextlib import contextmanager

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.optimizers.adamw import moments

PREFIX = "average."  # of an average's name; then that of its parameter


class AveragedWeights(nn.Cell):
    """Float32 averages of `parameters`, shaped and placed as these: `a + (1 - decay) * (p - a)` after each update.

    Called, it takes the parameters into the averages, which are zero before `begin`.
    """

    def __init__(self, parameters, decay):
        super().__init__(auto_prefix=False)
        self.parameters, self.weight = ms.ParameterTuple(parameters), 1.0 - decay
        self.averages = moments(parameters, PREFIX)

    def construct(self):
        for index, parameter in enumerate(self.parameters):
            average = self.averages[index]
            ops.assign(average, average + self.weight * (ops.cast(parameter, ms.float32) - average))

    def begin(self):
        """Begin at the parameters as they are."""
        for average, parameter in zip(self.averages, self.parameters):
            ops.assign(average, ops.cast(parameter, ms.float32))

    @contextmanager
    def in_place(self):
        """While open, the parameters have the averages' values."""
        own = [parameter.copy() for parameter in self.parameters]
        try:
            for average, parameter in zip(self.averages, self.parameters):
                ops.assign(parameter, ops.cast(average, parameter.dtype))
            yield
        finally:
            for value, parameter in zip(own, self.parameters):
                ops.assign(parameter, value)
