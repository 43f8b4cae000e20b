"""The vision transformer of vit.py on dp 2 x tp 2 with ZeRO 3, four micro-steps, and layers computed again.

bash scripts/msrun_launch.sh examples/vit_with_hsdp.py 4 4 127.0.0.1 0
"""

import mindspore as ms
from mindspore import Tensor, nn
from vit import STEPS, VisionTransformer, batch_of
from vit_by_plan import PLAN

from mindformers_core import init_device_mesh, init_distributed, shard
from mindformers_core.recompute import recompute
from mindformers_core.zero import hsdp, memory_report, value_and_grad

MICRO_STEPS = 4


def train(rank):
    """The losses, the same on all ranks and on one card; and what the parameters take on this rank."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    ms.set_seed(0)
    net = shard(VisionTransformer(), mesh, plan=PLAN)
    recompute(net, full=True)  # of every layer only its input is kept
    hsdp(net, 2, threshold=0, optimizer_level="level3", accumulate_grad_step=MICRO_STEPS)
    optimizer = nn.Adam(net.trainable_params())  # after hsdp(): of parts
    step, losses = value_and_grad(net), []
    (place,) = mesh.coordinate(rank, ("dp",))
    for number in range(STEPS):
        total = 0.0
        for micro_step in range(MICRO_STEPS):  # micro-step by micro-step the rows of both ranks make the whole batch
            part = batch_of(number, micro_step * 2 + place, 2 * MICRO_STEPS)
            loss, gradients = step(*map(Tensor, part))
            total += float(loss)
        optimizer(gradients)  # there after the last micro-step: of the mean over all
        losses.append(total / MICRO_STEPS)
    return losses, memory_report(net, optimizer)


if __name__ == "__main__":
    world = init_distributed()
    found, report = train(world.rank)
    print(f"rank {world.rank}: losses {[round(loss, 4) for loss in found]}")
    if world.rank == 0:
        print(report)
