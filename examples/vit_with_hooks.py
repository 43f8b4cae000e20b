"""The vision transformer of vit.py on dp 2 x tp 2 with sequence parallelism: hooks in its classes, and a compiled step.

bash scripts/msrun_launch.sh examples/vit_with_hooks.py 4 4 127.0.0.1 0
"""

import mindspore as ms
from mindspore import Tensor, nn
from vit import STEPS, Layer, VisionTransformer, batch_of

from mindformers_core import init_device_mesh, init_distributed, jit, shard
from mindformers_core.layout import layout

SEQUENCE = layout("dp", "tp", None)  # between the linear layers every rank has some of the patches


class ParallelLayer(Layer):
    """Says how its weights are cut, those of the Cells in it by their paths."""

    def shard(self, config):
        columns = [f"attention.{name}" for name in "qkv"] + ["up"]
        weights = {f"{name}.weight": layout("tp", None) for name in columns}
        weights |= {f"{name}.bias": layout("tp") for name in columns}
        weights |= {f"{name}.weight": layout(None, "tp") for name in ("attention.o", "down")}
        return SEQUENCE, SEQUENCE, weights


class ParallelVisionTransformer(VisionTransformer):
    """Says how its inputs are cut: every rank gives its own rows of the batch."""

    layer = ParallelLayer

    def shard(self, config):
        return {"image": layout("dp"), "label": layout("dp")}, None, None


def train(rank):
    """The losses, the same on all ranks, and this rank's collectives in a step."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    ms.set_seed(0)
    net = shard(ParallelVisionTransformer(), mesh)
    optimizer = nn.Adam(net.trainable_params())
    step = jit(ms.value_and_grad(net, None, net.trainable_params()))  # in a graph tensors are this rank's parts
    (place,), losses = mesh.coordinate(rank, ("dp",)), []
    for number in range(STEPS):
        loss, gradients = step(*map(Tensor, batch_of(number, place, 2)))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    world = init_distributed()
    found = train(world.rank)
    print(f"rank {world.rank}: losses {[round(loss, 4) for loss in found]}")
