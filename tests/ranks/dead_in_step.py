"""Ranks 1 and 3 die in the second step under hsdp() at level 1 and at level 3, unnoticed by msrun; the others print
what they end with, and that their parameters are as the first step left them."""

import os
import time

import numpy as np
from mindspore import Tensor, nn
from support.small_cells import cell_of

from mindformers_core import communication
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.sharded_cells import computing_parameters
from mindformers_core.zero import hsdp, value_and_grad

world = communication.init_distributed(timeout=15)  # so that the scheduler ends soon, too
pair = world.rank // 2


def construct(self, x):
    return self.layers[1](self.layers[0](x)).square().mean()


mesh = DeviceMesh((2,), ("dp",), (2 * pair, 2 * pair + 1))
layers = nn.CellList([nn.Dense(256, 256, has_bias=False) for _ in range(2)])
net = hsdp(cell_of(construct, layers=layers), 2, optimizer_level=("level1", "level3")[pair], mesh=mesh)
gradient_of, optimizer = value_and_grad(net), nn.SGD(net.trainable_params(), 0.1)
x = Tensor(np.ones((4, 256), np.float32))
optimizer(gradient_of(x)[1])
before = [parameter.asnumpy().copy() for parameter in net.trainable_params()]
# the pairs meet: the report of one would end the other where it is seconds behind
communication.AllReduce(DeviceMesh((4,), ("all",)), "all").forward(x)
if world.rank % 2 == 1:  # in the backward pass, when the others go on to reduce gradients
    computing_parameters(net)[1].register_hook(lambda gradient: os._exit(0))
start = time.monotonic()
try:
    gradient_of(x)
except RuntimeError as error:
    print(f"ended after {time.monotonic() - start:.0f} s with: {error}", flush=True)
    after = [parameter.asnumpy() for parameter in net.trainable_params()]
    print("parameters are as before:", all(map(np.array_equal, before, after)), flush=True)
    os._exit(0)
