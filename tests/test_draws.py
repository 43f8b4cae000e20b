"""Random draws: the numbers of each distribution, and the same ones on any mesh, in any mode, seeded or not."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from mindformers_core import verify
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.tensor_parallel import jit, shard

SHAPE = (8, 8)
ZERO, TWO = (Tensor(value, ms.float32) for value in (0.0, 2.0))
LOW, HIGH = (Tensor(value, ms.int32) for value in (-3, 4))
DRAWS = {  # functions of the tensor whose shape is drawn: without a tensor
    "ops.standard_normal": lambda x: ops.standard_normal(x.shape),
    "ops.rand": lambda x: ops.rand(*x.shape),
    "ops.randn": lambda x: ops.randn(*x.shape),
    "ops.randint": lambda x: ops.randint(-3, 4, x.shape),
    "ops.uniform": lambda x: ops.uniform(x.shape, ZERO, TWO),
    "ops.uniform of integers": lambda x: ops.uniform(x.shape, LOW, HIGH, dtype=ms.int32),
    "ops.normal": lambda x: ops.normal(x.shape, TWO, TWO),
    "ops.laplace": lambda x: ops.laplace(x.shape, TWO, TWO),
    "ops.randperm": lambda x: ops.randperm(x.shape[-1]),
    "mint.rand": lambda x: mint.rand(*x.shape),
    "mint.randn": lambda x: mint.randn(x.shape),
    "mint.randn, float16": lambda x: mint.randn(x.shape, dtype=ms.float16),
    "mint.randint": lambda x: mint.randint(-3, 4, x.shape),
    "mint.normal": lambda x: mint.normal(2.0, 2.0, x.shape),
    "mint.randperm": lambda x: mint.randperm(x.shape[-1]),
}
LIKE = {  # of a tensor
    "ops.rand_like": lambda x: ops.rand_like(x),
    "ops.bernoulli": lambda x: ops.bernoulli(x, 0.25),
    "ops.dropout2d": lambda x: ops.dropout2d(x.reshape(*x.shape, 1, 1), 0.25).reshape(x.shape),
    "ops.dropout3d": lambda x: ops.dropout3d(x.reshape(*x.shape, 1, 1, 1), 0.25).reshape(x.shape),
    "mint.rand_like": lambda x: mint.rand_like(x),
    "mint.randn_like": lambda x: mint.randn_like(x),
    "mint.randint_like": lambda x: mint.randint_like(x, -3, 4),
    "mint.normal": lambda x: mint.normal(x, 2.0),
    "mint.bernoulli": lambda x: mint.bernoulli(ops.sigmoid(x)),
    "mint.dropout2d": lambda x: mint.nn.functional.dropout2d(x.reshape(*x.shape, 1, 1), 0.25, True).reshape(x.shape),
}
EVERY = [*DRAWS.items(), *LIKE.items()]
MESHES = [((1,), ("dp",)), ((2,), ("dp",)), ((4,), ("dp",)), ((2, 2), ("dp", "tp"))]
WITHOUT_META = ("mint.dropout2d",)


class Noisy(nn.Cell):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.weight = ms.Parameter(Tensor(np.full(SHAPE, 0.25, np.float32)), name="weight")

    def construct(self, x):
        hidden = ops.matmul(x, self.weight)
        return hidden * ops.cast(self.draw(hidden), ms.float32) + self.draw(hidden)


def array():
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def cut(mesh):
    """A plan that cuts the input over all axes."""
    return {"": {"input": {"x": Layout.on(mesh, [(axis,) for axis in mesh.axis_names] + [()] * (2 - mesh.ndim))}}}


@pytest.mark.parametrize(("name", "draw"), EVERY, ids=[f"{place}.{name}" for place, (name, _) in enumerate(EVERY)])
@pytest.mark.parametrize("place", [1, 3])
def test_all_ranks_draw_their_parts_of_the_same_numbers(name, draw, place):
    mesh = DeviceMesh(*MESHES[place])
    check = verify(Noisy(draw), mesh, Tensor(array()), plan=cut(mesh))
    assert not check.faults, check.report()
    assert check.compared > 30


def numbers(draw, mode, seeded):
    """Two calls of a draw on a mesh of one rank."""
    mesh = init_device_mesh((1,), ("dp",))
    net = shard(Noisy(draw), mesh, plan=cut(mesh), mode="eager" if mode == "eager" else "generated")
    call = jit(net) if mode == "jit" else net
    ms.manual_seed(5 if seeded else 0)  # 0: as it is at the start
    results = [call(Tensor(array())) for _ in range(2)]
    return [(result.full_tensor() if hasattr(result, "full_tensor") else result).asnumpy() for result in results]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "draw"), EVERY, ids=[f"{place}.{name}" for place, (name, _) in enumerate(EVERY)])
def test_all_modes_draw_the_same_numbers(name, draw):
    first, second = numbers(draw, "generated", True)
    assert np.abs(first - second).max() > 0
    assert np.abs(first - numbers(draw, "generated", False)[0]).max() > 0
    for mode in ("eager", "jit"):
        for found, expected in zip(numbers(draw, mode, True), (first, second), strict=True):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
