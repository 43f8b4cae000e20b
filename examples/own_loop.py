"""A training loop of one's own, on any number of ranks: docs/own_loop.md explains it.

bash scripts/msrun_launch.sh "examples/own_loop.py output/own_loop 40" 4 4
"""

import sys

import numpy as np
from mindspore import DeviceCtx, Tensor, nn, ops

from mindformers_core import init_device_mesh, init_distributed, shard
from mindformers_core.checkpoint import Checkpointer
from mindformers_core.layout import layout
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.zero import hsdp, value_and_grad

BATCH, MICRO_BATCHES, FEATURES, CLASSES = 32, 2, 16, 4


class Net(nn.Cell):
    """Samples (rows, features) and labels (rows,) -> the sum of the losses, and how many labels count (not -1)."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Dense(FEATURES, 64), nn.LayerNorm((64,)), nn.Dense(64, CLASSES)

    def shard(self, config):
        weights = {"up.weight": layout("tp", None), "up.bias": layout("tp"), "down.weight": layout(None, "tp")}
        return {"x": layout("dp", None), "labels": layout("dp")}, None, weights

    def construct(self, x, labels):
        logits = self.down(self.norm(ops.relu(self.up(x))))
        loss = ops.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return loss, ops.sum(ops.cast(ops.not_equal(labels, -1), labels.dtype))


def samples(first, count):
    """A pure function of the samples' numbers: any mesh, and a resumed run, draw the same."""
    rows = [np.random.default_rng((0, number)).standard_normal(FEATURES) for number in range(first, first + count)]
    x = np.stack(rows)
    labels = np.where(x[:, 0] > 1.5, -1, np.argmax(x[:, :CLASSES], 1))
    return x.astype(np.float32), labels.astype(np.int32)


def train(world, folder, steps, tp=1):
    """The losses of the steps that are left."""
    mesh = init_device_mesh((world.size // tp, tp), ("dp", "tp"))
    (place,), parts = mesh.coordinate(world.rank, ("dp",)), mesh.axis_size("dp")
    with DeviceCtx("meta"):  # shard() draws the weights, alike on any mesh
        net = Net()
    hsdp(shard(net, mesh, seed=0), parts, optimizer_level="level2", accumulate_grad_step=MICRO_BATCHES)
    weights = net.trainable_params()
    matrices, vectors = ([w for w in weights if (len(w.global_shape) > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    rate = [0.01 * min(1.0, step / 10) for step in range(1, 101)]
    optimizer, clip = nn.AdamWeightDecay(groups, rate), ClipByGlobalNorm(weights, 1.0, mesh)
    gradient_of, curve = value_and_grad(net, loss="sum"), []

    def own(first, count):
        arrays = samples(first + place * (count // parts), count // parts)
        return map(Tensor, arrays)

    with Checkpointer(folder, net, optimizer, mesh, keep_last=2) as checkpointer:
        for step in range(checkpointer.load() + 1, steps + 1):
            results = []
            for number in range(MICRO_BATCHES):
                first, count = (step - 1) * BATCH, BATCH // MICRO_BATCHES
                result, gradients = gradient_of(*own(first + number * count, count))
                results.append([each.item() for each in result])
            clipped, norm = clip(gradients)
            named = {weight.name: gradient for weight, gradient in zip(weights, clipped)}
            optimizer(tuple(named[weight.name] for weight in optimizer.parameters))
            loss, labels = np.sum(results, 0)
            curve.append(loss / labels)
            if step % 10 == 0:
                total, count = (each.to_local().item() for each in net(*own(10**6, 64)))  # held-out samples
                checkpointer.save(step, {"evaluated": total / count})
                if world.rank == 0:
                    print(f"step {step}: loss {curve[-1]:.4f}, {total / count:.4f} on held-out samples")
    return curve


if __name__ == "__main__":
    train(init_distributed(), sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
