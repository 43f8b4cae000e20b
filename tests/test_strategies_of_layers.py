"""Strategies set through the method `shard` of MindSpore's own layers."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindformers_core import shard, verify
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.declare import copy_cell

LINE = DeviceMesh((2,), ("tp",))
IMAGE = np.random.default_rng(5).standard_normal((2, 4, 8, 8)).astype(np.float32)


def test_layers_with_a_method_called_shard():
    """MindSpore's own is no hook, and its strategy is that of the layer's operator."""
    layers = nn.SequentialCell(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2dTranspose(4, 4, 2, stride=2, has_bias=True))
    plan, image = {"": {"input": {"input_data": layout(None, None, "tp")}}}, Tensor(IMAGE)
    check = verify(layers, LINE, image, plan=plan)
    assert not check.faults, check.report()
    expected, loss = layers(image).asnumpy(), lambda net: ms.value_and_grad(lambda x: net(x).sum(), 0)

    def run(mode, out):
        net = shard(copy_cell(layers), LINE, mode=mode)
        result = net(image)
        assert result.layout.dims[0] == out
        gradient = loss(net)(image)[1].asnumpy()
        np.testing.assert_allclose(gradient, loss(layers)(image)[1].asnumpy(), 1e-5, 1e-5)
        return result.full_tensor().asnumpy()

    for mode in ("eager", "generated"):
        for found in SimulatedRanks(2).run(lambda rank, mode=mode: run(mode, ())):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    layers[2].shard(((2, 1, 1, 1), (1, 1, 1, 1)))
    for found in SimulatedRanks(2).run(lambda rank: run("generated", ("tp",))):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    check = verify(layers, LINE, image)
    assert not check.faults, check.report()
    layers[2].shard(((1, 1, 3, 1), (1, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"Cell '2' \(Conv2dTranspose\), operator 'conv2d_transpose'"):
        verify(layers, LINE, image)
