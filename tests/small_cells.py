"""Small Cells for the tests of declarations and of `shard()`."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops


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
