"""A small Cell of few operators, trained under `hsdp()` and on one card: what the cases of ZeRO compare."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindformers_core.communication import world
from mindformers_core.zero import hsdp, value_and_grad

SIZE = 64  # a weight takes four pages of memory


class Layer(nn.Cell):
    """A weight that is used, and perhaps one that isn't."""

    def __init__(self, random, idle):
        super().__init__()
        self.weight = Parameter(Tensor(random.normal(size=(SIZE, SIZE)).astype(np.float32) / 8), name="weight")
        if idle:
            self.idle = Parameter(Tensor(np.ones((SIZE, SIZE), np.float32)), name="idle")

    def construct(self, x):
        return ops.tanh(ops.matmul(x, self.weight))


class Tower(nn.Cell):
    """Three layers, of which the second may be left out; gives a loss, the sum over examples."""

    def __init__(self, frozen=(), idle=True):
        super().__init__()
        random = np.random.default_rng(3)
        self.layers = nn.CellList([Layer(random, idle) for _ in range(3)])
        self.scale = Parameter(
            Tensor(random.normal(size=(3, SIZE)).astype(np.float32)), name="scale"
        )  # cut along dim 1
        for number in frozen:
            self.layers[number].weight.requires_grad = False

    def construct(self, x, skipping=False, factor=1.0):
        for number in range(3):
            if not (skipping and number == 1):
                x = self.layers[number](x)
        return ops.square(x * self.scale.sum(0)).sum() * factor


def examples(seed=5):
    """A batch for each rank: what all ranks have, and this rank's part."""
    whole = np.random.default_rng(seed).normal(size=(4 * world().size, SIZE)).astype(np.float32)
    return Tensor(whole), Tensor(np.split(whole, world().size)[world().rank])


def _local(net, values):
    """This rank's part of whole values by path."""
    parts = dict(net.parameters_and_names())
    return {
        path: value[parts[path].layout.local_slices(parts[path].global_shape, world().rank)]
        for path, value in values.items()
    }


def values_of(net):
    """Copies of what optimizers see, by path."""
    return {path: parameter.asnumpy().copy() for path, parameter in net.parameters_and_names()}


def assert_equal(net, found, expected, label, rtol=1e-5, atol=1e-6):
    """Parts by path against whole values by path; `atol` is relative to the largest of a whole value, if above 1."""
    largest = {path: max(1, abs(value).max()) for path, value in expected.items()}
    expected = _local(net, expected)
    assert found.keys() == expected.keys(), label
    for path, value in found.items():
        np.testing.assert_allclose(value, expected[path], rtol, atol * largest[path], err_msg=f"{path}, {label}")


def train_tower(net, gradient_of, x, optimizer, steps=3, **kwargs):
    """Values after some steps, and gradients of the first, both by path."""
    parameters = net.trainable_params()
    update, paths = optimizer(parameters), {id(p): path for path, p in net.parameters_and_names()}
    for number in range(steps):
        _, gradients = gradient_of(x, **kwargs)
        if number == 0:
            first = {paths[id(p)]: g.asnumpy().copy() for p, g in zip(parameters, gradients, strict=True)}
        update(gradients)
    return values_of(net), first


def adam(parameters):
    """The optimizer of most cases."""
    return nn.Adam(parameters, 0.01, eps=0.1)  # a smaller eps would make the last digits of small gradients large


def train_alone(whole, optimizer=adam, net=None, **kwargs):
    """`train_tower` on this rank alone, as MindSpore does it."""
    net = Tower() if net is None else net
    gradient_of = ms.value_and_grad(net, None, ms.ParameterTuple(net.trainable_params()))
    return train_tower(net, gradient_of, whole, optimizer, **kwargs)


def check_tower(optimizer, label, frozen=(), kwargs=(), expected=None, **settings):
    """A tower under `hsdp()`, gradients summed, trains as one card does on all ranks' examples."""
    whole, mine = examples()
    values, first = train_alone(whole, optimizer, Tower(frozen), **(kwargs := dict(kwargs)))
    net = hsdp(Tower(frozen), **{"threshold": 0, "gradients_mean": False, **settings})
    found = train_tower(net, value_and_grad(net), mine, optimizer, **kwargs)
    assert_equal(net, found[1], first, f"gradients, {label}, {settings}")
    assert_equal(net, found[0], values, f"{label}, {settings}")
    return net
