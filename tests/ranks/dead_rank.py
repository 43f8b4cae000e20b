"""Ranks 3 to 5 of 6 die before a collective with 0 to 2, unnoticed by msrun (as on another machine).

Each of the others is in a group with one of them only, runs another collective, and prints what it ends with: one of
them first with a large tensor, which goes through shared memory. It then leaves quietly, since msrun would end the
others at the first rank that fails.
"""

import os
import time

import mindspore as ms
import numpy as np

from mindformers_core import communication
from mindformers_core.mesh import init_device_mesh

world = communication.init_distributed()
mesh = init_device_mesh((2, 3), ("tp", "dp"))
column = world.rank % 3
collective = communication.AllGather(mesh, "tp", 0) if column == 1 else communication.AllReduce(mesh, "tp")
run = ms.jit(collective) if column == 2 else collective
xs = [ms.Tensor(np.ones(shape, np.float32)) for shape in ([(300, 300), (2, 2)] if column == 1 else [(2, 2)])]
for x in xs:
    run(x).asnumpy()
if world.rank > 2:
    time.sleep(1)  # what the other rank still waits for from the first call is on its way
    os._exit(0)
for x in xs:
    start = time.monotonic()
    try:
        run(x).asnumpy()
    except RuntimeError as error:
        print(f"ended after {time.monotonic() - start:.0f} s with: {error}", flush=True)
os._exit(0)
