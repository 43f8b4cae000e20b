"""What can't be captured is an error that says where and what to do, and leaves everything as it was."""

import re
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, dtype as mstype, mint, nn, ops
from support.captured_models import Function, assert_unchanged, snapshot

from mindformers_core import shard, verify
from mindformers_core.capture.capture import capture
from mindformers_core.capture.traced import CaptureError
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.graph import OperatorNode
from mindformers_core.tensor_parallel import distribute_tensor, local_map

HERE = Path(__file__).name
X = tensor_meta((2, 4), "float32")


def only_operators(graph):
    return [node.operator for node in graph.nodes if isinstance(node, OperatorNode)]


NEEDS_VALUES = {
    "if": lambda x: x if x.sum() > 0 else -x,
    "not": lambda x: not x.max() > 0,
    "and": lambda x: x.any() and x,
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x.mean()),
    "range": lambda x: range(x[0, 0].astype(mstype.int32)),
    "item": lambda x: x.sum().item(),
    "asnumpy": lambda x: x.asnumpy(),
    "numpy": lambda x: np.asarray(x),
    "tolist": lambda x: x.tolist(),
    "in": lambda x: 3 in x,
}


@pytest.mark.parametrize("name", NEEDS_VALUES)
def test_values_are_asked_for(name):
    function = NEEDS_VALUES[name]
    cell = nn.SequentialCell(nn.ReLU(), Function(function))
    before = snapshot(cell)
    with pytest.raises(CaptureError) as caught:
        capture(cell, X)
    line = function.__code__.co_firstlineno
    text = str(caught.value)
    assert f"Cell '1' (Function), {__file__}:{line}: " in text
    assert "needs the values of a tensor" in text and "after shard()" in text and "ops.where" in text
    assert_unchanged(cell, before)


def test_printing_and_iterating_need_no_values(capsys):
    def function(x):
        print(x)
        return [row + place for place, row in enumerate(x)], len(x), x.size, f"{x.dtype}"

    graph = capture(Function(function), X)
    assert "float32[2, 4]" in capsys.readouterr().out
    rows, *facts = graph.result
    assert [row.shape for row in rows] == [(4,), (4,)] and facts == [2, 8, "Float32"]


def assign(x):
    x[0] = 1
    return x


def stray(x):
    return x * STRAY


ON_THE_HOST = ops.MatMul().add_prim_attr("primitive_target", "CPU")
STRAY = Parameter(Tensor(np.ones(4, np.float32)), name="stray")
WRONG = {
    "in place": (
        lambda x: x.add_(1),
        r"changed in place that is an argument of the root Cell, float32\[2, 4\], or a view",
    ),
    "by index": (assign, "an argument of the root Cell, .* change a copy"),
    "stray": (stray, r"parameter 'stray' of shape \(4,\) belongs to no Cell of the tree"),
    "shape": (lambda x: ops.matmul(x, x), r"MatMulExt\(float32\[2, 4\], .*\) can't be run on shapes alone: .* 4 and 2"),
    "target": (lambda x: ON_THE_HOST(x, x), "'MatMul' has primitive_target='CPU': .* leave the attribute out"),
    "by hand": (lambda x: x.redistribute(layout("tp")), r"redistribute\(\) is parallel code .* cell.eager\(\)"),
    "locally": (
        lambda x: local_map(ops.abs, layout("tp"), layout("tp"))(x),
        r"local_map\(abs\) is parallel code .* cell.eager\(\)",
    ),
    "dynamic": (lambda x: ops.nonzero(x), "number of results of operator .NonZero. depends on the values"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_cell_and_line(name):
    function, expected = WRONG[name]
    cell = nn.SequentialCell(Function(function))
    before = snapshot(cell)
    with pytest.raises(CaptureError, match=expected) as caught:
        capture(cell, X)
    assert re.search(rf"in Cell '0' \(Function\), .*{HERE}:\d+: ", str(caught.value))
    assert_unchanged(cell, before)
    assert only_operators(capture(Function(lambda x: ops.matmul(x, x.T)), X)) == ["Transpose", "MatMulExt"]


def test_other_errors_pass_and_leave_the_cell_alone():
    def function(x):
        raise KeyError("mine")

    cell = nn.SequentialCell(nn.Dense(4, 4), Function(function))
    before = snapshot(cell)
    with pytest.raises(KeyError, match="mine"):
        capture(cell, X)
    assert_unchanged(cell, before)
    x = Tensor(np.ones((2, 4), np.float32))
    assert ops.add(x, x).asnumpy().sum() == 16 and cell[0](x).shape == (2, 4)
    with pytest.raises(TypeError, match=r"the root Cell \(Dense\), construct\(\): too many positional arguments"):
        capture(nn.Dense(4, 4), X, X)
    with pytest.raises(TypeError, match=r"takes a Cell, .* not 3"):
        capture(3, X)


def squared(x):
    return x * x


BEYOND = {
    "vmap": (lambda x: ops.vmap(squared)(x), "a function is differentiated or vectorised"),
    "grad": (lambda x: ms.grad(squared)(x), "a function is differentiated or vectorised.* from outside"),
    "value_and_grad": (lambda x: ms.value_and_grad(squared)(x), "a function is differentiated or vectorised"),
    "GradOperation": (lambda x: ops.GradOperation()(squared)(x), "a function is differentiated or vectorised"),
    "vjp": (lambda x: ms.vjp(squared, x)[1](x), "a function is differentiated or vectorised"),
    "Tensor": (lambda x: Tensor(x), r"Tensor\(x\), where x or ops.stop_gradient\(x\) would do, needs the values"),
    "tensor": (lambda x: ms.tensor(x), r"Tensor\(x\), where x or .* needs the values"),
    "einsum": (lambda x: ops.einsum("ij,ij->ij", x, x[:1]), r"Einsum\(.*one size in all operands.* ops.broadcast_to"),
    "kernel": (lambda x: x + mint.roll(ops.ones(4), 1), "MindSpore has no kernel of operator 'Roll' for this device"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_a_capture(name):
    function, expected = BEYOND[name]
    with pytest.raises(CaptureError) as caught:
        capture(nn.SequentialCell(Function(function)), X)
    line = function.__code__.co_firstlineno
    assert re.match(rf"in Cell '0' \(Function\), {__file__}:{line}: .*{expected}", str(caught.value))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["vmap", "einsum", "kernel"])
def test_operator_by_operator(name):
    function, _ = BEYOND[name]
    expected = "For 'Einsum', the same label" if name == "einsum" else BEYOND[name][1]
    net = shard(nn.SequentialCell(Function(function)), init_device_mesh((1,), ("dp",)), mode="eager")
    with pytest.raises((ValueError, RuntimeError)) as caught:
        net(Tensor(np.ones((2, 4), np.float32)))
    line = function.__code__.co_firstlineno
    assert re.match(rf"in Cell '0' \(Function\), {__file__}:{line}: {expected}", str(caught.value))


@pytest.mark.usefixtures("rank_0_of_4")
def test_a_gradient_inside_of_construct_is_of_whole_tensors():
    """Operator by operator: it would be that of this rank's part, and a plain tensor."""
    cell, mesh = Function(lambda x: ms.grad(squared)(x)), DeviceMesh((2, 2), ("dp", "tp"))
    x = Tensor(np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(shard(cell, mesh, mode="eager")(x).asnumpy(), np.full((2, 4), 2))
    outside = ms.grad(squared)(distribute_tensor(x, layout("dp"), mesh))
    assert outside.shape == (1, 4)
    with pytest.raises(ValueError, match=r"in the root Cell \(Function\), .* a gradient inside of construct, .* part"):
        shard(Function(lambda x: ms.grad(squared)(x.redistribute(layout("dp")))), mesh, mode="eager")(x)


def test_verify_names_what_has_no_kernel():
    with pytest.raises(ValueError) as caught:
        verify(Function(lambda x: mint.roll(x, 1)), DeviceMesh((2,), ("dp",)), Tensor(np.ones((2, 4), np.float32)))
    assert re.match(rf"in the root Cell \(Function\), {__file__}:\d+, operator 'Roll': .* no kernel", str(caught.value))
