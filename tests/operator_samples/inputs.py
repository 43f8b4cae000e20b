"""What the samples are written with: small random tensors, every dim of an even size where that makes sense."""

from dataclasses import dataclass
from functools import partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

__all__ = ["Constant", "names_for_samples"]


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor of a sample that is no input."""

    tensor: Tensor


class _Draws:
    """The functions, which all draw from one generator."""

    def __init__(self, seed, stretch=1):
        self._random, self._stretch = np.random.default_rng(seed), stretch

    def _long(self, shape):
        return (*shape[:-1], shape[-1] * self._stretch) if shape else ()

    def f(self, *shape, dtype="float32"):
        """Floats of both signs, none near 0."""
        shape = self._long(shape)
        values = self._random.uniform(0.5, 2, shape) * self._random.choice([-1, 1], shape)
        return Tensor(np.asarray(values, np.float32)).astype(getattr(ms, dtype))

    def pos(self, *shape, least=0.1, most=0.9):
        """Positive floats."""
        shape = self._long(shape)
        return Tensor(np.asarray(self._random.uniform(least, most, shape), np.float32))

    def i(self, *shape, high=4, low=0, dtype="int32"):
        """Ints from `low` to below `high`."""
        shape = self._long(shape)
        return Tensor(np.asarray(self._random.integers(low, high, shape), dtype))

    def b(self, *shape):
        """Truth values."""
        shape = self._long(shape)
        return Tensor(np.asarray(self._random.random(shape) > 0.5))

    def c(self, *shape):
        """Complex numbers."""
        shape = self._long(shape)
        return Tensor(np.asarray(self._random.normal(size=(*shape, 2)) @ (1, 1j), np.complex64))

    def spd(self, *shape):
        """Symmetric positive definite matrices."""
        half = self._random.normal(size=shape)
        return Tensor(np.asarray(half @ half.swapaxes(-1, -2) + 4 * np.eye(shape[-1]), np.float32))

    def tri(self, *shape):
        """Lower triangular matrices with a large diagonal."""
        return Tensor(np.asarray(np.tril(self._random.normal(size=shape)) + 4 * np.eye(shape[-1]), np.float32))

    def rising(self, *shape):
        """Floats in ascending order along the last dim."""
        shape = self._long(shape)
        return Tensor(np.asarray(np.sort(self._random.normal(size=shape)), np.float32))

    def perm(self, *shape):
        """Indices without repetition along the last dim."""
        return Tensor(np.argsort(self._random.random(shape)).astype(np.int32))

    def t(self, *values, dtype=None):
        """A tensor of the values given."""
        return Tensor(np.asarray(values, dtype))

    def k(self, value, dtype=None):
        """A constant of the Cell: its values are known when it is captured."""
        return Constant(Tensor(np.asarray(value, dtype or ("int64" if isinstance(value, int) else "float32"))))


def names_for_samples(seed=3, stretch=1):
    """Name -> function or module, for `eval` of a sample; `P(tensor)` is a Parameter that the Cell owns.

    Last dims of numbers are `stretch` times as long.
    """
    draws = _Draws(seed, stretch)
    made = {name: getattr(draws, name) for name in vars(_Draws) if name[0] != "_"}
    return {
        **made,
        "P": partial(Parameter, requires_grad=False),
        "ms": ms,
        "mint": ms.mint,
        "ops": ms.ops,
        "nn": ms.nn,
        "np": np,
    }
