"""Capture on a machine without the operators' kernels: shapes, created tensors, and errors with Cell and line."""

from queue import SimpleQueue

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from support.captured_models import Function
from support.small_cells import cell_of

from mindformers_core import verify
from mindformers_core.capture.capture import capture
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta

LINE = DeviceMesh((2,), ("tp",))
X, ROW = tensor_meta((2, 4), "float32"), tensor_meta((4,), "int64")
CREATED = {
    "arange": (lambda: mint.arange(4), np.arange(4)),
    "arange of floats": (lambda: mint.arange(0, 1, 0.25), np.arange(0, 1, 0.25, np.float32)),
    "arange of a dtype": (lambda: mint.arange(5, 1, -2, dtype=ms.float16), np.array([5, 3], np.float16)),
    "full": (lambda: mint.full((2, 4), 1.5), np.full((2, 4), 1.5, np.float32)),
    "full of an int": (lambda: mint.full((4,), 3), np.full(4, 3)),
    "linspace": (lambda: mint.linspace(0.0, 1.0, 4), np.linspace(0, 1, 4, dtype=np.float32)),
    "tril": (lambda: mint.tril(mint.full((4, 4), True), -1), np.tri(4, k=-1, dtype=bool)),
    "outer": (lambda: mint.outer(mint.arange(2), mint.arange(3)), np.outer(np.arange(2), np.arange(3))),
}


@pytest.mark.parametrize("name", CREATED)
def test_tensors_created_without_a_kernel(name):
    create, expected = CREATED[name]
    found = SimpleQueue()  # of C: a list would be Python that construct reads
    capture(Function(lambda x: found.put(create()) or x), X)
    array = found.get().asnumpy()
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


SHAPES = {
    "any": (lambda x: mint.any(x > 0, -1), (X,), (2,), "bool"),
    "any, kept": (lambda x: mint.any(x > 0, 1, True), (X,), (2, 1), "bool"),
    "bincount": (lambda x: mint.bincount(x, None, 5), (ROW,), (5,), "int64"),
    "bincount of weights": (lambda x, w: mint.bincount(x, w[0], 5), (ROW, X), (5,), "float32"),
    "embedding": (lambda x, i: ops.EmbeddingLookup()(x, i, 0), (X, ROW), (4, 4), "float32"),
    "gelu": (lambda x: mint.npu_gelu(x, "tanh"), (X,), (2, 4), "float32"),
    "vdot": (lambda x: mint.vdot(x[0], x[1]), (X,), (), "float32"),
    "unpermute": (lambda x, i: ops.moe_token_unpermute(x, i[:2], x[:1, :2]), (X, ROW), (1, 4), "float32"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_operators_without_a_meta_kernel(name):
    function, inputs, shape, dtype = SHAPES[name]
    result = capture(Function(function), *inputs).result
    assert (tuple(result.shape), result.dtype) == (shape, dtype)


def test_a_model_with_positions_and_a_mask():
    """One that CPU itself can't run: the program holds the constants."""

    def attend(self, x):
        allowed = mint.arange(4)[None, :] <= mint.arange(4)[:, None]
        causal = mint.tril(mint.full((4, 4), 1.0)) * mint.linspace(1.0, 2.0, 4)
        return mint.where(allowed, mint.matmul(x, x.transpose(-1, -2)) * causal, -1.0)

    x = Tensor(np.random.default_rng(1).standard_normal((2, 4, 4)).astype(np.float32))
    for cut in (("tp",), (None, "tp"), (None, None, "tp")):
        check = verify(cell_of(attend), LINE, x, plan={"": {"input": {"x": layout(*cut, *[None] * (3 - len(cut)))}}})
        assert not check.faults, check.report()
