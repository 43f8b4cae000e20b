"""What the samples are written with: small random tensors, every dim of an even size where that makes sense."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

__all__ = ["Constant", "names_for_samples"]


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor of a sample that is no input."""

    tensor: Tensor


def names_for_samples(seed=3):
    """Name -> function or module, for `eval` of a sample; all draw from one generator."""
    random = np.random.default_rng(seed)

    def f(*shape, dtype="float32"):
        """Floats of both signs, none near 0."""
        values = random.uniform(0.5, 2, shape) * random.choice([-1, 1], shape)
        return Tensor(np.asarray(values, np.float32)).astype(getattr(ms, dtype))

    def pos(*shape, least=0.1, most=0.9):
        """Positive floats."""
        return Tensor(np.asarray(random.uniform(least, most, shape), np.float32))

    def i(*shape, high=4, low=0, dtype="int32"):
        """Ints from `low` to below `high`."""
        return Tensor(np.asarray(random.integers(low, high, shape), dtype))

    def b(*shape):
        """Truth values."""
        return Tensor(np.asarray(random.random(shape) > 0.5))

    def c(*shape):
        """Complex numbers."""
        return Tensor(np.asarray(random.normal(size=shape) + 1j * random.normal(size=shape), np.complex64))

    def spd(*shape):
        """Symmetric positive definite matrices."""
        a = random.normal(size=shape)
        return Tensor(np.asarray(a @ a.swapaxes(-1, -2) + 4 * np.eye(shape[-1]), np.float32))

    def tri(*shape):
        """Lower triangular matrices with a large diagonal."""
        return Tensor(np.asarray(np.tril(random.normal(size=shape)) + 4 * np.eye(shape[-1]), np.float32))

    def rising(*shape):
        """Floats in ascending order along the last dim."""
        return Tensor(np.asarray(np.sort(random.normal(size=shape)), np.float32))

    def P(tensor):
        """A Parameter that the Cell owns."""
        return Parameter(tensor)

    def t(*values, dtype=None):
        """A tensor of the values given."""
        return Tensor(np.asarray(values, dtype))

    def k(value, dtype=None):
        """A constant of the Cell: its values are known when it is captured."""
        return Constant(Tensor(np.asarray(value, dtype or ("int64" if isinstance(value, int) else "float32"))))

    def perm(*shape):
        """Indices without repetition along the last dim."""
        rows = np.prod(shape[:-1], dtype=int)
        return Tensor(np.stack([random.permutation(shape[-1]) for _ in range(rows)]).reshape(shape).astype(np.int32))

    made = dict(f=f, pos=pos, i=i, b=b, c=c, spd=spd, tri=tri, rising=rising, P=P, t=t, k=k, perm=perm)
    return {**made, "ms": ms, "mint": ms.mint, "ops": ms.ops, "nn": ms.nn, "F": ms.mint.nn.functional, "np": np}
