"""Small Cells and pipelines of them, all in one process."""

import numpy as np
from mindspore import nn, ops

from mindformers_core.pipeline import PipelineStage, ScheduleLoopedBFS


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Scale(nn.Cell):
    """Times a weight that is numbered in the whole model."""

    def __init__(self, number, is_last=False):
        super().__init__()
        self.weights = nn.CellDict([(str(number), nn.Dense(4, 4))])
        self.is_last = is_last

    def construct(self, x):
        for weight in self.weights.values():
            x = ops.tanh(weight(x))
        return ops.mean(x * x) if self.is_last else x


class Counted(Scale):
    """Counts its calls."""

    calls = 0

    def construct(self, x):
        self.calls += 1
        return super().construct(x)


def pipeline(
    cells, micro_batch_num=4, kind=ScheduleLoopedBFS, loss_fn=None, compiled=False, tied=(), loss_scale=None,
    loss="mean", **options
):  # fmt: skip
    """A schedule that runs all the Cells here."""
    of_last = {"loss_fn": loss_fn, "loss_scale": loss_scale, "loss": loss}
    stages = [
        PipelineStage(cell, place, len(cells), compiled=compiled, tied=tied, **(of_last if cell is cells[-1] else {}))
        for place, cell in enumerate(cells)
    ]
    return kind(stages, micro_batch_num, **options)


class Squares(nn.Cell):
    """Gives a loss; no parameter."""

    def construct(self, x):
        return ops.sum(x * x)


class Through(nn.Cell):
    """An empty stage."""

    def construct(self, x):
        return x
