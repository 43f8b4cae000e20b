"""Layers that come and go after `shard()`, and copies of sharded Cells."""

import copy
import pickle

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, value_and_grad
from test_python_state import X, number, pair

from mindformers_core import init_device_mesh, shard


class Row(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.CellList([nn.Dense(4, 4), nn.Dense(4, 4)]), nn.ReLU()

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).sum()


LAYERS = [
    lambda net: net.layers.append(nn.Tanh()),
    lambda net: net.layers.insert(0, nn.Sigmoid()),
    lambda net: net.layers.extend([nn.ReLU(), nn.Tanh()]),
    lambda net: net.layers.__setitem__(2, nn.Tanh()),
    lambda net: net.layers.__delitem__(0),
    lambda net: setattr(net, "last", nn.Tanh()),
    lambda net: net.layers.insert(1, net.layers[0]),
]


def test_layers_come_and_go():
    """Cells without Parameters, and those that were there before; with gradients of all Parameters."""
    net, single = pair(Row)
    for place, change in enumerate(LAYERS):
        found = []
        for each in (net, single):
            change(each)
            value, gradients = value_and_grad(each, None, each.trainable_params())(Tensor(X))
            found.append([number(value), *(gradient.asnumpy() for gradient in gradients)])
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6, err_msg=str(place))
    net.layers.append(nn.Dense(4, 4))
    with pytest.raises(ValueError, match=r"Cell 'layers.\d' \(Dense\) has come since shard.* build the model before"):
        net(Tensor(X))
    with pytest.raises(ValueError, match=r"Cell 'head' \(Dense\) has come since shard"):
        net.head = nn.Dense(4, 4)
    eager = shard(Row(), init_device_mesh((1,), ("dp",)), mode="eager")
    eager.layers.append(nn.Dense(4, 4))
    with pytest.raises(ValueError, match=r"Cell 'layers.2' \(Dense\) has come since shard"):
        eager(Tensor(X))


def test_a_copy_is_an_error_that_says_what_to_do():
    net, single = pair(Row)
    for function in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"the root Cell \(Row\) is sharded, and can't be copied .*load_param"):
            function(net)
    second, _ = pair(Row)
    ms.load_param_into_net(second, net.parameters_dict())
    assert number(second(Tensor(X))) == pytest.approx(number(single(Tensor(X))), rel=1e-6)
