"""Rank 1 dies before a collective, unnoticed by msrun (as on another machine); rank 0 prints what it ends with.

Argument: the class of the collective, `AllReduce` or `AllGather`; "jit" after it runs it inside a graph.
"""

import os
import sys
import time

import mindspore as ms
import numpy as np

from mindformers_core import communication
from mindformers_core.mesh import init_device_mesh

world = communication.init_distributed()
mesh = init_device_mesh((2,), ("tp",))
arguments = (0,) if sys.argv[1] == "AllGather" else ()
collective = getattr(communication, sys.argv[1])(mesh, "tp", *arguments)
run = ms.jit(collective) if "jit" in sys.argv else collective
x = ms.Tensor(np.ones((2, 2), np.float32))
run(x).asnumpy()
if world.rank == 1:
    time.sleep(1)  # what rank 0 still waits for from the first call is on its way
    os._exit(0)
start = time.monotonic()
try:
    run(x).asnumpy()
except RuntimeError as error:
    print(f"after {time.monotonic() - start:.0f} s: {error}", flush=True)
    os._exit(1)
