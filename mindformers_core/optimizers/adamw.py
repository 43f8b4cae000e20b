"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) on MindSpore's fused operator.

`ops.AdamWeightDecay` does one parameter in one kernel on CPU, GPU and Ascend, but without bias correction. With
b1 = 1 - beta1^t and b2 = 1 - beta2^t, the corrected step `lr * (m / b1) / (sqrt(v / b2) + eps)` equals
`rate * m / (sqrt(v) + eps * sqrt(b2))` for `rate = lr * sqrt(b2) / b1`, so that corrected scalars are all it needs.
(`mint.optim.AdamW` has no CPU kernel; `mindspore.experimental.optim.AdamW` keeps a third state that it doesn't use.)
"""

import math

import mindspore as ms
from mindspore import nn, ops


def moments(parameters, prefix):
    """A `ParameterTuple` of float32 zeros with the local shapes of `parameters`, and their names after `prefix`."""
    return ms.ParameterTuple(
        ms.Parameter(ops.zeros(parameter.shape, ms.float32), name=prefix + parameter.name, requires_grad=False)
        for parameter in parameters
    )


class AdamW(nn.Cell):
    """Updates `parameters` in place; two float32 moments a parameter, shaped and placed as the parameter's local part.

    Args:
        parameters: the trainable parameters.
        betas: decay of the moments at each step, from 0 up to below 1.
        eps: from 0 up.
        weight_decay: decoupled.
    """

    def __init__(self, parameters, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01):
        super().__init__(auto_prefix=False)
        self.betas, self.eps, self.weight_decay = tuple(betas), eps, weight_decay
        self.parameters = ms.ParameterTuple(parameters)
        self.moments1 = moments(parameters, "adamw.moment1.")
        self.moments2 = moments(parameters, "adamw.moment2.")
        self.update = ops.AdamWeightDecay()

    def construct(self, gradients, rate, eps, decay):
        """One step; `rate`, `eps`, `decay` are float32 scalars, see `scalars`."""
        beta1, beta2 = self.betas[0], self.betas[1]
        for index, gradient in enumerate(gradients):
            weight, moment1, moment2 = self.parameters[index], self.moments1[index], self.moments2[index]
            self.update(weight, moment1, moment2, rate, beta1, beta2, eps, decay, gradient)

    def scalars(self, step, learning_rate):
        """`(rate, eps, decay)` that make the uncorrected operator take AdamW's step number `step` (from 1): tensors."""
        root = math.sqrt(1 - self.betas[1] ** step)
        rate = learning_rate * root / (1 - self.betas[0] ** step)
        numbers = rate, self.eps * root, self.weight_decay * learning_rate / rate if rate else 0.0
        return tuple(ms.Tensor(number, ms.float32) for number in numbers)
