"""Operators in place, as their authors write them: the numbers and gradients of one card, and what can't be is an error."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from small_cells import cell_of
from written_models import MODELS, batches, built

from mindformers_core import recompute, shard, verify
from mindformers_core.capture.traced import CaptureError
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh

MESH, F = DeviceMesh((2, 2), ("dp", "tp")), mint.nn.functional
X, Y = (np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32) for seed in range(2))
I, P = Tensor([2, 0]), Tensor([[0, 3, 1, 2, 0, 1, 2, 3]])
POSITIVE = np.abs(X) + 0.5


def _setting(index, value):
    def set_item(x, y):
        x[index] = value(y)
        return x

    def expected(x, y):
        array, values = x.asnumpy().copy(), value(y)
        where = tuple(each.asnumpy() if isinstance(each, Tensor) else each for each in index) if isinstance(
            index, tuple
        ) else index.asnumpy() if isinstance(index, Tensor) else index
        array[where] = values.asnumpy() if isinstance(values, Tensor) else values
        return Tensor(array)

    return set_item, expected


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
    "elu": (lambda x, y: F.elu_(x), lambda x, y: ops.elu(x)),
    "hardtanh": (lambda x, y: F.hardtanh_(x, -0.5, 0.5), lambda x, y: ops.clamp(x, -0.5, 0.5)),
    "threshold": (lambda x, y: F.threshold_(x, 0.1, 2.0), lambda x, y: ops.where(x > 0.1, x, Tensor(2.0))),
    "clamp": (lambda x, y: x.clamp_(-0.5, 0.5), lambda x, y: ops.clamp(x, -0.5, 0.5)),
    "sigmoid, floor, sign": (lambda x, y: x.sigmoid_().floor_().sign_(), lambda x, y: x * 0),
    "zero": (lambda x, y: x.zero_() + y, lambda x, y: y),
    "fill": (lambda x, y: x.fill_(3) * y, lambda x, y: 3 * y),
    "copy": (lambda x, y: x.copy_(y[1]), lambda x, y: x * 0 + y[1]),
    "masked_fill": (lambda x, y: x.masked_fill_(y > 0, 2.0), lambda x, y: ops.masked_fill(x, y > 0, 2.0)),
    "fill_diagonal": (lambda x, y: x[:, :4].clone().fill_diagonal_(2.0), lambda x, y: x[:, :4] * (1 - ops.eye(4)) + 2 * ops.eye(4)),
    "addmm": (lambda x, y: x.addmm_(y[:, :4], y[:4]), lambda x, y: x + ops.matmul(y[:, :4], y[:4])),
    "addr": (lambda x, y: mint.addr_(x, y[:, 0], y[0]), lambda x, y: x + y[:, :1] * y[:1]),
    "index_add": (lambda x, y: x.index_add_(0, I, y[:2], alpha=2), lambda x, y: ops.tensor_scatter_add(x, I[:, None], 2 * y[:2])),
    "index_copy": (lambda x, y: x.index_copy_(1, I, y[:, :2]), _setting((slice(None), I), lambda y: y[:, :2])[1]),
    "index_fill": (lambda x, y: x.index_fill_(1, I, 2.0), _setting((slice(None), I), lambda y: 2.0)[1]),
    "index_put": (lambda x, y: x.index_put_((I, I), y[0, :2]), _setting((I, I), lambda y: y[0, :2])[1]),
    "put": (lambda x, y: x.put_(I, y[0, :2]), lambda x, y: _setting(I, lambda y: y[0, :2])[1](x.reshape(-1), y).reshape(4, 8)),
    "scatter": (lambda x, y: x.scatter_(0, P, y[:1]), lambda x, y: ops.tensor_scatter_elements(x, P, y[:1], 0)),
    "scatter a number": (lambda x, y: x.scatter_(0, P, 2.0), lambda x, y: ops.tensor_scatter_elements(x, P, y[:1] * 0 + 2, 0)),
    "scatter_add": (lambda x, y: x.scatter_add_(0, P, y[:1]), lambda x, y: ops.tensor_scatter_elements(x, P, y[:1], 0, "add")),
    "a row": _setting(1, lambda y: y[0]),
    "a number": _setting((slice(1, 3), 2), lambda y: 5.0),
    "a block": _setting((slice(1, 3), slice(2, -1)), lambda y: y[:2, :5]),
    "dots": _setting((..., slice(0, 2)), lambda y: y[:, :2]),
    "steps": _setting((slice(None), slice(0, 8, 2)), lambda y: y[:, :4]),
    "rows": _setting(I, lambda y: y[:2]),
    "columns": _setting((slice(None), I), lambda y: y[:, :2]),
    "part of columns": _setting((slice(1, 3), I), lambda y: y[:2, :2]),
    "elements": _setting((I, I), lambda y: y[0, :2]),
    "an element of rows": _setting((I, 3), lambda y: y[0, :2]),
}  # fmt: skip
NOT_NUMBERS = {"bools": (lambda x, y: x.__setitem__(x > 0, 1.0) or x, lambda x, y: ops.masked_fill(x, x > 0, 1.0))}
CUTS = [("None", "None"), ("dp", "None"), ("None", "tp"), ("tp", "dp")]


def called(function):
    """A Cell of two tensors that changes a tensor of its own."""
    return cell_of(lambda self, x, y: function(x * 1.0, y))


def compared(cell, *inputs, cuts=CUTS, **plan):
    """The results of one card, after all cuts were compared with it."""
    for cut in cuts:
        given = {"": {"input": {"x": layout(*cut)}}} | plan
        check = verify(lambda given=given: shard(cell(), MESH, plan=given), MESH, *map(Tensor, inputs))
        assert not check.faults, check.report()
    return next(iter(check.truth.outputs.values()))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_place(name):
    function, expected = CALLS[name]
    inputs = (POSITIVE if "log" in name else X), Y
    (found,) = compared(lambda: called(function), *inputs)
    np.testing.assert_allclose(found, expected(*map(Tensor, inputs)).asnumpy(), 1e-5, 1e-5)
