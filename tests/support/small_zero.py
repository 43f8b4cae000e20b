"""A small Cell for the tests of `hsdp()` in one process, and what MindSpore alone makes of it."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

both_modes = pytest.mark.parametrize("compiled", [False, True], ids=["pynative", "jit"])


def array(*shape, seed=0):
    """Values between -1 and 1, float32."""
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


class Linear(nn.Cell):
    """`x @ weight`; declares the layout of the weight that it was made with."""

    def __init__(self, declared, seed):
        super().__init__()
        self.weight = Parameter(Tensor(array(8, 8, seed=seed)), name="weight")
        self.declared = declared

    def shard(self, config=None):
        return None, None, {"weight": self.declared}

    def construct(self, x):
        return ops.matmul(x, self.weight)


class Net(nn.Cell):
    """Two linear Cells, a norm and a projection; gives the mean square, the loss."""

    def __init__(self, first=None, second=None):
        super().__init__()
        self.first, self.second = Linear(first, 1), Linear(second, 2)
        self.rest = nn.SequentialCell(
            [nn.LayerNorm((8,)), nn.Dense(8, 4, weight_init=Tensor(array(4, 8, seed=3)), bias_init="zeros")]
        )

    def construct(self, x):
        return self.rest(ops.tanh(self.second(ops.tanh(self.first(x))))).square().mean()


def inputs(seed=10):
    return Tensor(array(4, 8, seed=seed))


def expected(net, *inputs, **kwargs):
    """What MindSpore gives: loss, and gradients by name, arrays."""
    parameters = net.trainable_params()
    results, gradients = ms.value_and_grad(net, None, ms.ParameterTuple(parameters), has_aux=False)(*inputs, **kwargs)
    loss = results[0] if isinstance(results, tuple) else results
    return loss.asnumpy(), [gradient.asnumpy() for gradient in gradients]


def check(found, loss, gradients, rtol=1e-6):
    results, found = found
    np.testing.assert_allclose((results[0] if isinstance(results, tuple) else results).asnumpy(), loss, rtol=rtol)
    for one, other in zip(found, gradients, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other, rtol=rtol, atol=rtol)
