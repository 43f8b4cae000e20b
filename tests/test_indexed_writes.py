"""Assignments by index that name a place twice, by bools, by steps beside ints: what plain MindSpore or NumPy does."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_core import init_device_mesh, shard, verify
from mindformers_core.layout import layout

ROWS = np.sort(np.random.default_rng(0).integers(0, 8, 512)).astype(np.int32)
SMALL = np.arange(16, dtype=np.float32).reshape(4, 4)


def values(*shape):
    return Tensor(np.random.default_rng(1).standard_normal(shape).astype(np.float32))


def written(x, index, value):
    x = x * 1.0
    x[index] = value
    return x


CASES = {
    "rows of a tensor, repeated": (lambda x, y: written(x, Tensor(ROWS), y), values(8, 4), values(512, 4)),
    "rows of a list": (lambda x, y: written(x, [2, 0], y), Tensor(SMALL), values(2, 4)),
    "rows of a list, repeated": (lambda x, y: written(x, [-1, 3], y), Tensor(SMALL), values(2, 4)),
    "rows by bools": (lambda x: written(x, [True, False, True, False], 0.0), Tensor(SMALL)),
    "columns by bools": (lambda x: written(x, (slice(None), [False, True, True, False]), 9.0), Tensor(SMALL)),
    "read by bools": (lambda x: x[[True, False, True, False]], Tensor(SMALL)),
    "a step behind an int": (lambda x, y: written(x, (0, slice(None), slice(None, None, 2)), y),
                             values(2, 4, 4), values(4, 2)),
    "a step": (lambda x, y: written(x, (slice(None), slice(None), slice(None, None, 2)), y),
               values(2, 4, 4), values(4, 2)),
    "read by a number in a tensor": (lambda x, place: x[place], Tensor(SMALL), Tensor(1)),
}  # fmt: skip


def cell_of(function):
    class Written(nn.Cell):
        def construct(self, x, y=None):
            return function(x) if y is None else function(x, y)

    return Written()


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_card(name, dim):
    function, x, *others = CASES[name]
    dims = [None] * x.ndim
    dims[dim] = "dp"
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    check = verify(cell_of(function), mesh, x, *others, plan={"": {"input": {"x": layout(*dims)}}})
    assert not check.faults and not check.notes, check.report()


def on_one_rank(function, *arrays):
    """What a parallel program computes: MindSpore has no kernel of its own for these on CPU."""
    net = shard(cell_of(function), init_device_mesh((1,), ("dp",)))
    return net(*map(Tensor, arrays)).full_tensor().asnumpy()


@pytest.mark.usefixtures("one_rank")
def test_values_are_added_as_often_as_their_place_is_named():
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.ones((3, 2), np.float32)
    rows = np.array([1, 1, 2])
    expected = x.copy()
    np.add.at(expected, rows, y)
    index = (Tensor(rows),)
    np.testing.assert_array_equal(on_one_rank(lambda x, y: (x * 1.0).index_put_(index, y, True), x, y), expected)
    expected, y = x.copy(), np.ones(3, np.float32)
    np.add.at(expected, (rows, 1 - rows % 2), y)
    index = (Tensor(rows), Tensor(1 - rows % 2))
    np.testing.assert_array_equal(on_one_rank(lambda x, y: (x * 1.0).index_put_(index, y, True), x, y), expected)


@pytest.mark.usefixtures("one_rank")
def test_errors():
    index = Tensor(np.zeros((1, 4), np.int64))
    with pytest.raises(ValueError, match=r"scatter_\(reduce='multiply'\) is not available"):
        on_one_rank(lambda x: (x * 1.0).scatter_(0, index, ms.mint.ones((1, 4)), reduce="multiply"), SMALL)
    with pytest.raises(ValueError, match=r"a list of bools of shape \(2,\) for dim 0 of size 4"):
        on_one_rank(lambda x: x[[True, False]], SMALL)
