"""Models that change values in place, and the same models without that."""

import numpy as np
from mindspore import Tensor, mint, nn, ops

__all__ = ["Noisy", "Sharing", "inputs"]


def inputs():
    """Two arrays."""
    return [np.random.default_rng(seed).normal(size=(4, 8)).astype(np.float32) for seed in range(2)]


class Changing(nn.Cell):
    """Changes its argument, and returns something else."""

    def construct(self, x):
        mint.nn.functional.relu_(x)
        return x.sum(1)


class Sharing(nn.Cell):
    """The argument of another Cell, a copied row, and a tensor that is made here and filled piece by piece."""

    def __init__(self, in_place=True):
        super().__init__()
        self.in_place, self.changing, self.dense = in_place, Changing(), nn.Dense(8, 8, has_bias=False)
        weight = np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)
        self.dense.weight.set_data(Tensor(weight))

    def construct(self, x, y):
        h = self.dense(x)
        first = ops.expand_dims(h[0], 0) * 1.0
        if self.in_place:
            sums = self.changing(h)
            made = mint.zeros((4, 8))
            made[:, 1:3] = h[:, :2]
            made.add_(y)
            made[0] = first[0]
        else:
            h = ops.relu(h)
            sums, zeros = h.sum(1), mint.zeros((4, 1))
            made = ops.cat([zeros, h[:, :2], mint.zeros((4, 5))], 1) + y
            made = ops.cat([first, made[1:]], 0)
        return h.reshape(-1).sum() * made * 0.1 + ops.expand_dims(sums, -1)


class Noisy(nn.Cell):
    """Draws into a tensor of its own, or into its argument."""

    def __init__(self, of_argument=False):
        super().__init__()
        self.of_argument = of_argument

    def construct(self, x):
        noise = x if self.of_argument else x * 0.0
        noise.normal_(0.0, 2.0)
        drawn = (x * 0.0).uniform_(1.0, 3.0)
        return x + noise * drawn
