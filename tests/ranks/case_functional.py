"""Functional sharding inside data parallel code, against one card: `ops.shard`."""

import mindspore as ms
import numpy as np
from case_recompute_explained import told
from mindspore import Parameter, Tensor, nn, ops
from support.launch import on_ranks
from truth import once

from mindformers_core import DTensor, jit
from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.ops import shard

ROWS, WIDTH = 8, 16
MESH = init_device_mesh((2, 2), ("dp", "tp"))


class Block(nn.Cell):
    """The seed's: two dense layers."""

    def __init__(self):
        super().__init__()
        self.dense1, self.dense2 = nn.Dense(WIDTH, WIDTH), nn.Dense(WIDTH, WIDTH)

    def construct(self, x):
        return self.dense2(ops.tanh(self.dense1(x)))


class Pair(nn.Cell):
    """Two results, one of which is a scalar."""

    def __init__(self):
        super().__init__()
        self.block, self.scale = Block(), Parameter(ops.ones(WIDTH) * 0.5, name="scale")

    def construct(self, x):
        y = self.block(x) * self.scale
        return y, ops.sum(ops.square(y)) / (ROWS * WIDTH)


class Net(nn.Cell):
    """A part that `parallel` shards, between parts that it leaves."""

    def __init__(self, part, parallel=None):
        super().__init__()
        self.before, self.part, self.after = nn.Dense(WIDTH, WIDTH), part(), nn.Dense(WIDTH, WIDTH)
        self.weight = Parameter(Tensor(np.random.default_rng(5).normal(size=(WIDTH, WIDTH)), ms.float32), name="weight")
        self.take(parallel)

    def take(self, parallel):
        part = self.part
        self.call = (lambda x: part(x)) if parallel is None else parallel(part)

    def construct(self, x):
        result, loss = self.call(self.before(x)), 0
        if isinstance(result, tuple):
            result, loss = result
        return ops.sum(ops.square(self.after(result))) / (ROWS * WIDTH) + loss


class ByFunction(Net):
    """A function with a Parameter as its argument, and a Cell that it closes over."""

    def take(self, parallel):
        block = self.part

        def product(x, weight):
            return ops.matmul(block(x), weight)

        self.call = product if parallel is None else parallel(product)

    def construct(self, x):
        return ops.sum(ops.square(self.after(self.call(self.before(x), self.weight)))) / (ROWS * WIDTH)


EXAMPLES = {
    "the seed's": (Net, Block, lambda part: shard(part, in_strategy=((1, 4),), out_strategy=((4, 1),))),
    "a function": (
        ByFunction, Block,
        lambda part: shard(part, ((2, 2), (2, 1)), dataset_strategy=(None, (1, 1))),
    ),
    "two results": (Net, Pair, lambda part: shard(part, (layout("dp", "tp"),), mesh=MESH)),
    "cut weights": (
        Net, Block,
        lambda part: shard(part, ((4, 1),), parameter_plan={"dense1.weight": (4, 1), "self.dense2.weight": (1, 4)}),
    ),
}  # fmt: skip


def filled(net):
    """The net, with values of a seed for every Parameter."""
    random = np.random.default_rng(7)
    for parameter in net.trainable_params():
        whole = (random.normal(size=getattr(parameter, "global_shape", parameter.shape)) * 0.3).astype(np.float32)
        at = getattr(parameter, "layout", None)
        parameter.set_data(Tensor(whole if at is None else whole[at.local_slices(whole.shape, world().rank)]))
    return net


def samples():
    return np.random.default_rng(9).normal(size=(ROWS, WIDTH)).astype(np.float32)


@once
def alone():
    """Example -> loss and gradients, by name, of one card."""
    found = {}
    for name, (kind, part, _) in EXAMPLES.items():
        net = filled(kind(part))
        loss, gradients = ms.value_and_grad(net, None, net.trainable_params())(Tensor(samples()))
        found[name] = loss.asnumpy(), {p.name: g.asnumpy() for p, g in zip(net.trainable_params(), gradients)}
    return found


@on_ranks(4)
def case_a_part_runs_in_parallel_inside_data_parallel_code():
    check(dict.fromkeys(EXAMPLES, ("PyNative",)))


@on_ranks(nightly=(4,))
def case_other_parts_run_in_parallel_compiled():
    check(dict.fromkeys(EXAMPLES, ("jit",)))


def check(modes):
    """All gradients of an example, in some modes, and the bytes that `explain` tells."""
    expected, here = alone(), world()
    everyone = init_device_mesh((4,), ("dp",))

    def total(tensor):
        part = DTensor.from_local(tensor, Layout.on(everyone, ((),) * tensor.ndim, {"dp": "sum"}))
        return part.redistribute(Layout.on(everyone, ((),) * tensor.ndim)).to_local()

    for name, used in modes.items():
        kind, part, parallel = EXAMPLES[name]
        net = filled(kind(part, parallel))
        weights = net.trainable_params()
        mine = Tensor(samples()[here.rank * 2 : here.rank * 2 + 2])
        step = ms.value_and_grad(net, None, weights)
        for mode in used:
            loss, gradients = (jit(step) if mode == "jit" else step)(mine)
            assert type(loss) is Tensor, name
            if part is not Pair:  # whose scalar is in the loss of every rank
                np.testing.assert_allclose(total(loss).asnumpy(), expected[name][0], 1e-5, err_msg=f"{name}, {mode}")
            for weight, gradient in zip(weights, gradients, strict=True):
                value, at = expected[name][1][weight.name], getattr(weight, "layout", None)
                mine_of = value if at is None else value[at.local_slices(value.shape, here.rank)]
                is_final = at is not None or kind is ByFunction and weight is net.weight
                gradient = gradient if is_final else total(gradient)
                what = f"{name}, {mode}: {weight.name}"
                np.testing.assert_allclose(gradient.asnumpy(), mine_of, 1e-5, 1e-6, err_msg=what)
        arguments = (mine, *[net.weight] * (kind is ByFunction))
        weights = net.call.cell.trainable_params()
        with count_collectives() as sent:
            ms.value_and_grad(lambda *given, net=net: loss_of(net.call(*given)), None, weights)(*arguments)
        assert told(net.call.cell) == dict(sent), (name, told(net.call.cell), dict(sent))


def loss_of(result):
    result = result[0] if isinstance(result, tuple) else result
    return ops.sum(ops.square(result))
