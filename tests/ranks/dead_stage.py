"""The middle one of three stages dies in the second run, unnoticed by msrun; the others print what they end with."""

import os
import time

import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_core import communication
from mindformers_core.pipeline import PipelineStage, Schedule1F1B

world = communication.init_distributed(timeout=5)  # so that the scheduler ends soon, too


class Part(nn.Cell):
    """A layer, numbered in the whole model; the middle one may die."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellDict([(str(world.rank), nn.Dense(4, 4))])
        self.calls = 0

    def construct(self, x):
        self.calls += 1
        if world.rank == 1 and self.calls > 5:
            time.sleep(1)  # what others still wait for is on its way
            os._exit(0)
        x = self.layers[str(world.rank)](x)
        return ops.mean(x * x) if world.rank == 2 else x


schedule = Schedule1F1B(PipelineStage(Part(), world.rank, 3), 4)
x = Tensor(np.ones((8, 4), np.float32))
schedule.run(x)
start = time.monotonic()
try:
    schedule.run(x)
except RuntimeError as error:
    print(f"ended after {time.monotonic() - start:.0f} s with: {error}", flush=True)
    os._exit(0)
