"""Scatters, lookups by several tensors, losses and operators of experts: verified against one card, however cut."""

from itertools import product

import mindspore as ms
import numpy as np
import pytest
import test_operators as rules
from mindspore import Tensor, mint, nn, ops
from mindspore.ops.function import nn_func
from operator_calls import indexing, losses
from operator_calls.functions_scatter import f, i, p, sample
from support.nightly import daily
from support.planned_models import planned
from support.small_cells import cell_of
from support.verified_calls import MESH_OF_4, Sample, check_of, verified

from mindformers_core.analysis.traffic import bytes_by_axes
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.world import rank_of
from mindformers_core.explaining.report import make_report
from mindformers_core.layout import Layout, layout
from mindformers_core.lowering import corrected
from mindformers_core.lowering.indexing import index_tensor
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import OperatorCall, resolve, signature_of, tensor_meta
from mindformers_core.operators.rules.elementwise import tensors_in
from mindformers_core.redistribution import CPU

F = mint.nn.functional
MESH = DeviceMesh((2, 2), ("a", "b"))
TP = DeviceMesh((2,), ("tp",))


TWO = [  # cut over two axes at once
    ("TensorScatterUpdate", [layout("a", "b"), layout(), layout()]),
    ("TensorScatterAdd", [layout("b", None, "a"), layout(), layout()]),
    ("TensorScatterAdd", [layout("a"), layout("b"), layout("b")]),
    ("index_put", [layout(("b", "a")), layout(), layout(), layout()]),
    ("gather_nd", [layout("a", "b"), layout()]),
    ("segment_max", [layout("a", "b"), layout("a", "b")]),
    ("nll_loss", [layout("a", "b"), layout("a"), layout("b")]),
    ("sparse", [layout("a", "b"), layout("a")]),
    ("dense", [layout("a", "b"), layout("a", "b")]),
]


@pytest.mark.parametrize(("name", "layouts"), daily(TWO[::3], TWO), ids=str)
def test_two_axes(name, layouts):
    verified(sample(name, layouts), MESH_OF_4)


CALLS = [*indexing.OTHERS, *losses.OTHERS]
DRAWN = ("CTCLossV2", "CTCLoss")  # NumPy gives shapes only


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_rules(call):
    """Shapes, and what is called linear; `test_operators` says how."""
    tensors = rules.tensors_of(call)
    signature, args, named = rules.ask(call, list(map(rules.meta_of, tensors)))
    outputs = rules.compute(call.function, args, named, tensors)
    assert [rules.shape_of(signature, dims) for dims in signature.inputs] == [tensor.shape for tensor in tensors]
    assert [rules.shape_of(signature, dims) for dims in signature.outputs] == [np.shape(output) for output in outputs]
    if call.name not in ("MultilabelMarginLoss", "TripletMarginLoss", "NLLLoss2d", *DRAWN):
        rules.test_what_is_called_linear_is(call)
    if call.name in ("MoeInitRoutingV2", "MoeTokenPermute", "GroupedMatmulV4", "GmmV2", "MSELossExt"):
        rules.test_shards_compute_what_one_card_does(call)


def floats(*shape, cut=None, dtype="float32"):
    """A tensor with one dim cut over `a`."""
    return tensor_meta(shape, dtype, Layout.on(MESH, [["a"] * (dim == cut) for dim in range(len(shape))]))


def whole(*shape, cut=None):
    return floats(*shape, cut=cut, dtype="int32")


STAYS = [  # name, arguments, and the dim of the result that is cut, or "sum"; None where it is whole
    ("TensorScatterAdd", [floats(4, 8, cut=1), whole(6, 2), floats(6)], 1),
    ("TensorScatterMax", [floats(4, 8, cut=0), whole(6, 1), floats(6, 8)], 0),
    ("ScatterNd", [whole(6, 1, cut=0), floats(6, 8, cut=0), (4, 8)], "sum"),
    ("ScatterAddExt", [floats(4, 8, cut=1), 1, whole(4, 6), floats(4, 6)], 1),
    ("Scatter", [floats(4, 8, cut=1), 1, whole(4, 6), floats(4, 6), 0], 1),
    ("Scatter", [floats(4, 8, cut=0), 1, whole(4, 6, cut=0), floats(4, 6, cut=0), 0], 0),
    ("IndexAddExt", [floats(4, 8, cut=0), 0, whole(6), floats(6, 8)], 0),
    ("IndexFillScalar", [floats(4, 8, cut=0), 0, whole(6), 2.0], 0),
    ("IndexPut", [floats(4, 8, cut=0), floats(6), (whole(6), whole(6)), 0], 0),
    ("SparseGatherV2", [floats(4, 8, cut=1), whole(6), 1], "sum"),
    ("GatherNd", [floats(4, 8, cut=0), whole(6, 1)], "sum"),
    ("EmbeddingLookup", [floats(4, 8, cut=0), whole(6), 0], "sum"),
    ("UnsortedSegmentSum", [floats(4, 8, cut=0), whole(4, cut=0), 3], "sum"),
    ("UnsortedSegmentMax", [floats(4, 8, cut=0), whole(4, cut=0), 3], None),
    ("HistcExt", [floats(4, 8, cut=0), 4, 0.0, 1.0], "sum"),
    ("SearchSorted", [floats(8, cut=0), floats(4, 6)], "sum"),
    ("KLDiv", [floats(4, 8, cut=0), floats(4, 8, cut=0), 1, False], "sum"),
    ("MSELossExt", [floats(4, 8, cut=0), floats(4, 8, cut=0), 2], 0),
    ("SoftMarginLoss", [floats(4, 8, cut=1), floats(4, 8, cut=1), 1], "sum"),
    ("NLLLoss2d", [floats(2, 8, 4, 2, cut=1), whole(2, 4, 2), floats(8, cut=0), 1, -100], "sum"),
    ("TripletMarginLoss", [floats(4, 8, cut=0), floats(4, 8, cut=0), floats(4, 8, cut=0), 1.0, "none"], 0),
    (
        "GroupedMatmulV4",
        [[floats(8, 4, cut=1)], [floats(2, 4, 6, cut=1)], *[None] * 6, whole(2), *[None] * 3, 3, 0],
        "sum",
    ),
    ("GroupedMatmulV4", [[floats(8, 4)], [floats(2, 4, 6, cut=2)], *[None] * 6, whole(2), *[None] * 3, 3, 0], 1),
    ("MoeTokenPermute", [floats(4, 8, cut=1), whole(4, 2)], 1),
    ("InnerMoeTokenUnpermute", [floats(8, 4, cut=1), whole(8), floats(4, 2)], 1),
    ("MoeInitRoutingV2", [floats(4, 8, cut=1), whole(4, 2), 0, 0, 2], 1),
]


@pytest.mark.parametrize(("name", "args", "wanted"), STAYS, ids=str)
def test_nothing_is_gathered(name, args, wanted):
    """Cut tensors stay so, also along a dim that the operator works on; others are taken in parts, which is free."""
    metas = tensors_in(args)
    resolution = resolve(OperatorCall(name, signature_of(name, args), tuple(metas), MESH, CPU))
    for meta, needed in zip(metas, resolution.inputs):
        assert needed.dims == meta.layout.dims or not any(meta.layout.dims)
    found = resolution.outputs[0]
    assert dict(found.partial) == ({"a": "sum"} if wanted == "sum" else {})
    assert found.dims == tuple(("a",) if dim == wanted else () for dim in range(len(found.dims)))


CLASSES = 65536  # so many that bytes count, and launches don't


def loss_cell(function, **parts):
    def construct(self, x, y):
        return function(self, x * self.weight, y)

    return cell_of(construct, weight=ms.Parameter(Tensor(np.ones((8, CLASSES), np.float32))), **parts)


LOSSES = {  # 8 examples; bytes forward
    "ops": (loss_cell(lambda _, x, y: ops.cross_entropy(x, y)), 160),
    "mint": (loss_cell(lambda _, x, y: F.cross_entropy(x, y)), 72),
    "mint summed": (loss_cell(lambda _, x, y: F.cross_entropy(x, y, reduction="sum")), 68),
    "mint each": (loss_cell(lambda _, x, y: F.cross_entropy(x, y, reduction="none").mean()), 68),
    "ops smoothed": (loss_cell(lambda _, x, y: ops.cross_entropy(x, y, label_smoothing=0.1)), 160),
    "mint smoothed": (loss_cell(lambda _, x, y: F.cross_entropy(x, y, label_smoothing=0.1)), 68),
    "nn": (loss_cell(lambda self, x, y: self.loss(x, y), loss=nn.CrossEntropyLoss()), 160),
    "nn sparse": (
        loss_cell(lambda self, x, y: self.loss(x, y), loss=nn.SoftmaxCrossEntropyWithLogits(True, "mean")),
        68,
    ),
    "dense": (loss_cell(lambda self, x, y: self.loss(x, y).mean(), loss=nn.SoftmaxCrossEntropyWithLogits(True)), 96),
    "NLLLoss": (loss_cell(lambda self, x, y: self.loss(ops.log_softmax(x), y), loss=nn.NLLLoss()), 128),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_cut_vocabulary_sends_little(name):
    """A maximum and a sum for each example, and what is left: not the logarithms of 1 MiB."""
    cell, wanted = LOSSES[name]
    cut = layout(None, "tp")
    plan = {"": {"weight": {"weight": cut}, "input": {"x": cut}, "output": layout()}}
    given = tensor_meta((8, CLASSES), "float32"), tensor_meta((8,), "int32")
    with rank_of(2, 0):
        _, made = planned(cell, TP, given, plan=plan, arriving={"x": cut})
        sent = bytes_by_axes(make_report(made, algorithm_of).traffic)
    assert sent == {("tp",): (wanted, 64 if wanted == 160 else 32)}


PAIRS = ("mean", -100, False, 0.0), ("mean", 3, True, 0.1), ("sum", 3, False, 0.0), ("sum", -100, True, 0.1)
PAIRS += ("none", 3, False, 0.1), ("none", -100, True, 0.0)  # each two values of two arguments meet


@pytest.mark.parametrize(
    ("reduction", "ignored", "weighted", "smoothing"),
    daily(PAIRS, product(("mean", "sum", "none"), (-100, 3), (False, True), (0.0, 0.1))),
)
def test_cross_entropy_of_mint_is_that_of_ops(monkeypatch, smoothing, weighted, ignored, reduction):
    """On a cut vocabulary; CPU has not the newer logarithm of the softmax."""
    monkeypatch.setattr(nn_func, "log_softmax_ext", lambda x, dim, dtype: ops.log_softmax(x, dim))
    named = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}

    def loss(function):
        return lambda x, w, y: function(x, y, w if weighted else None, **named)

    values = [f(4, 8), p(8), i(8, 4)]
    values[2][1] = ignored
    cuts = [layout("b", "a"), layout("a"), layout("b")]
    check = check_of(Sample("", loss(F.cross_entropy), tuple(values), terms=False, cuts=[cuts]), MESH_OF_4)
    ((found,),) = check.truth.outputs.values()
    np.testing.assert_allclose(found, loss(ops.cross_entropy)(*map(Tensor, values)).asnumpy(), 1e-5)


def test_what_mindspore_gets_wrong_on_cpu():
    """docs/mindspore.md: an input that changes, a kernel that does what its first call did, a number of elements."""
    x, at_, u = f(4, 8), i(8, 4, 6), f(4, 6)
    mint.scatter(Tensor(x), 1, Tensor(at_), Tensor(u))
    found = corrected.scattered(Tensor(x), 1, Tensor(at_), Tensor(u), "add").asnumpy()
    np.testing.assert_allclose(found, indexing.elements(x, 1, at_, u, "add"), 1e-5)
    given = Tensor(x)
    found = corrected.index_added(given, 1, Tensor(at_[0]), Tensor(u), 2).asnumpy()
    np.testing.assert_allclose(found, indexing.slices(x, 1, at_[0], u, 2), 1e-5)
    np.testing.assert_array_equal(given.asnumpy(), x)
    slope = ms.grad(lambda x, y: corrected.binary_cross_entropy_of_logits(x, y))
    every = slope(Tensor(x), Tensor(p(4, 8) * 0)).asnumpy()
    np.testing.assert_allclose(slope(Tensor(x[:2]), Tensor(x[:2] * 0)).asnumpy(), every[:2] * 2, 1e-5)


X = np.arange(24.0).reshape(2, 3, 4)
ONE, TWO_OF, THREE = np.array([0, 1]), np.array([[1], [0]]), [2, -1]
INDICES = [
    (0, slice(None), ONE), (ONE, slice(None), ONE), (slice(None), ONE, ONE), (0, ONE), (ONE, 0), (ONE, slice(None), 0),
    (ONE, None, ONE), (TWO_OF, ONE), (ONE, slice(1, 3)), (..., ONE, ONE), (ONE, slice(1, 3), ONE), (0, None, ONE),
    (TWO_OF, ONE, THREE), (None, ONE, 1), (slice(None), 1, ONE), (TWO_OF, None, 1, ONE), (np.array(1), slice(0, 2)),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_index_by_tensors_is_numpys(index):
    given = tuple(Tensor(entry.astype(np.int32)) if isinstance(entry, np.ndarray) else entry for entry in index)
    np.testing.assert_array_equal(index_tensor(Tensor(X), given).asnumpy(), X[index])
