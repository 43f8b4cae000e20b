"""Operators whose cut dim needs an algorithm of its own, at the places where algorithms go wrong, against one card."""

from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from one_card import check, draw, part_of
from support.algorithm_calls import EXTREMES, TIES
from support.launch import on_ranks

from mindformers_core.communication import world
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, distribute_tensor

MESH = init_device_mesh((2, 2), ("dp", "tp"))
INF, ONE = np.inf, Tensor(1.0, ms.float32)


def bound(*specifications):
    """A choice of layouts for each specification, for functions of one tensor."""
    return [[given.bind(MESH, 2)] for given in specifications]


CUTS = bound(
    layout(None, "tp"),
    layout("dp", "tp"),
    layout(None, ("dp", "tp")),
    layout(None, ("tp", "dp")),
    layout("tp", "dp"),
    layout(),
)
BY_DAY = CUTS[3:5]  # a dim over both axes, both dims; on simulated ranks: `test_operators_as_written`


@on_ranks(4)
def case_extremes_with_ties(cuts=BY_DAY):
    """The gradient is shared by all that hold the extreme, or goes to the first, as each operator has it."""
    functions = EXTREMES | {"method": lambda x: x.max(axis=1)}
    for (name, function), sign in [*product(functions.items(), (1, -1))][:: 1 if cuts is CUTS else 3]:
        check(name, function, [Tensor(sign * TIES)], cuts)
    for array in (TIES.astype(np.int32), TIES.astype(np.float16)):
        check("of another dtype", lambda x: ops.amax(x, 1), [Tensor(array)], cuts, 1e-3, 1e-3)


@on_ranks(4)
def case_positions_with_ties(cuts=BY_DAY):
    """The first position among equals; NaN is none."""
    functions = {
        "argmax": lambda x: ops.argmax(x, 1),
        "argmin": lambda x: ops.argmin(x, 1),
        "method": lambda x: x.argmax(0),
        "keepdim": lambda x: ops.argmax(x, 1, True),
        "with value": lambda x: ops.max(x, 1)[1],
        "mint": lambda x: mint.max(x, 1)[1],
        "mint.min": lambda x: mint.min(x, 1)[1],
    }
    with_nan = TIES.copy()
    with_nan[:, 4:] = np.nan
    for name, function in functions.items():
        check(name, function, [Tensor(TIES)], cuts)
        check(name, function, [Tensor(-TIES)], cuts)
        if name != "method":
            check(f"{name} with NaN", function, [Tensor(with_nan)], cuts)


@on_ranks(4)
def case_softmax_of_masked_rows(cuts=BY_DAY):
    """Entries of -inf, and all of one shard."""
    masked = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    masked[0, 1:3], masked[1, :4], masked[2, 7] = -INF, -INF, -INF
    check("log_softmax", lambda x: ops.exp(ops.log_softmax(x, 1)), [Tensor(masked)], cuts)
    check("logsumexp", lambda x: ops.logsumexp(x, 1), [Tensor(masked)], cuts)
    check("softmax", lambda x: ops.softmax(x, 1), [Tensor(masked)], cuts)
    masked[3] = -INF
    with np.errstate(invalid="ignore"):
        whole = np.exp(masked) / np.exp(masked).sum(1, keepdims=True)  # NaN in the last row
    for (cut,) in cuts:
        found = ops.softmax(distribute_tensor(Tensor(masked), cut), 1).full_tensor().asnumpy()
        np.testing.assert_allclose(found, whole, 1e-5, 1e-6)
    large = 1e4 * np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    check("softmax of large numbers", lambda x: ops.softmax(x, 1), [Tensor(large)], cuts)
    check("log_softmax of large numbers", lambda x: ops.log_softmax(x, 1), [Tensor(large)], cuts, atol=1e-2)
    half = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float16)
    check("softmax in half precision", lambda x: ops.softmax(x, 1), [Tensor(half)], cuts, 5e-3, 5e-3)


@on_ranks(4)
def case_lookups(cuts=BY_DAY, each=4):
    """Rows on any shard, in any order, several times; indices from the end; integer and bool tables."""
    random = np.random.default_rng(0)
    table, ids = draw(random, (8, 4)), Tensor(np.int32([[7, 0, 3, 3], [4, 5, 2, 1]]))
    tables = [layout("tp", None), layout(("dp", "tp"), None), layout("tp", "dp"), layout(None, "tp"), layout()]
    of_ids = [layout("dp", None), layout(None, "tp"), layout()]
    choices = [[first.bind(MESH, 2), second.bind(MESH, 2)] for first, second in [*product(tables, of_ids)][::each]]
    check("gather", lambda t, i: ops.gather(t, i, 0), [table, ids], choices)
    check("take", lambda t, i: t.take(i, 0), [table, ids], choices)
    for dtype in (np.int32, np.bool_, np.float16):
        numbers = Tensor((np.arange(32).reshape(8, 4) % 3).astype(dtype))
        check(f"gather of {dtype}", lambda t, i: ops.gather(t, i, 0), [numbers, ids], choices, 1e-3, 1e-3)
    columns = Tensor(np.int32([[0, -1], [7, 3], [-8, -4], [2, 6]]))
    wide = draw(random, (4, 8))
    choices = [[*cut, given.bind(MESH, 2)] for cut, given in product(cuts, (layout(), layout("dp")))]
    check("gather_elements", lambda x, i: ops.gather_elements(x, 1, i), [wide, columns], choices)
    check("index", lambda x: x[:, Tensor(np.int32([-1, 0, 5]))], [wide], cuts)
    check("index by a list", lambda x: x[..., [1, -2]], [wide], cuts)


@on_ranks(nightly=(4,))
def case_special_operators_of_all_cuts():
    for case in (case_extremes_with_ties, case_positions_with_ties, case_softmax_of_masked_rows):
        case(CUTS)
    case_lookups(CUTS, 1)


@on_ranks(4)
def case_lookups_out_of_range():
    """Negative indices count from the end, in all lookups; beyond the ends a cut table gives zeros, as documented."""
    table = np.arange(1, 33, dtype=np.float32).reshape(8, 4)
    ids = np.int32([-1, 3, -8, -3, -1])
    expected, slopes = table[ids], np.zeros_like(table)
    np.add.at(slopes, ids, 1)
    lookups = {
        "gather": lambda t, i: ops.gather(t, i, 0),
        "take": lambda t, i: t.take(i, 0),
        "gather_elements": lambda t, i: ops.gather_elements(t, 0, ops.tile(ops.expand_dims(i, 1), (1, 4))),
        "index_select": lambda t, i: DTensor.__fallback__(Operator("IndexSelect"), (t, 0, i), {}),
        "embedding": lambda t, i: DTensor.__fallback__(Operator("Embedding"), (i, t), {}),
    }
    cuts = [given.bind(MESH, 2) for given in (layout("tp", None), layout(("dp", "tp"), None), layout("tp", "dp"))]
    for (name, lookup), given in product(lookups.items(), cuts):

        def total(local, given=given, lookup=lookup):
            return lookup(DTensor.from_local(local, given), Tensor(ids)).full_tensor().sum()

        found = lookup(distribute_tensor(Tensor(table), given), Tensor(ids)).full_tensor()
        np.testing.assert_array_equal(found.asnumpy(), expected, err_msg=f"{name} {given}")
        gradient = ms.grad(total)(Tensor(part_of(table, given))).asnumpy()
        if name != "take":  # whose table is whole: MindSpore's own gradient leaves negative indices out
            np.testing.assert_allclose(gradient, part_of(slopes, given), err_msg=f"gradient of {name} {given}")
            outside = lookup(distribute_tensor(Tensor(table), given), Tensor(np.int32([8, -9, 2]))).full_tensor()
            np.testing.assert_array_equal(outside.asnumpy(), [[0] * 4, [0] * 4, table[2]], err_msg=f"{name} {given}")


class Operator:
    """A lookup that has no kernel on CPU, by one that has, in the form in which MindSpore hands it to us."""

    def __init__(self, name):
        self.name = name

    def __call__(self, first, *others):
        return ops.gather(others[0], first, 0) if self.name == "Embedding" else ops.gather(first, others[1], others[0])


@on_ranks(nightly=(4,))
def case_dropout_is_the_same_on_any_mesh():
    """One mask for 2x2, 1x4 and a replicated tensor; another one at every call; the gradient has the same mask.

    Daily on two ranks: `case_dropout_algorithm`.
    """
    array = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    meshes = MESH, init_device_mesh((1, 4), ("dp", "tp"))
    placed = [given.bind(mesh, 2) for mesh in meshes for given in (layout("dp", "tp"), layout(("dp", "tp")), layout())]
    for dropout in (lambda x: ops.dropout(x, 0.25), lambda x: mint.nn.functional.dropout(x, 0.25, True)):
        found = []
        for given in placed:
            ms.set_seed(3)
            ms.manual_seed(3)
            outputs = []

            def total(local, given=given, outputs=outputs, dropout=dropout):
                outputs += [dropout(DTensor.from_local(local, given)) for _ in range(2)]
                return outputs[0].sum().full_tensor()

            gradient = ms.grad(total)(Tensor(part_of(array, given)))
            first, second = (output.full_tensor().asnumpy() for output in outputs)
            np.testing.assert_allclose(gradient.asnumpy() * part_of(array, given), part_of(first, given), 1e-5)
            assert np.any((first == 0) != (second == 0)), "two calls drew the same mask"
            found.append(first)
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])
        kept = found[0] != 0
        assert 0.6 < kept.mean() < 0.9
        np.testing.assert_allclose(found[0][kept], array[kept] / 0.75, 1e-5)


WRONG_CALLS = [  # of x (4, 8), y (6, 10), cube (2, 4, 8), and what makes more such tensors
    lambda x, y, cube, tensor: x + y,
    lambda x, y, cube, tensor: x * y,
    lambda x, y, cube, tensor: ops.matmul(x, y),
    lambda x, y, cube, tensor: x @ y,
    lambda x, y, cube, tensor: ops.bmm(x, x),
    lambda x, y, cube, tensor: ops.bmm(cube, cube),
    lambda x, y, cube, tensor: ops.MatMul()(x, cube),
    lambda x, y, cube, tensor: ops.dense(x, y),
    lambda x, y, cube, tensor: ops.dense(x, tensor(6, 8), tensor(4)),
    lambda x, y, cube, tensor: ops.dense(x, cube),
    lambda x, y, cube, tensor: ops.dense(x, tensor(6, 8), tensor(2, 6)),
    lambda x, y, cube, tensor: ops.bias_add(x, tensor(6)),
    lambda x, y, cube, tensor: ops.reshape(x, (3, 11)),
    lambda x, y, cube, tensor: x.view(5, -1),
    lambda x, y, cube, tensor: ops.transpose(x, (0, 1, 2)),
    lambda x, y, cube, tensor: x.permute(0, 0),
    lambda x, y, cube, tensor: ops.concat([x, y], 0),
    lambda x, y, cube, tensor: ops.concat([x, cube], 0),
    lambda x, y, cube, tensor: ops.stack([x, y]),
    lambda x, y, cube, tensor: ops.split(x, 3, 5),
    lambda x, y, cube, tensor: ops.softmax(x, 3),
    lambda x, y, cube, tensor: ops.sum(x, 4),
    lambda x, y, cube, tensor: ops.mean(x, 2),
    lambda x, y, cube, tensor: ops.amax(x, -3),
    lambda x, y, cube, tensor: ops.argmax(x, 2),
    lambda x, y, cube, tensor: x[4],
    lambda x, y, cube, tensor: x[:, :, 0],
    lambda x, y, cube, tensor: ops.expand_dims(x, 5),
    lambda x, y, cube, tensor: ops.squeeze(x, 3),
    lambda x, y, cube, tensor: ops.broadcast_to(x, (3, 8)),
    lambda x, y, cube, tensor: x.expand(5, 8),
    lambda x, y, cube, tensor: ops.gather(x, Tensor(np.int32([0])), 2),
    lambda x, y, cube, tensor: ops.gather_elements(x, 1, Tensor(np.int32([0]))),
    lambda x, y, cube, tensor: ops.where(y > 0, x, x),
    lambda x, y, cube, tensor: ops.masked_fill(x, y > 0, 0.0),
    lambda x, y, cube, tensor: ops.topk(x, 9),
    lambda x, y, cube, tensor: ops.cumsum(x, 2),
    lambda x, y, cube, tensor: ops.tril(tensor(4)),
    lambda x, y, cube, tensor: ops.LayerNorm(1, 1)(x, tensor(6), tensor(6)),
    lambda x, y, cube, tensor: ops.narrow(x, 1, 6, 4),
    lambda x, y, cube, tensor: ops.one_hot(x, 8),
    lambda x, y, cube, tensor: ops.tile(x, (0, 1)),
    lambda x, y, cube, tensor: ops.swapaxes(x, 0, 2),
    lambda x, y, cube, tensor: ops.cross_entropy(x, tensor(6)),
    lambda x, y, cube, tensor: ops.addmm(x, x, x),
    lambda x, y, cube, tensor: ops.strided_slice(x, (0, 0, 0), (1, 1, 1), (1, 1, 1)),
    lambda x, y, cube, tensor: ops.flatten(x, start_dim=3),
]


@on_ranks(4)
def case_wrong_shapes_are_found_before_anything_runs():
    """An error from C++ inside an operator can leave MindSpore unusable; ours come from the rules, and all works on."""
    random = np.random.default_rng(0)

    def tensor(*shape):
        return distribute_tensor(draw(random, shape), Layout.on(MESH, [("dp",), *((),) * (len(shape) - 1)]))

    x, y, cube = tensor(4, 8), tensor(6, 10), tensor(2, 4, 8)
    for number, call in enumerate(WRONG_CALLS):
        with pytest.raises((ValueError, TypeError, IndexError)) as caught:
            call(x, y, cube, tensor)
        assert "C++ Call Stack" not in str(caught.value), f"call {number}: {caught.value}"
        np.testing.assert_allclose((x + x).to_local().asnumpy(), 2 * x.to_local().asnumpy())
    assert world().size == 4
