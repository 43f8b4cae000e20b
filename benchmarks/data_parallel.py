"""A residual net with batch norm, whose inputs alone are declared cut over dp: 2 ranks against one process.

Forward and backward, gradients of all parameters; the statistics of the norms are those of the whole batch, and nothing
else but the gradients is sent. `single` is the model on rank 0 with the whole batch, while rank 1 waits. That both give
the same loss and gradients is checked before any is timed. `halves` is `single` on each rank with its half of the batch
and statistics of its own, at the same time, and nothing sent: what this machine reaches at most.
"""

import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # convolutions of MindSpore 2.10 take 60 times as long on AVX-512

import mindspore as ms
import numpy as np
from harness import Variant, ratio_remarks, run_benchmark
from mindspore import Tensor, nn, ops

from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import jit, shard

DP, BLOCKS, WIDTH, SIZE, BATCH, CLASSES = 2, 2, 512, 14, 32, 10
TITLE = f"{BLOCKS} residual blocks of {WIDTH} channels, {SIZE} x {SIZE}, batch {BATCH}, float32, dp {DP}"
LIMIT = 0.6  # of the time of one process
TOLERANCE = 2e-5  # of a loss or gradient, relative to the largest value in it; a ReLU would make rounding 1e-3


class Block(nn.Cell):
    """Two convolutions with batch norms around which the input passes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(WIDTH, WIDTH, 3, weight_init="HeNormal") for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def construct(self, x):
        return ops.silu(x + self.norm2(self.second(ops.silu(self.norm1(self.first(x))))))


class Net(nn.Cell):
    """Images (batch, 3, size, size) and labels → the mean cross-entropy."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, weight_init="HeNormal")
        self.blocks = nn.SequentialCell([Block() for _ in range(BLOCKS)])
        self.head = nn.Dense(WIDTH, CLASSES)

    def construct(self, images, labels):
        return ops.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)


def make_variants():
    """`single` and `generated`, in PyNative and compiled, once they are checked to agree."""
    random = np.random.default_rng(3)
    images = random.normal(size=(BATCH, 3, SIZE, SIZE)).astype(np.float32)
    labels = random.integers(0, CLASSES, BATCH).astype(np.int32)
    rows = slice(world().rank * BATCH // DP, (world().rank + 1) * BATCH // DP)
    whole, part = [[Tensor(each[chosen]) for each in (images, labels)] for chosen in (slice(None), rows)]
    ms.set_seed(3)
    single = Net().set_train()
    ms.set_seed(3)
    plan = {"": {"input": {"images": layout("dp"), "labels": layout("dp")}}}
    generated = shard(Net().set_train(), init_device_mesh((DP,), ("dp",)), plan=plan)
    steps = {
        "single/pynative": (step_of(single), whole),
        "generated/pynative": (step_of(generated), part),
        "single/jit": (jit(step_of(single)), whole),
        "generated/jit": (jit(step_of(generated)), part),
    }
    truth = flat(steps["single/pynative"])
    for kind, step in steps.items():  # before `halves`, which are other numbers
        for number, (mine, expected) in enumerate(zip(flat(step), truth, strict=True)):
            error = np.abs(mine - expected).max() / max(np.abs(expected).max(), 1e-3)
            if not error <= TOLERANCE:
                raise ValueError(f"{kind}: result {number} differs from one card's by {error:.1e} of its largest value")
    steps |= {kind.replace("single", "halves"): (step, part) for kind, (step, _) in steps.items() if "single" in kind}
    return [
        Variant(kind, f"single/{kind.partition('/')[2]}", finished(*step), ranks=(0,) if "single" in kind else None)
        for kind, step in steps.items()
    ]


def step_of(net):
    """A function that gives the loss and the gradients of all parameters."""
    gradient_of = ms.value_and_grad(net, None, net.trainable_params())

    def step(images, labels):
        loss, gradients = gradient_of(images, labels)
        return loss, *gradients

    return step


def flat(step):
    """What a step gives, as arrays."""
    run, inputs = step
    found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in run(*inputs)]
    return [np.asarray(each.asnumpy()) for each in found]


def finished(step, inputs):
    """A function that runs a step and returns when it is computed: the first layer's gradient comes last."""

    def run():
        step(*inputs)[1].asnumpy()

    return run


def remarks(results):
    """The part of one process's time that two ranks take, against what it may be: `(lines, whether it is kept)`."""
    return ratio_remarks(results, [(f"generated/{mode}", f"single/{mode}", LIMIT) for mode in ("pynative", "jit")])


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, DP, make_variants, TITLE, remarks))
