"""Strategies and layouts that are declared for operators: what they mean on a mesh, and errors."""

import itertools
import zlib

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from operator_calls import CALLS, is_many

from mindformers_core import shard, verify
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.operators import OperatorCall, resolve, signature_of, tensor_meta
from mindformers_core.propagation.boundaries import OperatorDeclaration
from mindformers_core.propagation.strategies import declared_layouts
from mindformers_core.redistribution import CPU
from mindformers_core.sharding.declare import copy_cell

MESH = init_device_mesh((2, 4), ("dp", "tp"))
WHERE = "Cell 'dense1' (Dense), operator 'matmul' (MatMul)"


def ask(name, args, inputs=None, outputs=None, mesh=MESH, **named):
    """`declared_layouts` for an operator call with shapes in the place of tensors, as lists of dims."""

    def meta(value):
        return tensor_meta(value, "float32", Layout.on(mesh, ((),) * len(value))) if type(value) is tuple else value

    signature = signature_of(name, [meta(value) for value in args], named)
    metas = [meta(value) for value in args if type(value) is tuple]
    declared = declared_layouts(OperatorDeclaration(inputs, outputs), signature, metas, mesh, WHERE)
    return [[entry and entry.dims for entry in side] for side in declared]


def matmul(inputs=None, outputs=None, mesh=MESH, shapes=((16, 32), (32, 64))):
    return ask("MatMul", shapes, inputs, outputs, mesh)


DP, TP, BOTH, CUBE = ("dp",), ("tp",), ("dp", "tp"), init_device_mesh((2, 4, 2), ("a", "b", "c"))
ROWS = (2, 4), (4, 1)
MEANT = [  # of a product: strategies of the inputs and of the output, and the layouts that they are
    (None, None, [None, None], [None]),
    ((None, None), (None,), [None, None], [None]),
    (((2, 1), (1, 4)), None, [(DP, ()), ((), TP)], [None]),  # the seed's example
    (((2, 1), (1, 4)), ((2, 4),), [(DP, ()), ((), TP)], [(DP, TP)]),
    (ROWS, None, [(DP, TP), (TP, ())], [None]),  # a factor takes the same axes in all tensors
    (((1, 8), (8, 1)), None, [((), BOTH), (BOTH, ())], [None]),
    ((None, (4, 2)), None, [None, (TP, DP)], [None]),
    (ROWS, ((8, 1),), [(DP, TP), (TP, ())], [(BOTH, ())]),  # a reduce-scatter over the axis of the sum
    (ROWS, ((2, 1),), [(DP, TP), (TP, ())], [(DP, ())]),
    (ROWS, ((1, 1),), [(DP, TP), (TP, ())], [((), ())]),
    (ROWS, ((1, 2),), [(DP, TP), (TP, ())], [((), DP)]),
    (((1, 4), (4, 1)), ((2, 4),), [((), TP), (TP, ())], [(DP, TP)]),
    (((2, 1), (1, 1)), ((2, 4),), [(DP, ()), ((), ())], [(DP, TP)]),
    (None, ((2, 4),), [None, None], [(DP, TP)]),
    ((layout("dp"), Layout.on(MESH, ((), TP))), (layout(..., "tp"),), [(DP, ()), ((), TP)], [((), TP)]),
]


@pytest.mark.parametrize(("inputs", "outputs", "of_inputs", "of_outputs"), MEANT)
def test_what_is_declared_for_a_product(inputs, outputs, of_inputs, of_outputs):
    assert matmul(inputs, outputs) == [of_inputs, of_outputs]


def test_first_axes_first_save_where_others_would_lack_them():
    assert matmul(((2, 1), (1, 2)), mesh=CUBE)[0] == [(("a",), ()), ((), ("c",))]
    assert matmul(((4, 1), (1, 1)), mesh=CUBE)[0] == [(("a", "c"), ()), ((), ())]
    assert matmul(((4, 1), (1, 2)), mesh=CUBE)[0] == [(("b",), ()), ((), ("a",))]
    mesh = init_device_mesh((4, 2, 2), ("a", "b", "c"))
    assert matmul(((1, 2), (2, 1)), ((4, 1),), mesh) == [[((), ("b",)), (("b",), ())], [(("b", "c"), ())]]


def test_axes_of_size_one_are_not_used():
    mesh = init_device_mesh((1, 2, 1, 4), ("pp", "dp", "cp", "tp"))
    assert matmul(((2, 1), (1, 4)), mesh=mesh)[0] == [(DP, ()), ((), TP)]


def test_dims_that_an_operator_merges():
    assert ask("Reshape", [(8, 6), [48]], ((4, 1),), ((4,),)) == [[(("tp",), ())], [(("tp",),)]]
    assert ask("Reshape", [(16,), [2, 8]], ((8,),), ((2, 4),)) == [[(("dp", "tp"),)], [(("dp",), ("tp",))]]


def test_a_broadcast_dim():
    assert ask("Add", [(16, 32), (32,)], ((2, 4), (4,)))[0] == [(("dp",), ("tp",)), (("tp",),)]
    assert ask("Add", [(16, 32), (16, 1)], ((2, 4), (2, 1)))[0] == [(("dp",), ("tp",)), (("dp",), ())]


def test_a_number_in_a_tensor_s_place():
    assert ask("Mul", [(16, 32), 2.0], ((2, 4), ()))[0] == [(("dp",), ("tp",))]
    assert ask("Mul", [(16, 32), ()], ((2, 4), ()))[0] == [(("dp",), ("tp",)), ()], "and a tensor without dims"


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (((2, 1),), None,
            r"Cell 'dense1' \(Dense\), operator 'matmul' \(MatMul\): inputs have 1 declared entries, but this call has "
            r"2 tensors there, of shapes \(16, 32\), \(32, 64\): write one for each"),
        (None, ((2, 1), None), r"outputs have 2 declared entries, but this call has 1 tensors there.*\(16, 64\)"),
        (((2,), (1, 4)), None, r"input 0 of shape \(16, 32\) has 2 dims, but strategy \(2,\) has 1 numbers"),
        (((3, 1), (1, 4)), None, r"\(16, 32\), strategy \(3, 1\): dim 0 of size 16 can't be cut into 3 parts: write a"),
        (((2, 4), (2, 1)), None,
            r"input 1 of shape \(32, 64\), strategy \(2, 1\): dim 0 of size 32 is cut into 2 parts, but it is one dim "
            r"with that of .*input 0 of shape \(16, 32\), strategy \(2, 4\): dim 1 of size 32, which is cut into 4"),
        (((16, 1), (1, 1)), None, r"dim 0.*into 16 parts by whole axes of \(dp=2, tp=4\): possible are 1, 2, 4, 8"),
        (((4, 1), (1, 4)), None, r"\(1, 4\): dim 1 of size 64.*, of which tp=4 cut other dims: possible are 1, 2"),
        (((2, 4), (4, 1)), ((4, 4),), r"output 0 of shape \(16, 64\), strategy \(4, 4\): dim 1.*of which tp=4 cut ot"),
        ((layout("dp"), (1, 4)), None, r"strategies and layouts are mixed: write layout\(…\) for all of its tensors"),
        ((layout("dp"), None), ((2, 4),), "strategies and layouts are mixed"),
        ((layout("dp", None, "tp"), None), None, r"operator 'matmul' \(MatMul\): input 0: layout.*it has 3 entries"),
        ((layout("dp"), layout("dq")), None, r"input 1: layout.*unknown mesh axis 'dq'.*did you mean 'dp'"),
        ((Layout.on(init_device_mesh((8,), ("tp",)), ((), ("tp",))), None), None, "input 0: layout.*on another mesh"),
    ],
)  # fmt: skip
def test_errors(inputs, outputs, message):
    with pytest.raises(ValueError, match=message):
        matmul(inputs, outputs)


def test_errors_of_other_operators():
    with pytest.raises(ValueError, match=r"input 0 of shape \(6, 32\): dim 0 has size 6, which axes tp"):
        matmul((layout("tp"), None), shapes=((6, 32), (32, 64)))
    with pytest.raises(ValueError, match=r"dim 0 of size 12 is 6 x 2 to this operator, which 4 parts don't fit"):
        ask("Reshape", [(12,), [6, 2]], ((4,),))
    with pytest.raises(
        ValueError, match="dim 1 of size 8 is merged by this operator with a major dim of size 4, which"
    ):
        ask("Reshape", [(4, 8), [32]], ((2, 2),))
    with pytest.raises(ValueError, match="dim 1 of size 8 can't be cut in this operator: write 1"):
        ask("LayerNorm", [(4, 8), (8,), (8,), 1, 1], ((1, 2), (2,), (2,)))


def choices(shape):
    """All cuts of a tensor by the axes a and b (both of size 2), as strategies."""
    for owners in itertools.product(range(-1, len(shape)), repeat=2):
        strategy = tuple(2 ** owners.count(dim) for dim in range(len(shape)))
        if all(size % count == 0 for size, count in zip(shape, strategy)):
            yield strategy


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_strategies_of_any_operator(call):
    """What strategies give has as many parts as they say, and the operator computes with it as it is; or an error."""
    mesh = init_device_mesh((2, 2), ("a", "b"))
    rng = np.random.default_rng(zlib.crc32(str(call).encode()))
    metas = []

    def meta(value):
        if is_many(value):
            return type(value)(map(meta, value))
        if not isinstance(value, np.ndarray):
            return value
        metas.append(tensor_meta(value.shape, str(value.dtype), Layout.on(mesh, ((),) * value.ndim)))
        return metas[-1]

    args = [meta(value) for value in call.args]
    signature = signature_of(call.name, args, {name: meta(value) for name, value in call.named.items()})
    options = [sorted(set(choices(entry.shape))) for entry in metas]
    understood = 0
    draws = [tuple(some[rng.integers(len(some))] for some in options) for _ in range(12)]
    for strategies in [tuple(some[0] for some in options), *draws]:
        try:
            inputs, outputs = declared_layouts(OperatorDeclaration(strategies), signature, metas, mesh, WHERE)
        except ValueError as error:
            assert any(text in str(error) for text in ("cut both alike", "write 1", "possible are"))
            continue
        understood += 1
        assert outputs == (None,) * len(signature.outputs)
        assert [tuple(map(entry.divisor, range(entry.ndim))) for entry in inputs] == list(strategies)
        arriving = [tensor_meta(one.shape, one.dtype, entry, True) for one, entry in zip(metas, inputs)]
        resolution = resolve(OperatorCall(call.name, signature, tuple(arriving), mesh, CPU))
        assert not resolution.price.communication
        assert [entry.dims for entry in resolution.inputs] == [entry.dims for entry in inputs]
    assert understood, "the strategy of ones, which comes first, is always right"


LINE = DeviceMesh((2,), ("tp",))
IMAGE = np.random.default_rng(5).standard_normal((2, 4, 8, 8)).astype(np.float32)


def test_layers_with_a_method_called_shard():
    """MindSpore's own is no hook, and its strategy is that of the layer's operator."""
    layers = nn.SequentialCell(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2dTranspose(4, 4, 2, stride=2, has_bias=True))
    plan, image = {"": {"input": {"input_data": layout(None, None, "tp")}}}, Tensor(IMAGE)
    check = verify(layers, LINE, image, plan=plan)
    assert not check.faults, check.report()
    expected, loss = layers(image).asnumpy(), lambda net: ms.value_and_grad(lambda x: net(x).sum(), 0)

    def run(mode, out):
        net = shard(copy_cell(layers), LINE, mode=mode)
        result = net(image)
        assert result.layout.dims[0] == out
        gradient = loss(net)(image)[1].asnumpy()
        np.testing.assert_allclose(gradient, loss(layers)(image)[1].asnumpy(), 1e-5, 1e-5)
        return result.full_tensor().asnumpy()

    for mode in ("eager", "generated"):
        for found in SimulatedRanks(2).run(lambda rank, mode=mode: run(mode, ())):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    layers[2].shard(((2, 1, 1, 1), (1, 1, 1, 1)))
    for found in SimulatedRanks(2).run(lambda rank: run("generated", ("tp",))):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    check = verify(layers, LINE, image)
    assert not check.faults, check.report()
    layers[2].shard(((1, 1, 3, 1), (1, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"Cell '2' \(Conv2dTranspose\), operator 'conv2d_transpose'"):
        verify(layers, LINE, image)
