"""The vision transformer of vit.py on dp 2 x tp 2, as it is: a plan says how some of its weights are cut.

bash scripts/msrun_launch.sh examples/vit_by_plan.py 4 4 127.0.0.1 0
"""

import mindspore as ms
from mindspore import Tensor, nn
from vit import STEPS, VisionTransformer, batch_of

from mindformers_core import explain, init_device_mesh, init_distributed, shard
from mindformers_core.layout import layout

COLUMNS = {"weight": {"weight": layout("tp", None), "bias": layout("tp")}}  # nn.Dense keeps (outputs, inputs)
ROWS = {"weight": {"weight": layout(None, "tp")}}
PLAN = {
    "": {"input": {"image": layout("dp"), "label": layout("dp")}},  # every rank gives its own rows of the batch
    "layers.*.attention.[qkv]": COLUMNS,
    "layers.*.attention.o": ROWS,
    "layers.*.up": COLUMNS,
    "layers.*.down": ROWS,
}


def train(rank):
    """The losses, the same on all ranks and on one card."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    ms.set_seed(0)  # the same initial values on all ranks
    net = shard(VisionTransformer(), mesh, plan=PLAN)
    optimizer = nn.Adam(net.trainable_params())  # after shard(): of this rank's parts
    step = ms.value_and_grad(lambda *batch: net(*batch).full_tensor(), None, net.trainable_params())
    (place,), losses = mesh.coordinate(rank, ("dp",)), []
    for number in range(STEPS):
        loss, gradients = step(*map(Tensor, batch_of(number, place, 2)))
        optimizer(gradients)
        losses.append(float(loss))
    if rank == 0:
        print(explain(net).partition("One rank sends in a step:")[2])
    return losses


if __name__ == "__main__":
    world = init_distributed()
    found = train(world.rank)
    print(f"rank {world.rank}: losses {[round(loss, 4) for loss in found]}")
