"""Five steps with a pipeline schedule of one's own, and beside it on one card: ranks have to divide the layers.

bash scripts/msrun_launch.sh examples/train_own_schedule.py 2 2 127.0.0.1 0
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from own_pipeline_schedule import ScheduleEarly1F1B

from mindformers_core import init_distributed
from mindformers_core.pipeline import PipelineStage
from mindformers_core.tensor_parallel import materialize

LAYERS, WIDTH, CLASSES, ROWS, MICRO_BATCHES, STEPS = 8, 32, 4, 256, 8, 5


class Classifier(nn.Cell):
    """Single-card code. A layer's path has its number in the whole model: a path is one parameter, on any stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellDict([(str(number), nn.Dense(WIDTH, WIDTH)) for number in range(LAYERS)])
        self.head = nn.Dense(WIDTH, CLASSES)

    def construct(self, x):
        for layer in self.layers.values():
            x = x + ops.tanh(layer(x))
        return x if self.head is None else self.head(x)


def loss_of(logits, target):
    """The mean cross-entropy."""
    return ops.cross_entropy(logits, target)


def stage_of(stage_index, stage_num):
    """A stage's Cell: the whole model is only described (meta device), and what others hold is taken away."""
    with ms.DeviceCtx("meta"):
        model = Classifier()
    for number in range(LAYERS):
        if number * stage_num // LAYERS != stage_index:
            del model.layers[str(number)]
    if stage_index < stage_num - 1:
        model.head = None
    materialize(model, seed=0)
    return model


def batch_of(step):
    """Rows, and their classes."""
    random = np.random.default_rng(step)
    x = random.standard_normal((ROWS, WIDTH)).astype(np.float32)
    return Tensor(x), Tensor((x[:, 0] > 0).astype(np.int32) + 2 * (x[:, 1] > 0).astype(np.int32))


def train_pipeline(rank, rank_num):
    """The losses, on all ranks, and this rank's parameters after the last step."""
    last = rank == rank_num - 1
    stage = PipelineStage(stage_of(rank, rank_num), rank, rank_num, loss_fn=loss_of if last else None)
    schedule = ScheduleEarly1F1B(stage, MICRO_BATCHES, share_outputs=True)
    optimizer = nn.Momentum(list(stage.parameters), 0.05, 0.9)
    losses = []
    for step in range(STEPS):
        x, target = batch_of(step)
        stage.zero_gradients()
        losses.append(float(schedule.run(x, target=target)))
        optimizer(stage.gradients)
    return losses, stage.parameters


def train_one_card():
    """The same without a pipeline."""
    model = stage_of(0, 1)
    weights = model.trainable_params()
    step_gradients = ms.value_and_grad(lambda x, target: loss_of(model(x), target), None, weights)
    optimizer = nn.Momentum(weights, 0.05, 0.9)
    losses = []
    for step in range(STEPS):
        loss, gradients = step_gradients(*batch_of(step))
        losses.append(float(loss))
        optimizer(gradients)
    return losses, weights


def largest_difference(found, expected):
    """Between parameters of the same name."""
    values = {parameter.name: parameter.asnumpy() for parameter in expected}
    return max(np.abs(parameter.asnumpy() - values[parameter.name]).max() for parameter in found)


def main():
    """Train both, and compare."""
    here = init_distributed()
    rank, rank_num = here.rank, here.size
    losses, parameters = train_pipeline(rank, rank_num)
    expected, all_parameters = train_one_card()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    difference = largest_difference(parameters, all_parameters)
    assert difference < 1e-6, difference
    print(f"rank {rank}: losses", *(f"{loss:.3f}" for loss in losses), "as on one card; so are its parameters")


if __name__ == "__main__":
    main()
