"""`shard()` and the eager engine in one process, rank 0 of a dry run on a 2x2 mesh: what Cells see, and errors."""

from collections import namedtuple
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from support.captured_models import Function
from support.small_cells import Linear, Net, cell_of

from mindformers_core import tensor_parallel
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, custom_operator, distribute_tensor

pytestmark = pytest.mark.usefixtures("rank_0_of_4")
MESH = init_device_mesh((2, 2), ("dp", "tp"))
shard = partial(tensor_parallel.shard, mode="eager")
X = Tensor(np.ones((4, 8), np.float32))
COLUMNS, ROWS = layout(None, "tp"), layout("tp", None)
Pair = namedtuple("Pair", ["first", "second"])


def test_cells_see_global_tensors_and_optimizers_local_ones():
    net = Net((None, None, {"weight": COLUMNS, "bias": layout("tp")}), (None, None, ROWS))
    cells, names = dict(net.cells_and_names()), [parameter.name for parameter in net.get_parameters()]
    assert shard(net, MESH, plan={"": {"input": layout("dp")}}) is net
    assert dict(net.cells_and_names()) == cells and [parameter.name for parameter in net.get_parameters()] == names
    assert (
        isinstance(net.layers, nn.CellList)
        and isinstance(net.layers[0], Linear)
        and type(net.layers[0]).__name__ == "Linear"
    )
    result = net(X)
    first = net.layers[0]
    assert isinstance(first.seen["weight"], DTensor) and first.seen["weight"].shape == (8, 8)
    assert first.seen["x"].shape == (8, 8) and result.shape == (8, 8) and not result.layout.partial
    assert [parameter.shape for parameter in net.trainable_params()] == [(8, 4), (4,), (4, 8), (8,)]
    assert all(
        isinstance(parameter, Parameter) and not isinstance(parameter, DTensor) for parameter in net.trainable_params()
    )
    weight = net.layers[0].trainable_params()[0]
    assert weight.global_shape == (8, 8) and weight.layout == COLUMNS.bind(MESH)
    assert isinstance(first.weight, DTensor) and first.weight.to_local() is weight, "outside of a call, too"


def test_shard_twice():
    net = shard(Net(), MESH)
    for again in (net, net.layers[0], nn.SequentialCell([net])):
        with pytest.raises(ValueError, match="is sharded already: call shard.. once"):
            shard(again, MESH)
    with pytest.raises(TypeError, match="takes a Cell"):
        shard(X, MESH)
    with pytest.raises(TypeError, match="takes a DeviceMesh"):
        shard(Net(), (2, 2))


def test_shared_and_frozen_parameters():
    net = Net()
    net.rest[0].weight = net.layers[0].weight
    net.layers[0].bias.requires_grad = False
    shard(net, MESH, plan={"layers.0": {"weight": {"weight": COLUMNS, "bias": layout("tp")}}})
    net(X)
    assert net.layers[0].seen["weight"] is net.rest[0].seen["weight"], "one view, so that marks and gathers are shared"
    assert net.rest[0].seen["weight"].layout == COLUMNS.bind(MESH)
    assert not net.layers[0]._params["bias"].requires_grad and net.layers[0]._params["bias"].shape == (4,)
    assert len(net.trainable_params()) == 2
    other = Net()
    other.rest[0].weight = other.layers[0].weight
    with pytest.raises(
        ValueError, match=r"parameter 'weight' of Cell 'rest.0'.*is shared, and elsewhere declared as \[-, tp\]"
    ):
        shard(other, MESH, plan={"layers.0": {"weight": COLUMNS}, "rest.0": {"weight": ROWS}})


def test_parameters_in_tuples_and_lists():
    def construct(self, x):
        self.seen = [*self.parts, *self.all]
        return ops.matmul(ops.matmul(x, self.parts[0]), self.all[0])

    *parts, weight = (Parameter(Tensor(np.ones((8, 8), np.float32)), name=n) for n in ("part0", "part1", "weight"))
    cell = cell_of(construct, parts=ParameterTuple(parts), weight=weight, all=[weight, parts[0]])
    shard(cell, MESH, plan={"": {"weight": {"part0": COLUMNS, "weight": ROWS}}})
    cell(X)
    assert all(isinstance(entry, DTensor) for entry in cell.seen)
    assert [entry.layout.dims for entry in cell.seen] == [((), ("tp",)), ((), ()), (("tp",), ()), ((), ("tp",))]
    assert cell.seen[0].to_local() is cell._params["part0"] and cell.seen[2].to_local() is cell._params["weight"]


def test_placed_parameters_keep_their_identity_where_they_are_whole():
    net = Net()
    before = {name: id(parameter) for name, parameter in net.parameters_and_names()}
    shard(net, MESH, plan={"layers.0": {"weight": COLUMNS}})
    after = {name: id(parameter) for name, parameter in net.parameters_and_names()}
    assert [name for name in before if before[name] != after[name]] == ["layers.0.weight"]


class Shapes(nn.Cell):
    """Takes and returns containers."""

    def construct(self, pair, named, flag=True, *, scale=1):
        assert all(isinstance(entry, DTensor) for entry in (*pair, *named.values())) and flag is True
        self.pair = pair
        return {"sum": pair[0] + named["a"] * scale, "pair": pair}


def test_containers_and_keyword_arguments():
    cell = shard(
        Shapes(),
        MESH,
        plan={
            "": {"input": {"pair": layout("dp"), "named": layout(None, "tp")}, "output": {"sum": layout("dp", "tp")}}
        },
    )
    result = cell(Pair(X, X), named={"a": Tensor(np.ones((8, 4), np.float32))}, scale=2)
    assert isinstance(result["pair"], Pair) and isinstance(cell.pair, Pair)
    assert result["sum"].layout == layout("dp", "tp").bind(MESH) and result["sum"].shape == (8, 8)
    assert result["pair"].first.layout == layout("dp", None).bind(MESH)
    for make, kind in ((lambda x: (x, x), tuple), (lambda x: [x, None, 3], list), (lambda x: Pair(x, x), Pair)):
        got = shard(Function(make), MESH, plan={"": {"output": (layout("dp"),)}})(X)
        assert isinstance(got, kind) and got[0].layout == layout("dp", None).bind(MESH) and got[0].shape == (4, 8)


@pytest.mark.parametrize(
    ("make", "output", "message"),
    [
        (lambda x: (x, x), (None, None, layout()),
            r"the root Cell \(Function\) declares a layout for output 2, but its outputs are 0, 1"),
        (lambda x: {"logits": x}, {"logit": layout()},
            "output 'logit', but its outputs are 'logits'.*did you mean 'logits'"),
        (lambda x: (x, 3), (None, layout()),
            r"output 1 of the root Cell \(Function\) has a declared layout.*is 3, which is no tensor"),
        (lambda x: x, layout("dp", "tp", None),
            r"output 0 of the root Cell \(Function\): layout .* it has 3 entries.*2 dims"),
        (lambda x: x[:3], layout("dp"), r"output 0 of the root Cell \(Function\).*shape \(3, 8\): dim 0 has size 3"),
        (custom_operator("Turned", ops.tanh), None, r"the root Cell \(Function\), \S+:\d+: operator '\w+' has no rule"),
        (lambda x: x @ x, None, r"in the root Cell \(Function\), \S+py:\d+: operator MatMul"),
        (lambda x: x[9], None, r"in the root Cell \(Function\), \S+py:\d+: index 9 is out of range"),
        (lambda x: float(x.redistribute(layout("dp")).sum()), None,
            r"in the root Cell \(Function\), \S+py:\d+: float\(\) of a DTensor"),
    ],
)  # fmt: skip
def test_errors_name_the_cell(make, output, message):
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        shard(Function(make), MESH, plan={"": {"output": output}})(X)


def test_errors_name_the_innermost_cell_once():
    net = Net()
    shard(net, MESH, plan={"rest.0": {"input": layout("dp", None, "tp")}})
    with pytest.raises(ValueError) as caught:
        net(X)
    assert str(caught.value).count("Cell '") == 1 and "input 'x' of Cell 'rest.0' (Linear)" in str(caught.value)


class OwnError(ValueError):
    """Made from two things."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_views_last_for_one_call():
    """Also where a call failed: the next one begins anew."""
    failing = []

    def maybe(x):
        if failing:
            raise ValueError("on purpose")
        return x

    net = nn.SequentialCell([Linear(), Function(maybe)])
    shard(net, MESH, plan={"0": {"weight": COLUMNS}})
    net(X)
    first = net[0].seen["weight"]
    failing.append(True)
    with pytest.raises(ValueError, match="on purpose"):
        net(X)
    failing.clear()
    net(X)
    assert net[0].seen["weight"] is not first and net[0].weight is not net[0].weight


def test_a_root_takes_dtensors():
    net = shard(Net(), MESH, plan={"": {"input": layout("dp")}})
    x = distribute_tensor(Tensor(np.ones((8, 8), np.float32)), layout(None, "tp"), MESH)
    assert net(x).shape == (8, 8) and net.layers[0].seen["x"].layout == layout("dp", None).bind(MESH)
    with pytest.raises(ValueError, match=r"in the root Cell \(Net\).*is on another"):
        net(distribute_tensor(X, layout(), init_device_mesh((4,), ("tp",))))


def test_an_input_that_was_forgotten_where_others_are_declared():
    class Loss(nn.Cell):
        def construct(self, x, label):
            return nn.CrossEntropyLoss()(x, label)

    net = tensor_parallel.shard(Loss(), MESH, plan={"": {"input": {"x": layout("dp")}}})
    told = r"'x' \(4, 8\), which is \(8, 8\) in all, \[dp, -\], but with 'label' \(4,\) of no declared layout, which is"
    with pytest.raises(ValueError, match=told):
        net(X, Tensor(np.zeros(4, np.int32)))


def test_a_cell_under_two_names():
    cell = nn.SequentialCell([Linear(), nn.ReLU()])
    cell.append(cell[0])
    shard(cell, MESH, plan={"0": {"weight": COLUMNS}})
    assert cell(X).shape == (4, 8) and len(cell.trainable_params()) == 2


def test_hooks_and_bprop_of_a_cell():
    """A Cell with a gradient of its own, and MindSpore's hooks on Cells."""

    class Tripled(nn.Cell):
        def construct(self, x):
            return x * 2

        def bprop(self, x, out, dout):
            return (dout * 3,)

    cell = Tripled()
    called = []
    last = nn.ReLU()
    last.register_forward_hook(lambda cell, inputs, output: called.append(type(output)))
    net = shard(nn.SequentialCell([cell, last]), MESH)
    gradient = ms.grad(lambda x: net(x).sum().full_tensor())(X)
    np.testing.assert_array_equal(gradient.asnumpy(), 3 * np.ones((4, 8)))
    assert called == [DTensor]
