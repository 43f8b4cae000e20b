"""Models that write Parameters, as their authors would write them, and their inputs of several steps."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from mindformers_core.layout import layout

__all__ = ["MODELS", "Cache", "Residual", "batches", "built"]


class Residual(nn.Cell):
    """A block of a ResNet: one batch norm is called twice, and a counter of steps is read after it was written."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, pad_mode="same") for _ in range(2))
        self.norm, self.last, self.head = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.7), nn.Dense(4, 4)
        self.steps = Parameter(Tensor(1.0, ms.float32), requires_grad=False)

    def construct(self, x):
        self.steps += 1
        y = ops.relu(self.norm(self.first(x)))
        y = ops.relu(self.last(self.second(self.norm(y))) + x)
        return self.head(y.mean((2, 3))) / self.steps


class Cache(nn.Cell):
    """Sums by class, of all steps so far, and how often each came; what was seen is scattered into a Parameter."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 6)
        self.sums = Parameter(Tensor(np.zeros((8, 6), np.float32)), requires_grad=False)
        self.latest = Parameter(Tensor(np.zeros((8, 6), np.float32)), requires_grad=False)
        self.counts = Parameter(Tensor(np.zeros(8, np.int32)), requires_grad=False)

    def construct(self, x):
        y = self.dense(x.mean((2, 3)))
        places = ops.cast(ops.abs(y[:, 0]) * 7, ms.int32) % 8
        ops.scatter_add(self.sums, places, y)
        ops.assign(self.latest, self.sums * 0.5)
        ops.assign_add(self.counts, ops.ones_like(self.counts))
        ops.assign_sub(self.latest, self.sums * 0.25)
        self.latest[1:3] = y[:2]
        return y + mint.sum(self.sums, 0) * 0.1 + self.latest[:4] * self.counts[1]


def _given(*axes, **weights):
    """A plan: of the input, and the weights of the root; the result is whole."""
    return {"": {"input": {"x": layout(*axes)}, "output": layout("None", "None"), "weight": weights}}


X = _given("dp", "None", "None", "None")
MODELS = {
    "batch norm": (Residual, X),
    "channels cut": (Residual, _given("dp", "tp", "None", "None")),
    "height cut": (Residual, _given("None", "None", "tp", "dp")),
    "statistics cut": (Residual, X | {"norm": {"weight": {"moving_mean": layout("tp")}}}),
    "sums": (Cache, X),
    "sums cut": (Cache, _given("dp", "None", "None", "None", sums=layout("None", "tp"), latest=layout("tp", "dp"))),
}


def built(kind):
    """A model in training, with the same values at every call."""
    cell, random = kind(), np.random.default_rng(0)
    for parameter in cell.trainable_params():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.5))
    return cell.set_train()


def batches(steps=3):
    """The inputs of some steps, arrays."""
    return [np.random.default_rng(seed).normal(size=(4, 4, 8, 8)).astype(np.float32) for seed in range(steps)]
