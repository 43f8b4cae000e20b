"""The world that `init_distributed` finds under msrun."""

import os
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import communication, ops
from support.launch import on_ranks

from mindformers_core.communication import init_distributed, world
from mindformers_core.mesh import launch_rank


@on_ranks(2, 4)
def case_world():
    """Rank and size are MindSpore's, the launcher's and ours alike; asking again gives the same world."""
    here = world()
    assert here.rank == communication.get_rank() == launch_rank()
    assert here.size == communication.get_group_size()
    assert (here.backend, here.device_target, here.launcher) == ("cpu", "CPU", "msrun")
    assert init_distributed(world_size=here.size) is here


@on_ranks(2, 4)
def case_threads():
    """MindSpore's threads that poll are no more than this rank's share of the cores, though kernels would use more."""
    x = ms.Tensor(np.ones((1024, 1024), np.float32))
    assert (ops.exp(x) * x).sum().asnumpy() > 0
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    share = max(1, len(os.sched_getaffinity(0)) // world().size)
    assert sum(name.startswith(("ActorThread", "KernelThread")) for name in names) <= share, names
