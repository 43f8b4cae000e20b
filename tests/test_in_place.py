"""Operators in place, as their authors write them: the numbers and gradients of one card, or an error."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops
from support.in_place_models import Sharing
from support.planned_models import planned
from support.small_cells import cell_of

from mindformers_core import shard, verify
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture
from mindformers_core.capture.traced import CaptureError
from mindformers_core.communication.world import rank_of
from mindformers_core.explaining.report import make_report
from mindformers_core.layout import layout
from mindformers_core.lowering.indexing import with_items
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.program.structure import tree_leaves, tree_map

MESH, F = DeviceMesh((2, 2), ("dp", "tp")), mint.nn.functional
X, Y = (np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32) for seed in range(2))
AT, P = Tensor([2, 0]), Tensor([[0, 3, 1, 2, 0, 1, 2, 3]])


def _setting(index, value):
    """`x[index] = value(y)`, and what NumPy makes of it."""

    def set_item(x, y):
        x[index] = value(y)
        return x

    def expected(x, y):
        array, values = x.asnumpy().copy(), value(y)
        array[tree_map(_array, index)] = _array(values)
        return Tensor(array)

    return set_item, expected


def _array(leaf):
    return leaf.asnumpy() if isinstance(leaf, Tensor) else leaf


def _elements(x, values, reduction="none"):
    return ops.tensor_scatter_elements(x, P, values, 0, reduction)


# in place, and what it should be
CALLS = {
    "add": (lambda x, y: x.add_(y), lambda x, y: x + y),
    "add a number": (lambda x, y: x.add_(2.0), lambda x, y: x + 2.0),
    "sub": (lambda x, y: x.sub_(y, alpha=2), lambda x, y: x - 2 * y),
    "mul": (lambda x, y: x.mul_(y[0]), lambda x, y: x * y[0]),
    "div": (lambda x, y: x.div_(y), lambda x, y: x / y),
    "div by rounding": (lambda x, y: x.div_(y, rounding_mode="floor"), lambda x, y: ops.floor(x / y)),
    "div by truncating": (lambda x, y: x.div_(y, rounding_mode="trunc"), lambda x, y: ops.trunc(x / y)),
    "floor_divide": (lambda x, y: x.floor_divide_(2.0), lambda x, y: ops.floor(x / 2)),
    "remainder": (lambda x, y: x.remainder_(2.0), lambda x, y: x - ops.floor(x / 2) * 2),
    "exp, log, tanh": (lambda x, y: x.exp_().log_().tanh_(), lambda x, y: ops.tanh(x)),
    "relu": (lambda x, y: F.relu_(x), lambda x, y: ops.relu(x)),
    "clamp": (lambda x, y: x.clamp_(-0.5, 0.5), lambda x, y: ops.clamp(x, -0.5, 0.5)),
    "sigmoid, floor, sign": (lambda x, y: x.sigmoid_().floor_().sign_(), lambda x, y: x * 0),
    "zero": (lambda x, y: x.zero_() + y, lambda x, y: y),
    "fill": (lambda x, y: x.fill_(3) * y, lambda x, y: 3 * y),
    "copy": (lambda x, y: x.copy_(y[1]), lambda x, y: x * 0 + y[1]),
    "masked_fill": (lambda x, y: x.masked_fill_(y > 0, 2.0), lambda x, y: ops.masked_fill(x, y > 0, 2.0)),
    "fill_diagonal": (
        lambda x, y: (x[:, :4] * 1.0).fill_diagonal_(2.0), lambda x, y: x[:, :4] * (1 - ops.eye(4)) + 2 * ops.eye(4),
    ),
    "addmm": (lambda x, y: x.addmm_(y[:, :4], y[:4]), lambda x, y: x + ops.matmul(y[:, :4], y[:4])),
    "addr": (lambda x, y: mint.addr_(x, y[:, 0], y[0]), lambda x, y: x + y[:, :1] * y[:1]),
    "index_add": (
        lambda x, y: x.index_add_(0, AT, y[:2], alpha=2),
        lambda x, y: ops.tensor_scatter_add(x, AT[:, None], 2 * y[:2]),
    ),
    "index_copy": (lambda x, y: x.index_copy_(1, AT, y[:, :2]), _setting((slice(None), AT), lambda y: y[:, :2])[1]),
    "index_fill": (lambda x, y: x.index_fill_(1, AT, 2.0), _setting((slice(None), AT), lambda y: 2.0)[1]),
    "index_put": (lambda x, y: x.index_put_((AT, AT), y[0, :2]), _setting((AT, AT), lambda y: y[0, :2])[1]),
    "put": (lambda x, y: x.put_(AT, y[0, :2]), _setting((Tensor([0, 0]), AT), lambda y: y[0, :2])[1]),
    "scatter": (lambda x, y: x.scatter_(0, P, y[:1]), lambda x, y: _elements(x, y[:1])),
    "scatter a number": (lambda x, y: x.scatter_(0, P, 2.0), lambda x, y: _elements(x, y[:1] * 0 + 2)),
    "scatter_add": (lambda x, y: x.scatter_add_(0, P, y[:1]), lambda x, y: _elements(x, y[:1], "add")),
    "a row": _setting(1, lambda y: y[0]),
    "a number": _setting((slice(1, 3), 2), lambda y: 5.0),
    "a corner": _setting((slice(0, 2), slice(0, 3)), lambda y: y[:2, :3]),
    "a block": _setting((slice(1, 3), slice(2, -1)), lambda y: y[:2, :5]),
    "dots": _setting((..., slice(0, 2)), lambda y: y[:, :2]),
    "steps": _setting((slice(None), slice(0, 8, 2)), lambda y: y[:, :4]),
    "rows": _setting(AT, lambda y: y[:2]),
    "columns": _setting((slice(None), AT), lambda y: y[:, :2]),
    "part of columns": _setting((slice(1, 3), AT), lambda y: y[:2, :2]),
    "elements": _setting((AT, AT), lambda y: y[0, :2]),
    "bools": (lambda x, y: x.__setitem__(x > 0, 1.0) or x, lambda x, y: ops.masked_fill(x, x > 0, 1.0)),
    "an element of rows": _setting((AT, 3), lambda y: y[0, :2]),
}  # fmt: skip
TOGETHER = 14
CUTS = [("None", "None"), ("dp", "None"), ("None", "tp"), ("tp", "dp")]


def compared(cell, cuts=CUTS):
    """The results of one card, after all cuts were compared with it."""
    for cut in cuts:
        plan = {"": {"input": {"x": layout(*cut)}}}
        check = verify(lambda plan=plan: shard(cell(), MESH, plan=plan), MESH, Tensor(X), Tensor(Y))
        assert not check.faults, check.report()
    return next(iter(check.truth.outputs.values()))


@pytest.mark.parametrize(
    "cuts", [CUTS[2:], pytest.param(CUTS[:2], marks=pytest.mark.nightly)], ids=["columns and both", "none and rows"]
)
@pytest.mark.parametrize("first", range(0, len(CALLS), TOGETHER))
def test_calls_in_place(first, cuts):
    """So many calls in one Cell, each of tensors of its own."""
    calls = dict(list(CALLS.items())[first : first + TOGETHER])

    def make():
        return cell_of(lambda self, x, y: [function(x * 1.0, y) for function, _ in calls.values()])

    for (name, (_, expected)), found in zip(calls.items(), compared(make, cuts), strict=True):
        np.testing.assert_allclose(found, expected(Tensor(X), Tensor(Y)).asnumpy(), 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("index", [5, slice(5, 7), Tensor([5]), slice(0, 60, 20)], ids=str)
def test_a_cache_is_copied_once(index):
    """Of all that an assignment by index takes, one result has the size of the cache; cut heads move nothing."""

    def write(self, x, y):
        x = x * 1.0
        x[:, :, index] = y
        return x

    x, rows = np.zeros((2, 8, 64, 4), np.float32), np.ones((2, 8, 1, 4), np.float32)
    y = rows[:, :, 0] if isinstance(index, int) else rows
    cut = {"x": layout("dp", "tp", None, None), "y": layout("dp", "tp", *(None,) * (y.ndim - 2))}
    with rank_of(4, 0):
        graph, plan = planned(cell_of(write), MESH, (Tensor(x), Tensor(y)), arriving=cut, plan={"": {"input": cut}})
        assert not make_report(plan, algorithm_of).traffic
    large = [node.operator for node in graph.nodes if x.shape in [value.shape for value in tree_leaves(node.outputs)]]
    assert large == ["Muls", "TensorScatterElements"]


def test_what_has_no_scatter_is_joined():
    x = Tensor(X).astype(ms.bfloat16)
    found = with_items(x, (slice(None), 2), x[:, 3])
    np.testing.assert_array_equal(found[:, 2].float().asnumpy(), x[:, 3].float().asnumpy())
    np.testing.assert_array_equal(found[:, 3:].float().asnumpy(), x[:, 3:].float().asnumpy())


def test_own_code_whose_kernels_do_nothing_is_not_compared():
    def construct(self, x, y):
        x = x * 1.0
        return x.add_(y) * 0 + x

    check = verify(cell_of(construct), MESH, Tensor(X), Tensor(Y))
    assert not check.faults, check.report()
    assert "not verified: that the captured program" in check.report() and "leaves x as it was on CPU" in check.report()


def test_what_changes_stays_changed_for_callers():
    (found,) = compared(Sharing)
    expected = Sharing(in_place=False)(Tensor(X), Tensor(Y))
    np.testing.assert_allclose(found, expected.asnumpy(), 1e-4, 1e-4)


def _view_of_old(self, x):
    x = x * 1.0
    row = x[0]
    x.add_(1.0)
    return x + row


def _through_a_view(self, x):
    x = x * 1.0
    x.reshape(-1).add_(1.0)
    return x


def _view_of_plain(self, x):
    made = mint.zeros(x.shape)
    made.reshape(-1).normal_()
    return made * x


def _plain_view_of_old(self, x):
    made = mint.zeros(x.shape)
    row = made[0]
    made.add_(x)
    return x + row


def _kept_tensor(self, x):
    return self.table.add_(x)


WRONG = {
    "a view of what is changed": (_view_of_old, "used after one of the same memory.* at .*test_in_place.py:[0-9]+"),
    "a change through a view": (_through_a_view, "used after one of the same memory"),
    "a change of a plain view": (_view_of_plain, "a plain tensor .* used after one of the same memory.*test_in_place"),
    "a plain view of what is changed": (_plain_view_of_old, "a plain tensor .* used after one of the same memory"),
    "an argument of the root": (lambda self, x: x.add_(1.0), "an argument of the root Cell.* change a copy"),
    "a plain tensor of a Cell": (_kept_tensor, "changed in place that is .*'table' of a Cell.*requires_grad=False"),
    "values at bools": (lambda self, x: (x * 1).__setitem__(x > 0, x[0]), "takes one value"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_an_error(name):
    function, expected = WRONG[name]
    cell = cell_of(function, weight=Parameter(Tensor(X), name="weight"), table=Tensor(X))
    with pytest.raises((CaptureError, TypeError), match=expected):
        capture(cell, Tensor(X))


def _whole_view_of_plain(self, x):
    made = mint.zeros(x.shape)
    made.reshape(-1).add_(x.reshape(-1))
    return made + x


def _part_of_plain(self, x):
    made = mint.zeros(x.shape)
    made[0].add_(x[0])
    return made + x


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("function", [_whole_view_of_plain, _plain_view_of_old, _part_of_plain])
def test_operator_by_operator_views_of_plain_tensors_are_errors(function):
    net = shard(cell_of(function), init_device_mesh((1,), ("dp",)), mode="eager")
    for _ in range(2):  # nothing is left of the first call
        with pytest.raises(ValueError, match="^in the root Cell .*: a plain tensor of shape .*change"):
            net(Tensor(X))
