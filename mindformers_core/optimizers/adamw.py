"""AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization", 2019) on MindSpore's fused operator.

`ops.AdamWeightDecay` does one parameter in one kernel on CPU, GPU and Ascend, but without bias correction. With
b1 = 1 - beta1^t and b2 = 1 - beta2^t, the corrected step `lr * (m / b1) / (sqrt(v / b2) + eps)` equals
`rate * m / (sqrt(v) + eps * sqrt(b2))` for `rate = lr * sqrt(b2) / b1`, so that corrected scalars are all it needs.
(`mint.optim.AdamW` has no CPU kernel; `mindspore.experimental.optim.AdamW` keeps a third state that it doesn't use.)
"""

import math
from fnmatch import fnmatchcase

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.hints import any_layer, first_of


def moments(parameters, prefix):
    """A `ParameterTuple` of float32 zeros with the local shapes of `parameters`, and their names after `prefix`."""
    return ms.ParameterTuple(
        ms.Parameter(ops.zeros(parameter.shape, ms.float32), name=prefix + parameter.name, requires_grad=False)
        for parameter in parameters
    )


def decays(parameter, section):
    """Whether weight decay applies to a parameter, by the section `optimizer`: its name, and the dims of the whole."""
    dims = len(getattr(parameter, "global_shape", parameter.shape))
    excluded = any(fnmatchcase(parameter.name, pattern) for pattern in section.weight_decay_exclude)
    return not excluded and (dims > 1 or section.weight_decay_vectors)


def decay_lines(decaying, section):
    """Two lines, on the parameters that decay and on the others, for a dict, name -> whether."""
    lines = []
    for head, told in (f"decay {section.weight_decay:g}", True), ("no decay", False):
        names = [name for name, decays in decaying.items() if decays == told]
        kinds = list(dict.fromkeys(map(any_layer, names)))
        lines.append(f"{head:<11} {len(names)} weights: {first_of(kinds, 5)}")
    return lines


class AdamW(nn.Cell):
    """Updates `parameters` in place; two float32 moments a parameter, shaped and placed as the parameter's local part.

    Args:
        parameters: the trainable parameters.
        section: the recipe's `optimizer` section.
    """

    def __init__(self, parameters, section):
        super().__init__()
        self.section = section
        self.parameters = ms.ParameterTuple(parameters)
        self.moments1 = moments(parameters, "adamw.moment1.")
        self.moments2 = moments(parameters, "adamw.moment2.")
        self.decays = tuple(decays(parameter, section) for parameter in parameters)
        self.update = ops.AdamWeightDecay()

    def construct(self, gradients, rate, eps, decay):
        """One step; `rate`, `eps`, `decay` are float32 scalars, see `scalars`."""
        beta1, beta2 = self.section.betas[0], self.section.betas[1]
        for index, gradient in enumerate(gradients):
            weight, moment1, moment2 = self.parameters[index], self.moments1[index], self.moments2[index]
            own_decay = decay if self.decays[index] else 0.0
            self.update(weight, moment1, moment2, rate, beta1, beta2, eps, own_decay, gradient)

    def scalars(self, step, learning_rate):
        """`(rate, eps, decay)` that make the uncorrected operator take AdamW's step number `step` (from 1): tensors."""
        section = self.section
        root = math.sqrt(1 - section.betas[1] ** step)
        rate = learning_rate * root / (1 - section.betas[0] ** step)
        numbers = rate, section.eps * root, section.weight_decay * learning_rate / rate if rate else 0.0
        return tuple(ms.Tensor(number, ms.float32) for number in numbers)
