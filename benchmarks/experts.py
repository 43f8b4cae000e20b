"""A layer of experts on two ranks that share tokens and experts, against one process that has all, and hand-written.

All variants are checked to have one card's loss and gradients: of the input, the router, and the experts. In those of
`capacity` an expert takes of a sample's choices as many as all experts alike would, and others are dropped. `halves` is
a layer of half of the experts on each rank, with half of the tokens, and nothing sent: what this machine reaches. Every
variant takes some steps in turn, as a job does: what the others left in the caches costs the first one only.
"""

import statistics
import sys
from types import SimpleNamespace

import numpy as np
from harness import Variant, ratio_remarks, repeated, run_benchmark
from mindspore import Tensor, nn, ops
from tensor_parallel import compiled, finished, flat, gradients_of

from mindformers_core.communication import world
from mindformers_core.communication.collectives import AllReduce, AllToAll, Combine, Dispatch, MarkVarying
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models.experts import MixtureOfExperts, RoutedExperts, Router, RouterConfig
from mindformers_core.tensor_parallel import shard

EP, EXPERTS, CHOICES, HIDDEN, INNER, BATCH, LENGTH, SEED = 2, 8, 2, 256, 1024, 4, 256, 5
TITLE = (
    f"top-{CHOICES} of {EXPERTS} experts of {HIDDEN} x {INNER}, {BATCH * LENGTH} tokens, forward and backward, ep {EP}"
)
STEPS = 4  # that a variant takes in turn
TOLERANCE = 1e-5  # of a loss or gradient, relative to the largest value in it
BASE = "single/pynative"
CAPACITY = LENGTH * CHOICES // EXPERTS, LENGTH
LIMIT, BY_HAND = 0.65, 1.03  # of two ranks' time over one's, and over the hand-written one's
_dense = ops.MatMul(False, True)  # the product that our experts take, too


class Layer(nn.Cell):
    """Tokens (batch, length, H) → a loss."""

    def __init__(self, capacity=None, count=EXPERTS):
        super().__init__()
        router = Router(HIDDEN, RouterConfig(count, CHOICES))
        self.moe = MixtureOfExperts(router, RoutedExperts(count, HIDDEN, INNER, capacity=capacity))

    def construct(self, x):
        return ops.sum(ops.square(self.moe(x)[0]))


class Handwritten(nn.Cell):
    """What an author writes for two ranks in PyNative: the rows of each choice to its expert's rank and back."""

    def __init__(self, mesh):
        super().__init__()
        self.gate, self.own = Router(HIDDEN, RouterConfig(EXPERTS, CHOICES)), EXPERTS // EP
        self.experts = RoutedExperts(self.own, HIDDEN, INNER)
        rows, most = BATCH // EP * LENGTH * CHOICES, BATCH * LENGTH * CHOICES
        self.rows, self.back = Dispatch(mesh, ("ep",), rows, most), Combine(mesh, ("ep",), most, rows)
        self.numbers = AllToAll(mesh, ("ep",), 0, 1)
        self.marked, self.total = MarkVarying(mesh, ("ep",)), AllReduce(mesh, ("ep",))

    def construct(self, x):
        logits = ops.dense(x.reshape(-1, HIDDEN), self.marked(self.gate.weight))
        scores = ops.softmax(logits, -1)
        chosen = np.argsort(-scores.asnumpy(), -1, kind="stable")[:, :CHOICES]
        weights = ops.gather_elements(scores, 1, Tensor(chosen))
        weights = weights / weights.sum(-1, keepdims=True)
        count, total = len(chosen), chosen.size
        owners, numbers = chosen.reshape(-1) // self.own, chosen.reshape(-1) % self.own
        order = np.argsort(owners, kind="stable")
        sent = np.bincount(owners, minlength=EP)
        told = np.full((1, EP, total), -1)
        for rank, part in enumerate(np.split(numbers[order], np.cumsum(sent)[:-1])):
            told[0, rank, : len(part)] = part
        told = self.numbers(Tensor(told.astype(np.int32))).asnumpy().reshape(EP, total)
        sizes = np.stack((sent, (told >= 0).sum(1))).astype(np.int32)
        given = self.rows(ops.gather(x.reshape(-1, HIDDEN), Tensor(order // CHOICES), 0), Tensor(sizes))
        numbers = told[told >= 0]
        inner = np.argsort(numbers, kind="stable")
        counts = np.bincount(numbers, minlength=self.own).tolist()
        parts = ops.split(ops.gather(given, Tensor(inner), 0), counts)
        found = ops.cat([self.expert(number, part) for number, part in enumerate(parts)], 0)
        found = self.back(ops.gather(found, Tensor(np.argsort(inner)), 0), Tensor(sizes[::-1].copy()))
        found = ops.gather(found, Tensor(np.argsort(order)), 0)
        output = (found.reshape(count, CHOICES, HIDDEN) * weights.expand_dims(-1)).sum(1)
        return self.total(ops.square(output).sum())

    def expert(self, number, rows):
        """What an expert makes of its rows."""
        gate, up = self.experts.gate_up_proj[number]
        return _dense(ops.silu(_dense(rows, gate)) * _dense(rows, up), self.experts.down_proj[number])


def make_variants():
    """All variants, once they are checked to agree."""
    mesh, draw = init_device_mesh((EP,), ("ep",)), np.random.default_rng(SEED)
    nets = [Layer(capacity) for capacity in (None, None, None, CAPACITY, CAPACITY)]
    whole = draw.normal(size=(BATCH, LENGTH, HIDDEN)).astype(np.float32)
    values = [draw.normal(size=each.shape).astype(np.float32) * 0.1 for each in nets[0].trainable_params()]
    for net in nets:
        for parameter, value in zip(net.trainable_params(), values, strict=True):
            parameter.set_data(Tensor(value))
    single, generated, eager, single_capacity, capacity = nets
    config, plan = SimpleNamespace(expert_parallel=("ep",)), {"": {"input": {"x": layout("ep", None, None)}}}
    for net in (generated, capacity):
        shard(net, mesh, config, plan)
    shard(eager, mesh, config, plan, mode="eager")
    handwritten = Handwritten(mesh)
    for parameter, value in zip(handwritten.trainable_params(), values, strict=True):
        parameter.set_data(Tensor(own(value, parameter.shape)))
    x, mine = Tensor(whole), Tensor(own(whole, (BATCH // EP, LENGTH, HIDDEN)))
    steps = {
        "single/pynative": gradients_of(single),
        "single/jit": compiled(gradients_of(single)),
        "handwritten": gradients_of(handwritten),
        "generated/pynative": gradients_of(generated),
        "generated/jit": compiled(gradients_of(generated)),
        "eager": gradients_of(eager),
        "single/jit/capacity": compiled(gradients_of(single_capacity)),
        "capacity/jit": compiled(gradients_of(capacity)),
    }
    inputs = {name: (x if name.startswith("single") else mine,) for name in steps}
    truth, dropping = (flat(gradients_of(net)(x)) for net in (single, single_capacity))
    for name, step in steps.items():
        for found, expected in zip(flat(step(*inputs[name])), dropping if "capacity" in name else truth, strict=True):
            expected = own(expected, found.shape)
            np.testing.assert_allclose(found, expected, atol=TOLERANCE * np.abs(expected).max(), err_msg=name)
    halves = Layer(count=EXPERTS // EP)
    steps["halves"], inputs["halves"] = gradients_of(halves), (mine,)
    runs = {name: repeated(finished(step, inputs[name]), STEPS) for name, step in steps.items()}
    return [
        Variant(name, BASE, run, ranks=(0,) if name.startswith("single") else None, calls=STEPS)
        for name, run in runs.items()
    ]


def own(whole, shape):
    """This rank's part of dim 0, where a part has that shape."""
    return whole if whole.shape == shape else np.split(whole, EP)[world().rank]


def remarks(results):
    """Ratios of wall time, with their limits, and of CPU time."""
    pairs = [
        ("generated/pynative", BASE, LIMIT),
        ("generated/jit", "single/jit", LIMIT),
        ("eager", BASE, None),
        ("halves", BASE, None),
    ]
    pairs += [("capacity/jit", "single/jit/capacity", LIMIT), ("generated/pynative", "handwritten", BY_HAND)]
    lines, all_kept = ratio_remarks(results, pairs)
    for name, base, _ in pairs:
        spent, of_base = (statistics.median(results[each].cpu) for each in (name, base))
        ratio = spent / of_base / (EP if base.startswith("single") else 1)
        lines.append(f"- {name}: CPU time of a rank {ratio:.3f} of {base}, which a loaded machine changes less")
    return lines, all_kept


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, EP, make_variants, TITLE, remarks))
