"""Small Cells: one of a function and parts, and some for the tests of declarations and of `shard()`."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

__all__ = ["Dense", "Doubled", "FeedForward", "Linear", "Net", "cell_of"]


def cell_of(construct, **parts):
    """A Cell with this `construct(self, ...)`, which its class is named after, and these attributes."""
    name = construct.__name__ if construct.__name__.isidentifier() else "Cell"
    cell = type(name, (nn.Cell,), {"construct": construct})()
    for name, part in parts.items():
        setattr(cell, name, part)
    return cell


class Doubled(nn.Cell):
    """Has a gradient of its own."""

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (dout * 2,)


class Dense(nn.Cell):
    """The linear layer of the seed, with classic primitives."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((inputs, outputs), np.float32)))
        self.bias = Parameter(Tensor(np.zeros(outputs, np.float32)))
        self.matmul, self.add = ops.MatMul(), ops.Add()

    def construct(self, x):
        return self.add(self.matmul(x, self.weight), self.bias)


class FeedForward(nn.Cell):
    """The model of the seed."""

    def __init__(self, dense=Dense):
        super().__init__()
        self.flatten, self.relu = ops.Flatten(), ops.ReLU()
        self.dense1, self.dense2 = dense(28 * 28, 64), dense(64, 10)

    def construct(self, x):
        return self.dense2(self.relu(self.dense1(self.flatten(x))))


class Linear(nn.Cell):
    """`x @ weight + bias`, and a hook that returns what it was made with."""

    def __init__(self, hook=(None, None, None)):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((8, 8), np.float32)))
        self.bias = Parameter(Tensor(np.zeros(8, np.float32)))
        self.hook = hook

    def shard(self, config=None):
        return self.hook(config) if callable(self.hook) else self.hook

    def construct(self, x, scale=None):
        self.seen = {"x": x, "weight": self.weight, "scale": scale}
        y = ops.matmul(x, self.weight) + self.bias
        return y if scale is None else y * scale


class Net(nn.Cell):
    """Two linear Cells, one in a list and one in a sequence."""

    def __init__(self, *hooks):
        super().__init__()
        hooks = hooks or ((None, None, None),) * 2
        self.layers = nn.CellList([Linear(hooks[0])])
        self.rest = nn.SequentialCell([Linear(hooks[1]), nn.ReLU()])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.rest(x)
