"""`split()` on ranks: its three cases against the whole weight, drawn on one card from the same seed."""

import numpy as np
from mindspore import Tensor
from mindspore.common.initializer import Normal
from support.launch import on_ranks

from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.sharding.initialize import draw_slice
from mindformers_core.tensor_parallel import distribute_tensor
from mindformers_core.tensor_parallel.splitting import split

X = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
IDS = np.random.default_rng(2).integers(0, 8, (4, 3)).astype(np.int32)


def whole_weight(name, shape):
    return draw_slice(Normal(0.02), shape, tuple(slice(0, size) for size in shape), 0, f"{name}.weight")


@on_ranks(2)
def case_split_linear():
    """Row and column parallel, gathered and not, over all ranks."""
    expected = X @ whole_weight("linear", (6, 8)).T
    for axis in (0, 1):
        for gather_out in (True, False):
            y = split(Tensor(X), (8, 6), "linear", axis, num_partitions=2, gather_out=gather_out)
            is_sharded = axis == 1 and not gather_out
            assert y.shape == (4, 6) and y.layout == layout(None, "tp" if is_sharded else None).bind(y.mesh)
            np.testing.assert_allclose(y.full_tensor().asnumpy(), expected, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def case_split_embedding():
    """Every rank has half of the rows; a name gives other values."""
    for name in (None, "words"):
        y = split(Tensor(IDS), (8, 6), "embedding", num_partitions=2, name=name)
        np.testing.assert_array_equal(y.asnumpy(), whole_weight(name or "embedding", (8, 6))[IDS])


@on_ranks(4)
def case_split_on_one_axis_of_a_mesh():
    """A batch that is sharded over dp stays so."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    x = distribute_tensor(Tensor(X), layout("dp", None), mesh)
    for axis in (0, 1):
        y = split(x, (8, 6), "linear", axis, num_partitions=2, bias_attr="ones", mesh=mesh)
        assert y.layout == layout("dp", None).bind(mesh)
        expected = X @ whole_weight("linear", (6, 8)).T + 1
        np.testing.assert_allclose(y.full_tensor().asnumpy(), expected, rtol=1e-5, atol=1e-6)
