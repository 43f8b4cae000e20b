"""Operators composed of others, as those with constant sizes: each dim cut, values and gradients, against MindSpore."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.ops.operations.nn_ops import DeformableOffsets
from support.nightly import daily
from support.small_cells import cell_of
from support.verified_calls import MESH, Sample, eager, verified

from mindformers_core import shard, verify
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.declare import copy_cell

RANDOM = np.random.default_rng(5)


def f(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def pairs(*entries):
    return Tensor(np.array(entries))


CALLS = {
    "diag": (lambda x: ops.matrix_diag(x), [f(2, 4)]),
    "diag above": (lambda x: ops.matrix_diag(x, 2, padding_value=3.0), [f(2, 4)]),
    "diag below": (lambda x: ops.matrix_diag(x, -1, num_cols=6), [f(2, 4)]),
    "diag of rows": (lambda x: ops.matrix_diag(x, 1, 4, 8), [f(2, 4)]),
    "part": (lambda x: ops.matrix_diag_part(x, Tensor(0, ms.int32), Tensor(0.0)), [f(2, 4, 6)]),
    "part above": (lambda x: ops.matrix_diag_part(x, Tensor(3, ms.int32), Tensor(0.0)), [f(2, 4, 6)]),
    "part below": (lambda x: ops.matrix_diag_part(x, Tensor(-2, ms.int32), Tensor(0.0)), [f(2, 4, 6)]),
    "set": (lambda x, d: ops.matrix_set_diag(x, d), [f(2, 4, 6), f(2, 4)]),
    "set above": (lambda x, d: ops.matrix_set_diag(x, d, 3), [f(2, 4, 6), f(2, 3)]),
    "set below": (lambda x, d: ops.matrix_set_diag(x, d, -2), [f(2, 4, 6), f(2, 2)]),
    "embed": (lambda x: ops.diag_embed(x, 1), [f(2, 4)]),
    "scatter": (lambda x, d: ops.diagonal_scatter(x, d), [f(4, 4), f(4)]),
    "expand": (lambda x: ops.expand(x, Tensor(np.array([2, 4, 8]))), [f(4, 1)]),
    "symmetric": (lambda x: ops.mirror_pad(x, pairs((1, 2), (0, 4)), "SYMMETRIC"), [f(2, 4)]),
    "reflected": (lambda x: ops.mirror_pad(x, pairs((0, 0), (1, 1), (3, 2), (0, 0)), "REFLECT"), [f(2, 4, 4, 2)]),
    "rows added": (lambda x, v: ops.inplace_add(x, v, (0, 2)), [f(4, 8), f(2, 8)]),
    "rows taken away": (lambda x, v: ops.InplaceSub((3, 0))(x, v), [f(4, 8), f(2, 8)]),
    "rows exchanged": (lambda x, v: ops.inplace_update(x, v, (1, 2)), [f(4, 8), f(2, 8)]),
    "fold": (lambda x: ops.fold(x, pairs(6, 8), (2, 3), 1, (0, 1), (2, 1)), [np.round(f(2, 24, 24) * 4)]),
    "fold, dilated": (lambda x: ops.col2im(x, pairs(6, 6), [2, 2], [2, 3], [1, 0], [1, 1]), [f(2, 2, 4, 18)]),
    "largest of a volume": (lambda x: ops.adaptive_max_pool3d(x, (3, 4, 2)), [f(2, 2, 4, 4, 6)]),
    "places in a volume": (lambda x: ops.adaptive_max_pool3d(x, (3, 2, 4), True)[1], [f(2, 2, 4, 4, 6)]),
    "offsets": (DeformableOffsets((1, 1, 1, 1), (0, 0, 0, 0), (2, 2)), [f(2, 4, 6, 6), f(2, 12, 5, 5)]),
    "norm clipped": (lambda x: nn.ClipByNorm()(x, Tensor(1.5)), [f(4, 8)]),
    "windows": (lambda x: x * ops.bartlett_window(Tensor(8)) + ops.blackman_window(Tensor(8), False), [f(4, 8)]),
    "volume": (nn.ReflectionPad3d((1, 1, 2, 2, 1, 1)), [f(2, 2, 4, 4, 4)]),
}
WITHOUT_GRADIENT = {"rows added", "rows taken away", "rows exchanged", "places in a volume"}  # MindSpore has none
ROUNDED = dict.fromkeys(("norm clipped", "statistics", "deviations", "time first"), 1e-5)  # sums in another order


def _time_first(x, weight, bias):
    """`mint.conv_tbc`."""
    padded = np.pad(x, ((1, 1), (0, 0), (0, 0)))
    return sum(padded[k : k + 8] @ weight[k] for k in range(3)) + bias


WITHOUT_KERNEL = {  # and what NumPy gives
    "diag of a Cell": (nn.MatrixDiag(), [f(2, 4)], lambda x: x[..., None] * np.eye(4)),
    "part of a Cell": (nn.MatrixDiagPart(), [f(2, 4, 4)], lambda x: np.diagonal(x, 0, 1, 2)),
    "set by a Cell": (
        nn.MatrixSetDiag(), [f(2, 4, 4), f(2, 4)], lambda x, d: np.where(np.eye(4, dtype=bool), d[..., None], x)
    ),
    "index": (lambda x: x.index([pairs(3, 0)]), [f(4, 8)], lambda x: x[[3, 0]]),
    "ones": (lambda x: x * x.new_ones((4, 8)) + x.new_full((8,), 1.5), [f(4, 8)], lambda x: x + 1.5),
    "statistics": (lambda x: mint.batch_norm_stats(x, 1.0)[0], [f(2, 4, 4, 4)], lambda x: x.mean((0, 2, 3))),
    "time first": (lambda x, w, b: mint.conv_tbc(x, w, b, 1), [f(8, 2, 4), f(3, 4, 6), f(6)], _time_first),
    "deviations": (
        lambda x: mint.batch_norm_stats(x, 1.0)[1], [f(2, 4, 4, 4)], lambda x: (x.var((0, 2, 3)) + 1) ** -0.5
    ),
}  # fmt: skip


EVERY = [*CALLS, *WITHOUT_KERNEL]
SLOPES = sorted(CALLS.keys() - WITHOUT_GRADIENT)


@pytest.mark.parametrize("name", daily(EVERY[::4], EVERY))
def test_each_dim_cut(name):
    function, arrays, *known = (CALLS | WITHOUT_KERNEL)[name]
    sample = Sample(name, function, tuple(arrays), terms=False, known=known[0] if known else None)
    verified(sample)
    eager(sample, rtol=ROUNDED.get(name, 0), atol=ROUNDED.get(name, 0) / 10)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", daily(SLOPES[1::4], SLOPES))
def test_gradients_are_those_of_the_operator(name):
    function, arrays = CALLS[name]
    cell = cell_of((lambda self, x: function(x)) if len(arrays) == 1 else (lambda self, x, y: function(x, y)))
    inputs = [Tensor(array) for array in arrays]
    places = tuple(range(len(arrays)))
    alone = ms.grad(lambda *given: mint.sin(cell(*given)).sum(), places)(*inputs)
    net = shard(copy_cell(cell), DeviceMesh((1,), ("tp",)))
    found = ms.grad(lambda *given: mint.sin(net(*given)).sum(), places)(*inputs)
    for gradient, expected in zip(found, alone, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), expected.asnumpy(), 1e-6, 1e-6)


def test_a_band_of_diagonals_is_refused():
    cell = cell_of(lambda self, x: ops.matrix_diag(x, Tensor([-1, 1], ms.int32)))
    with pytest.raises(ValueError, match=r"root Cell .*: a band of diagonals -1 to 1 is not available here"):
        verify(cell, MESH, Tensor(f(2, 3, 4)))
