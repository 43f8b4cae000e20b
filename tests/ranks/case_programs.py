"""Programs of sharded Cells: signatures, eager Cells among generated ones, hooks, recomputation, `jit`."""

import sys
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.launch import on_ranks
from support.small_cells import cell_of

from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, explain, jit, prepare, programs, save_plan, shard

COLUMNS, ROWS = layout(None, "tp"), layout("tp", None)


class Linear(nn.Cell):
    """A product with a matrix of fixed values."""

    def __init__(self, inputs, outputs, seed):
        super().__init__()
        values = np.random.default_rng(seed).normal(size=(inputs, outputs)) / inputs**0.5
        self.weight = Parameter(Tensor(values.astype(np.float32)), name=f"weight{seed}")

    def construct(self, x):
        return ops.matmul(x, self.weight)


class Block(nn.Cell):
    """A feed-forward block with a residual connection."""

    def __init__(self, seed=0, size=8):
        super().__init__()
        self.up, self.down = Linear(size, 2 * size, seed), Linear(2 * size, size, seed + 1)
        self.gain = 1.0

    def construct(self, x, scale=1.0):
        return x + self.down(ops.gelu(self.up(x))) * (scale * self.gain)


class Branching(nn.Cell):
    """A Cell whose Python code needs a value."""

    def __init__(self):
        super().__init__()
        self.block = Block(4)

    def construct(self, x):
        if float(ops.abs(x).sum()) > 1.0:
            return self.block(x) * 2.0
        return self.block(x)


class Net(nn.Cell):
    """Blocks around one in the middle that may be another Cell."""

    def __init__(self, middle=None):
        super().__init__()
        self.first, self.middle, self.last = Block(0), middle or Block(4), Block(8)

    def construct(self, x, scale=1.0):
        return ops.square(self.last(self.middle(self.first(x, scale)))).mean()


PLAN = {"**.up": {"weight": COLUMNS}, "**.down": {"weight": ROWS}}


def numbers(rows=4, seed=0):
    """An input."""
    return Tensor(np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32))


def both(make, run=None, plan=PLAN, inputs=None, **options):
    """Loss and gradients of one card and of the sharded Cell agree; gives the sharded Cell."""
    mesh = init_device_mesh((world().size,), ("tp",))
    single, parallel = make(), shard(make(), mesh, plan=plan, **options)
    inputs = inputs or (numbers(),)
    run = run or (lambda cell: cell)
    loss, gradients = ms.value_and_grad(single, None, single.trainable_params())(*inputs)
    mine, parts = run(ms.value_and_grad(parallel, None, parallel.trainable_params()))(*inputs)
    compare(loss, gradients, mine, parts, parallel)
    return parallel


def compare(loss, gradients, mine, parts, parallel):
    """One card's loss and gradients against this rank's parts."""
    np.testing.assert_allclose(mine.asnumpy(), loss.asnumpy(), 1e-5, 1e-6)
    for whole, part, parameter in zip(gradients, parts, parallel.trainable_params(), strict=True):
        slices = parameter.layout.local_slices(parameter.global_shape, world().rank)
        np.testing.assert_allclose(part.asnumpy(), whole.asnumpy()[slices], 1e-5, 1e-6, err_msg=parameter.name)


@on_ranks(2)
def case_a_cell_with_branches_runs_eagerly():
    """It and what is around it run operator by operator; its children and siblings keep their programs."""
    mesh = init_device_mesh((2,), ("tp",))
    net = shard(Net(Branching()), mesh, plan=PLAN)
    with pytest.raises(ValueError, match=r"Cell 'middle' \(Branching\), .*case_programs.py:\d+: .*cell.eager\(\)"):
        net(numbers())
    assert net.middle.eager() is net.middle
    single = Net(Branching())
    for scale in (1.0, 1e-6):
        x = numbers() * scale
        loss, gradients = ms.value_and_grad(single, None, single.trainable_params())(x)
        mine, parts = ms.value_and_grad(net, None, net.trainable_params())(x)
        compare(loss, gradients, mine, parts, net)
    assert sorted(program.path for program in programs(net)) == ["first", "last", "middle.block"]
    with pytest.raises(RuntimeError, match=r"the root Cell \(Net\) runs operator by operator.*case_programs.py:\d+"):
        jit(net)(numbers())
    both(Net, mode="eager")


@on_ranks(2)
def case_jit_asks_for_a_program():
    """Plain `ms.jit` compiles what there is a program for; `jit` makes what is missing; a second shape has its own."""
    mesh = init_device_mesh((2,), ("tp",))
    net, single = shard(Net(), mesh, plan=PLAN), Net()
    with pytest.raises(RuntimeError, match=r"has no program yet for inputs \(float32\[4, 8\]\).*mindformers_core.jit"):
        ms.jit(net)(numbers())
    made = prepare(net, numbers())
    np.testing.assert_allclose(ms.jit(net)(numbers()).asnumpy(), single(numbers()).asnumpy(), 1e-5)
    assert programs(net) == [made] and type(ms.jit(net)(numbers())) is Tensor and type(net(numbers())) is DTensor
    weights = net.trainable_params()
    gradient_of = ms.value_and_grad(net, None, weights)
    optimizer = nn.Momentum(weights, 0.1, 0.9)

    @jit
    def train_step(x):
        loss, gradients = gradient_of(x)
        optimizer(gradients)
        return loss

    other = nn.Momentum(single.trainable_params(), 0.1, 0.9)
    for rows in (4, 6, 4):
        x = numbers(rows, rows)
        loss, gradients = ms.value_and_grad(single, None, single.trainable_params())(x)
        np.testing.assert_allclose(train_step(x).asnumpy(), loss.asnumpy(), 1e-5, 1e-6)
        other(gradients)
    assert len(programs(net)) == 2
    with pytest.raises(TypeError, match="got a DTensor"):
        train_step(net(numbers()))
    with pytest.raises(ValueError, match="capture_mode"):
        jit(net, capture_mode="bytecode")


@on_ranks(2)
def case_signatures():
    """What a program depends on: shapes, dtypes, layouts, Python values, the training flag; nothing else."""
    mesh = init_device_mesh((2,), ("tp",))
    net, single = shard(Net(), mesh, plan=PLAN), Net()
    for scale in (1.0, 0.5, 1.0, 0.5):
        np.testing.assert_allclose(net(numbers(), scale).asnumpy(), single(numbers(), scale).asnumpy(), 1e-5)
        np.testing.assert_allclose(net(numbers(), scale=scale).asnumpy(), single(numbers(), scale).asnumpy(), 1e-5)
    assert len(programs(net)) == 4
    net(DTensor.from_local(numbers(2), layout("tp", None), mesh))
    assert len(programs(net)) == 5
    net.last.set_train()
    net(numbers())
    assert len(programs(net)) == 6
    net.last.set_train(False)
    net(numbers(), 1.0)
    assert len(programs(net)) == 6
    for cell in (net, single):
        cell.middle.gain = 0.25
    np.testing.assert_allclose(net(numbers()).asnumpy(), single(numbers()).asnumpy(), 1e-5)
    assert len(programs(net)) == 7, "a number in a Cell is another one; those of the number before stay"


@on_ranks(2)
def case_a_saved_plan_is_followed():
    """Written by one Cell, used by another in the place of a propagation."""
    mesh = init_device_mesh((2,), ("tp",))
    first, second, single = shard(Net(), mesh, plan=PLAN), shard(Net(), mesh, plan=PLAN), Net()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan_{world().rank}.json"
        made = prepare(first, numbers())
        save_plan(made.plan, path)
        followed = prepare(second, numbers(), saved_plan=path)
        with pytest.raises(ValueError, match="plan"):
            prepare(second, numbers(6), saved_plan=path)
    assert programs(second) == [followed] and explain(second) == explain(first)
    np.testing.assert_allclose(second(numbers()).asnumpy(), single(numbers()).asnumpy(), 1e-5)
    assert programs(second) == [followed]


@on_ranks(2)
def case_the_tree_stays_the_users():
    """Identical Cells share a function; hooks run, recomputation replays it, in both modes."""
    seen = []

    def recomputed():
        net = Net()
        net.first.recompute()
        return net

    def hooked():
        net = recomputed()
        net.middle.register_forward_hook(lambda cell, inputs, output: seen.append(tuple(output.shape)))
        return net

    net = both(hooked)
    assert seen == [(4, 8), (4, 8)], "one card's, and the program's"
    assert type(net.middle) is type(net.last), "called alike, they have one class"
    assert isinstance(net, Net) and [p.name for p in net.trainable_params()][0] == "first.up.weight"
    both(recomputed, jit_gradient)
    net = shard(Net(), init_device_mesh((2,), ("tp",)), plan=PLAN)
    net.last.recompute()
    x, single = numbers(), Net()
    expected = ms.value_and_grad(single, None, single.trainable_params())(x)
    compare(*expected, *ms.value_and_grad(net, None, net.trainable_params())(x), net)


def jit_gradient(gradient_of):
    """A function of gradients, compiled."""

    def step(*inputs):
        return gradient_of(*inputs)

    return jit(step)


def looking():
    """Cells whose weights another one looks up; it depends on its flag and on a number of its own, too."""

    def scaled(self, x, which=0):
        weight = self.cells_elsewhere()[which].weight
        return ops.matmul(x, weight) * (self.factor if self.training else 2.0 * self.factor)

    def looking(self, x, which=None):
        if which is None:
            return (self.scaled(x, 0) + self.scaled(x, 1)).sum()
        return self.scaled(x, which).sum()

    one, other = Linear(8, 8, 1), Linear(8, 8, 2)
    inner = cell_of(scaled, cells_elsewhere=lambda: (one, other), factor=1.0)
    return cell_of(looking, one=one, other=other, scaled=inner)


@on_ranks(2)
def case_nothing_stale_is_reused():
    """Weights from elsewhere, flags and numbers that change, in PyNative and in functions compiled before."""
    mesh = init_device_mesh((2,), ("tp",))
    net, single = shard(looking(), mesh, plan={"one": {"weight": COLUMNS}, "other": {"weight": ROWS}}), looking()

    def call(x, which):
        return net(x, which)

    compiled = jit(call)

    def check(which):
        expected = single(numbers(), which).asnumpy()
        np.testing.assert_allclose(net(numbers(), which).asnumpy(), expected, 1e-4, 1e-4)
        np.testing.assert_allclose(compiled(numbers(), which).asnumpy(), expected, 1e-4, 1e-4)

    for which in (0, 1, None, 0):
        check(which)
    for cell in (net, single):
        cell.set_train()
    check(1)
    for cell in (net, single):
        cell.scaled.factor = 3.0
    check(1)
    for cell in (net, single):
        cell.scaled.training = False
    check(1)
    with pytest.raises(TypeError, match=r"the root Cell \(looking\): a sharded Cell takes tensors, numbers"):
        net(numbers(), np.ones(1))
    with pytest.raises(ValueError, match=r"Cell 'one' \(Linear\) has come since shard.* has no layout"):
        net.one = Linear(8, 8, 3)
    with pytest.raises(TypeError, match="whose value isn't known when it is compiled"):
        compiled(numbers(), ms.mutable(1))


@on_ranks(2)
def case_a_step_does_no_layout_arithmetic():
    """A profile of a step, forward and backward: nothing that plans, dispatches or knows of layouts runs."""
    net = shard(Net(), init_device_mesh((2,), ("tp",)), plan=PLAN)
    gradient_of, called = ms.value_and_grad(net, None, net.trainable_params()), set()
    gradient_of(numbers())

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and "mindformers_core/" in name and frame.f_code.co_name != "describe":  # the program's key
            called.add(name.rpartition("mindformers_core/")[2].removesuffix(".py"))

    sys.setprofile(note)
    gradient_of(numbers())
    sys.setprofile(None)
    arithmetic = ("layout", "mesh", "redistribution/", "operators/", "propagation/", "analysis/", "generation/")
    arithmetic += ("dtensor/dispatch", "algorithms/redistribute", "sharding/boundary")
    assert called and not [name for name in called if name.startswith(arithmetic)], called
