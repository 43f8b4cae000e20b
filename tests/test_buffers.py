"""Buffers and plain tensors of Cells, registered or attributes: read by every mode as on one card."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_core import verify
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.tensor_parallel import jit, shard


def array(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


class Scaled(nn.Cell):
    """A registered buffer that isn't saved, and one that is an index."""

    def __init__(self, offset):
        super().__init__()
        self.register_buffer("scale", Tensor(array(8, seed=1)), persistent=False)
        self.register_buffer("order", Tensor(np.int32([3, 0, 2, 1])))
        self.offset = offset

    def construct(self, x):
        return ops.gather(x * self.scale + self.offset, self.order, 0)


class Buffered(nn.Cell):
    """Two Cells that share a plain tensor; a mask of truth values; none at all."""

    def __init__(self):
        super().__init__()
        shared = Tensor(array(4, 8, seed=2))
        self.first, self.second = Scaled(shared), Scaled(shared)
        self.dense, self.mask = nn.Dense(8, 8), Tensor(np.eye(4, 8) > 0)
        self.register_buffer("nothing", None)

    def construct(self, x):
        hidden = self.second(self.dense(self.first(x)))
        hidden = hidden if self.nothing is None else hidden + self.nothing
        return ops.masked_fill(hidden, self.mask, 0.0)


@pytest.mark.parametrize("cut", [layout("dp", "tp"), layout("tp"), layout(None, "dp")], ids=str)
def test_they_are_read_as_on_one_card(cut):
    plan = {"": {"input": {"x": cut}}}
    check = verify(Buffered(), DeviceMesh((2, 2), ("dp", "tp")), Tensor(array(4, 8)), plan=plan)
    assert not check.faults, check.report()
    assert check.compared > 30


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["generated", "eager", "jit"])
def test_modes(mode):
    """Names stay, and a value that is written into a buffer afterwards is read."""
    net, x = Buffered(), Tensor(array(4, 8))
    names, truth = [name for name, _ in net.named_buffers()], net(x).asnumpy()
    shard(net, init_device_mesh((1,), ("dp",)), mode="eager" if mode == "eager" else "generated")
    assert [name for name, _ in net.named_buffers()] == names
    call = jit(net) if mode == "jit" else net

    def result():
        found = call(x)
        return (found if mode == "jit" else found.full_tensor()).asnumpy()

    np.testing.assert_allclose(result(), truth, 1e-5, 1e-6)
    for buffer in (net.first.scale, net.second.scale):
        buffer.copy_(Tensor(np.zeros(8, np.float32)))
    np.testing.assert_allclose(result(), np.where(np.eye(4, 8) > 0, 0, array(4, 8, seed=2)[[3, 0, 2, 1]]), 1e-5, 1e-6)
