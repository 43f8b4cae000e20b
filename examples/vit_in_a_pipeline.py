"""The vision transformer of vit.py on pp 2 x tp 2: two stages of one layer each, whose weights are cut as in the plan.

bash scripts/msrun_launch.sh examples/vit_in_a_pipeline.py 4 4 127.0.0.1 0
"""

import mindspore as ms
from mindspore import Tensor, nn, ops
from vit import STEPS, VisionTransformer, batch_of
from vit_by_plan import PLAN

from mindformers_core import init_device_mesh, init_distributed, shard
from mindformers_core.pipeline import PipelineStage, Schedule1F1B

MICRO_BATCHES = 4


class First(nn.Cell):
    """Patches and the first layer; its Cells keep the paths that they have in the whole model."""

    def __init__(self, whole):
        super().__init__()
        self.patches, self.positions = whole.patches, whole.positions
        self.layers = nn.CellDict([("0", whole.layers[0])])

    def construct(self, image):
        cut = image.reshape(-1, 3, 4, 4, 4, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 16, 48)
        return self.layers["0"](self.patches(cut) + self.positions)


class Last(nn.Cell):
    """The second layer and the loss; keyword arguments of a run go to the stages that take them."""

    def __init__(self, whole):
        super().__init__()
        self.layers = nn.CellDict([("1", whole.layers[1])])
        self.norm, self.head = whole.norm, whole.head

    def construct(self, x, label):
        return ops.cross_entropy(self.head(self.norm(self.layers["1"](x)).mean(1)), label)


def train(rank):
    """The losses, the same on all ranks and on one card."""
    mesh = init_device_mesh((2, 2), ("pp", "tp"))
    (place,) = mesh.coordinate(rank, ("pp",))
    ms.set_seed(0)
    cell = (First, Last)[place](VisionTransformer())
    shard(cell, mesh.sub_mesh(("tp",), rank), plan={path: entry for path, entry in PLAN.items() if path})
    schedule = Schedule1F1B(PipelineStage(cell, place, 2, mesh=mesh), MICRO_BATCHES, share_outputs=True)
    (stage,) = schedule.stages
    optimizer, losses = nn.Adam(stage.parameters), []
    for number in range(STEPS):
        image, label = map(Tensor, batch_of(number))
        losses.append(float(schedule.run(image, label=label)))  # of the mean over micro-batches
        optimizer(stage.gradients)
        stage.zero_gradients()
    return losses


if __name__ == "__main__":
    world = init_distributed()
    found = train(world.rank)
    print(f"rank {world.rank}: losses {[round(loss, 4) for loss in found]}")
