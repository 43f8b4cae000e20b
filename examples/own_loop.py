"""A training loop of one's own, on any number of ranks: docs/own_loop.md explains it.

bash scripts/msrun_launch.sh "examples/own_loop.py output/own_loop 40" 4 4
"""

import sys

import numpy as np
from mindspore import DeviceCtx, Parameter, ParameterTuple, Tensor, nn, ops

from mindformers_core import Checkpointer, hsdp, init_device_mesh, init_distributed, shard
from mindformers_core.layout import layout
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.zero import value_and_grad

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
        losses = ops.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        return losses, ops.sum(ops.cast(ops.not_equal(labels, -1), labels.dtype))


class Momentum(nn.Cell):
    """SGD with momentum; every parameter has the decay of its group."""

    def __init__(self, parameters, decays):
        super().__init__()
        self.parameters, self.decays = ParameterTuple(parameters), decays
        self.moments = ParameterTuple(Parameter(ops.zeros_like(p), name=f"moment.{p.name}") for p in parameters)

    def construct(self, gradients, rate):
        for weight, decay, moment, gradient in zip(self.parameters, self.decays, self.moments, gradients):
            ops.assign(moment, 0.9 * moment + gradient)
            ops.assign(weight, (1 - rate * decay) * weight - rate * moment)


def samples(first, count):
    """A pure function of the samples' numbers: any mesh, and a resumed run, draw the same."""
    x = np.stack([np.random.default_rng((0, n)).standard_normal(FEATURES) for n in range(first, first + count)])
    labels = np.where(x[:, 0] > 1.5, -1, np.argmax(x[:, :CLASSES], 1))
    return x.astype(np.float32), labels.astype(np.int32)


def train(world, folder, steps, tp=1):
    """The losses of the steps that are left."""
    mesh = init_device_mesh((world.size // tp, tp), ("dp", "tp"))
    (place,), parts = mesh.coordinate(world.rank, ("dp",)), mesh.axis_size("dp")
    with DeviceCtx("meta"):  # shard() draws the weights, alike on any mesh
        net = Net()
    hsdp(shard(net, mesh, seed=0), parts, optimizer_level="level2", accumulate_grad_step=MICRO_BATCHES)
    weights, gradient_of, curve = net.trainable_params(), value_and_grad(net, loss="sum"), []
    groups = [0.1 if len(weight.global_shape) > 1 else 0.0 for weight in weights]  # matrices decay, vectors don't
    optimizer, clip = Momentum(weights, groups), ClipByGlobalNorm(weights, 1.0, mesh)

    def own(first, count):
        return map(Tensor, samples(first + place * (count // parts), count // parts))

    with Checkpointer(folder, net, optimizer, mesh, keep_last=2) as checkpointer:
        for step in range(checkpointer.load() + 1, steps + 1):
            results = []  # of micro-batches: sums of losses, and numbers of labels
            for first in range((step - 1) * BATCH, step * BATCH, BATCH // MICRO_BATCHES):
                result, gradients = gradient_of(*own(first, BATCH // MICRO_BATCHES))
                results.append([each.item() for each in result])
            clipped, _ = clip(gradients)  # None in all micro-steps but the last
            optimizer(clipped, 0.2 * min(1.0, step / 10))  # a schedule: any function of the step
            curve.append(np.divide(*np.sum(results, 0)))
            if step % 10 == 0:
                total, count = (each.to_local().item() for each in net(*own(10**6, 64)))  # held-out samples
                checkpointer.save(step, {"evaluated": total / count})
                if world.rank == 0:
                    print(f"step {step}: loss {curve[-1]:.4f}, {total / count:.4f} on held-out samples")
    return curve


if __name__ == "__main__":
    train(init_distributed(), sys.argv[1], int(sys.argv[2]), *map(int, sys.argv[3:]))
