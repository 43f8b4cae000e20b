"""`shard()` on Cells that do unusual things, against one card: gradients of inputs and parameters, for some steps."""

from functools import partial
from itertools import product

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer
from one_card import part_of
from support.launch import on_ranks
from support.small_cells import cell_of
from truth import once

from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.tensor_parallel.clipping import sum_cell

HIDDEN = 8


def weight(*shape):
    return Parameter(initializer(Normal(0.3), shape))


def compare(make, mesh, plan, x_layout, train=None, steps=2, shape=(4, 6, HIDDEN), after=lambda cell: None):
    """Train both for some steps and compare everything.

    Args:
        make: a function that builds the Cell, whose result is summed to the loss.
        mesh: the mesh.
        plan: for `shard()`.
        x_layout: of the input, a float tensor of `shape`.
        train: which parameters to train, by name; default: all.
        steps: number of steps, with an evaluation without gradients before each.
        shape: of the input.
        after: called with the sharded Cell.

    Returns:
        The collectives of the last step, as counted.
    """
    with ms.DeviceCtx("meta"):
        cell = make()
    shard(cell, mesh, plan={"": {"input": x_layout}, **(plan or {})}, seed=3)
    after(cell)
    bound = x_layout.bind(mesh, len(shape))
    x, weights = Tensor(part_of(input_of(shape), bound)), chosen(cell, train)
    optimizer = nn.SGD(weights, 0.002)
    for step, (loss, slope, truth) in enumerate(alone(make, train, steps, shape)):
        assert weights and [weight.name for weight in weights] == list(truth)
        np.testing.assert_allclose(float(ops.sum(cell(x)).full_tensor()), loss, 1e-5, 1e-5)
        with count_collectives() as counts:
            total, (my_slope, gradients) = ms.value_and_grad(lambda x: ops.sum(cell(x)).full_tensor(), 0, weights)(x)
        np.testing.assert_allclose(float(total), loss, 1e-5, 1e-5, err_msg=f"loss in step {step}")
        np.testing.assert_allclose(my_slope.asnumpy(), part_of(slope, bound), 1e-4, 1e-5, err_msg=f"input, step {step}")
        for weight, found in zip(weights, gradients, strict=True):
            expected = part_of(truth[weight.name], weight.layout)
            np.testing.assert_allclose(found.asnumpy(), expected, 1e-4, 2e-5, err_msg=f"{weight.name}, step {step}")
        optimizer(gradients)
    return dict(counts)


@once
def alone(make, train, steps, shape):
    """Of every step on one card: the loss, its gradient of the input, and of the parameters by name."""
    with ms.DeviceCtx("meta"):
        cell = make()
    materialize(cell, seed=3)
    weights, found = chosen(cell, train), []
    optimizer = nn.SGD(weights, 0.002)
    for _ in range(steps):
        loss, (slope, gradients) = ms.value_and_grad(lambda x: ops.sum(cell(x)), 0, weights)(Tensor(input_of(shape)))
        named = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients, strict=True)}
        found.append((float(loss), slope.asnumpy(), named))
        optimizer(gradients)
    return found


def chosen(cell, train):
    """The trainable parameters of these names; all for None."""
    return [parameter for parameter in cell.trainable_params() if train is None or parameter.name in train]


def input_of(shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


class Linear(nn.Cell):
    """`x @ weight`."""

    def __init__(self, rows=HIDDEN, columns=HIDDEN):
        super().__init__()
        self.weight = weight(rows, columns)

    def construct(self, x):
        return ops.matmul(x, self.weight)


class Attention(nn.Cell):
    """Three projections of one input, and one back."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (Linear() for _ in range(4))

    def construct(self, x):
        mixed = ops.tanh(self.q(x)) * ops.tanh(self.k(x)) + self.v(x)
        return self.o(mixed)


COLUMNS, ROWS = {"weight": layout(None, "tp")}, {"weight": layout("tp", None)}
ATTENTION = {**{name: COLUMNS for name in ("q", "k", "v")}, "o": {**ROWS, "output": layout(..., None, None)}}


@on_ranks(2)
def case_projections_of_one_input():
    """One all-reduce forward and one backward; in sequence parallel one gather and one scatter each way."""
    mesh = init_device_mesh((2,), ("tp",))
    counts = compare(Attention, mesh, ATTENTION, layout())
    assert counts == {("all_reduce", ("tp",)): (2, 2 * 4 * 6 * HIDDEN * 4)}, counts
    sequence = {**ATTENTION, "o": {**ROWS, "output": layout(None, "tp", None)}}
    counts = compare(
        Attention,
        mesh,
        sequence | {name: {**COLUMNS, "input": layout(None, None, None)} for name in "qkv"},
        layout(None, "tp"),
    )
    scalar = counts.pop(("all_reduce", ("tp",)))
    assert scalar == (1, 4), scalar  # the test's own sum
    assert counts == {(kind, ("tp",)): (2, 2 * 4 * 6 * HIDDEN * 4 // 2) for kind in ("all_gather", "reduce_scatter")}, (
        counts
    )


class Recomputed(nn.Cell):
    """Two blocks, one or both recomputed in one of MindSpore's ways, and one block's weight used once more outside."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.second = way, Attention(), Attention()
        for block in (self.first, self.second) if way == "cell" else ():
            block.recompute()

    def construct(self, x):
        h = ms.recompute(self.first, x) if self.way == "function" else self.first(x)
        y = self.second(h + x) if self.way == "cell" else ms.recompute(self.second, h + x)
        return ops.matmul(y, self.first.q.weight) + ops.matmul(x, self.second.k.weight)


@on_ranks(2)
def case_recompute(part=0):
    """With weights sharded in ways that need collectives or marks, also where `recompute()` came before `shard()`."""
    mesh = init_device_mesh((2,), ("tp",))
    plan = {f"{block}.{name}": entry for block in ("first", "second") for name, entry in ATTENTION.items()}
    gathered = {f"{block}.{name}": {"weight": layout("tp")} for block in ("first", "second") for name in "qkvo"}
    cut = (plan, layout()), (gathered, layout("tp")), (gathered, layout())
    for way, (used, x_layout) in [*product(("cell", "function"), cut)][part::2]:
        compare(partial(Recomputed, way), mesh, used, x_layout)


@on_ranks(2)
def case_dropout_recomputed():
    """The recomputation drops what the forward pass dropped: the gradient of a linear function of x is its slope."""
    mesh = init_device_mesh((2,), ("tp",))
    parts = {"inner": Linear(), "drop": nn.Dropout(p=0.5)}
    cell = cell_of(lambda self, x: self.drop(self.inner(x)) * self.inner.weight[0], **parts)
    for part in parts.values():
        part.recompute()
    shard(cell, mesh, plan={"": {"input": layout("tp")}}).set_train()
    x = Tensor(np.random.default_rng(0).normal(size=(4, HIDDEN)).astype(np.float32))
    value, gradient = ms.value_and_grad(lambda x: cell(x).sum().full_tensor())(x)
    slope = sum_cell(mesh, ("tp",))((gradient * x).sum())
    np.testing.assert_allclose(slope.asnumpy(), value.asnumpy(), 1e-5)


class Tied(nn.Cell):
    """A table that is looked up in and multiplied with; a frozen scale; a tuple of weights; a Cell used twice."""

    def __init__(self):
        super().__init__()
        self.table = weight(16, HIDDEN)
        self.head = Linear()
        self.head.weight = self.table
        self.scale = Parameter(initializer("ones", (HIDDEN,)), requires_grad=False)
        self.parts = ParameterTuple(
            [Parameter(initializer(Normal(0.5), (HIDDEN, HIDDEN)), name=f"part{n}") for n in range(2)]
        )
        self.twice = Linear()

    def construct(self, x):
        ids = ops.cast(ops.abs(x[..., 0]) * 5, ms.int32)
        h = ops.gather(self.table, ids, 0) * self.scale + x
        for part in self.parts:
            h = ops.tanh(ops.matmul(h, part))
        h = self.twice(self.twice(h))
        return ops.softmax(ops.matmul(h, ops.swapaxes(self.table, 0, 1)), -1)[..., 3]


@on_ranks(4, nightly=(2,))
def case_tied_frozen_and_many():
    """See `Tied`; the vocabulary sharded or not, the batch sharded or not."""
    mesh = init_device_mesh((2,), ("tp",)) if world().size == 2 else init_device_mesh((2, 2), ("dp", "tp"))
    batch = "dp" if "dp" in mesh.axis_names else None
    for table in (layout("tp"), layout(None, "tp"), layout())[: 3 if batch is None else 1]:
        plan = {
            "": {
                "input": layout(batch),
                "weight": {"table": table, "part0": layout(None, "tp"), "part1": layout("tp")},
            },
            "twice": COLUMNS,
        }
        counts = compare(Tied, mesh, plan, layout(batch))
        assert counts
    compare(Tied, mesh, {"twice": ROWS}, layout(batch), train=("twice.weight",))
    if batch is None:
        compare(Tied, mesh, {"twice": ROWS}, layout(batch), after=lambda cell: setattr(cell.parts[0], "unused", None))


@on_ranks(nightly=(4,))
def case_manual_split():
    """Of each column of ids its own part of a table, by MindSpore's attribute; in PyNative and compiled.

    Daily, on simulated ranks: `test_padding`.
    """
    sizes = 10, 20, 30, 4
    ids = Tensor([[3, 29, 30, 60], [9, 10, 59, 63], [3, 11, 31, 63]], ms.int32)

    def construct(self, ids):
        return ops.sum(ops.square(self.gather(self.table, ids, 0) + self.bias))

    def net():
        gather = ops.Gather().add_prim_attr("manual_split", sizes)
        with ms.DeviceCtx("meta"):
            return cell_of(construct, table=weight(64, 2), bias=weight(2), gather=gather)

    whole = net()
    materialize(whole, 3)
    loss, (of_table, of_bias) = ms.value_and_grad(whole, None, whole.trainable_params())(ids)
    plan = {"": {"weight": {"table": layout("tp", pad=sizes)}, "output": layout()}}
    cell, rank = shard(net(), init_device_mesh((4,), ("tp",)), plan=plan, seed=3), world().rank
    gradient = ms.value_and_grad(cell, None, cell.trainable_params())
    mine = of_table.asnumpy()[sum(sizes[:rank]) :][: sizes[rank]]
    for function in (gradient, jit(gradient)):
        found, (table, bias) = function(ids)
        local = found.to_local() if hasattr(found, "to_local") else found
        np.testing.assert_allclose(float(local), float(loss), 1e-5)
        np.testing.assert_allclose(table.asnumpy(), np.pad(mine, ((0, 30 - len(mine)), (0, 0))), 1e-5)
        np.testing.assert_allclose(bias.asnumpy(), of_bias.asnumpy(), 1e-5)


@on_ranks(4)
def case_weights_that_their_input_contradicts(each=6):
    """ZeRO-3 (weights sharded over the batch's own axis), and weights cut like nothing else, or on both axes."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    weights = [("dp", None), (None, "dp"), (("tp", "dp"), None), ("tp", "dp"), ("dp", "tp"), (None, "dp_tp")]
    for given, entries in [*product(weights, [("dp",), (None, "tp"), ("tp", "dp")])][::each]:
        plan = {name: {"weight": layout(*given)} for name in "qkvo"}
        compare(Attention, mesh, plan, layout(*entries), steps=1)
    zero = {name: {"weight": layout("dp", None)} for name in "qkvo"}
    counts = compare(Attention, mesh, zero, layout("dp"))
    assert counts.pop(("all_reduce", ("dp",))) == (1, 4)  # the test's own sum
    bytes_of_one = HIDDEN * HIDDEN * 4 // 2
    assert counts == {(kind, ("dp",)): (4, 4 * bytes_of_one) for kind in ("all_gather", "reduce_scatter")}, counts


@on_ranks(4)
def case_inputs_that_are_declared(each=4):
    """Inputs moved at the boundary to all sorts of layouts, and results, too."""
    mesh = init_device_mesh((2, 2, 1), ("dp", "tp", "cp"))
    firsts = layout("dp"), layout("dp", "cp", "tp"), layout("tp", None, "dp")
    seconds = layout("dp", None, None), layout(None, "tp", None), layout(..., "tp")
    for first, second in [*product(firsts, seconds)][::each]:
        plan = {
            **ATTENTION,
            "q": {**COLUMNS, "input": first, "output": second},
            "k": {**ROWS, "output": first},
            "o": {**ROWS, "input": second},
        }
        compare(Attention, mesh, plan, layout("dp", "cp"), steps=1, shape=(4, 4, HIDDEN))


@on_ranks(nightly=(4,))
def case_all_weights_and_inputs_that_contradict():
    """By day some; random ones, on simulated ranks, in `test_propagation_random`."""
    case_weights_that_their_input_contradicts(1)
    case_inputs_that_are_declared(1)


def pieces(split):
    """Of pieces of a tensor all but the first, whose gradient comes from an all_gather as a part of a tensor."""
    slope = Tensor(np.arange(8, dtype=np.float32))
    return cell_of(lambda self, x: ops.square(ops.flip(split(x)[1], (0,)) * slope).sum())


@on_ranks(2)
def case_gradients_of_splits(compiled=("unequal lengths",)):
    """Each rank's own, whatever the gradient is a view of: MindSpore's CPU gradient of these splits gives rank 0's."""
    mesh, x = init_device_mesh((2,), ("dp",)), np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    mine = part_of(x, layout("dp").bind(mesh, 3))
    for name, split, first in (
        ("lengths", lambda x: mint.split(x, (1, 5), -2), 1),
        ("equal lengths", lambda x: mint.split(x, 3, 1), 3),
        ("unequal lengths", lambda x: mint.split(x, 4, 1), 4),
        ("method", lambda x: x.split((2, 4), 1), 2),
    ):
        last = first * 2 if name == "equal lengths" else 6
        expected = 2 * mine * np.arange(8) ** 2 * ((np.arange(6) >= first) & (np.arange(6) < last))[:, None]
        for run in ("generated", "eager", *["compiled"] * (name in compiled)):
            mode = "eager" if run == "eager" else "generated"
            cell = shard(pieces(split), mesh, plan={"": {"input": layout("dp"), "output": layout()}}, mode=mode)
            gradient = ms.grad(cell)
            found = (jit(gradient) if run == "compiled" else gradient)(Tensor(mine))
            np.testing.assert_allclose(found.asnumpy(), expected, 1e-5, 1e-5, err_msg=f"{name}, {run}")


@on_ranks(nightly=(2,))
def case_more_on_two_ranks():
    """Other layouts of what is recomputed; all splits compiled."""
    case_recompute(1)
    case_gradients_of_splits(("lengths", "equal lengths", "method"))


@on_ranks(2)
def case_products_of_one_row():
    """Of a tensor that has one row locally, MindSpore's gradient of a matmul has a dim too many."""
    mesh = init_device_mesh((2,), ("tp",))
    for x_layout in (layout(None, None, "tp"), layout(None, "tp")):
        compare(Attention, mesh, {"o": {"output": layout(None, "tp")}}, x_layout, steps=1, shape=(1, 2, HIDDEN))
