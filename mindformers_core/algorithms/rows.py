"""RMS norm and rotary embedding as one operator each, with gradients that keep nothing but what they are given.

On CPU a factor that MindSpore broadcasts takes ten times as long as one of the same shape, and a sum or a permutation
of a row's elements ten times as long as a product of matrices: so all of these are products or gathers of rows.

Results are no views, of which each gradient would keep a copy.
"""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_core.mindspore_private import outside_of_meta

_product, _by_rows, _of_columns = ops.MatMul(), ops.MatMul(False, True), ops.MatMul(True, False)
_cast = ops.Cast()


def rms_norm(x, weight, eps):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dim, computed in float32, in the dtype of x."""
    return _norm(eps)(x, weight)


def rotate(x, cosines, sines):
    """`x * cosines + turned * sines`, where the halves (a, b) of each head are turned to (-b, a), in the dtype of x.

    Args:
        x: (batch, length, heads, size).
        cosines, sines: float32 (length, 1, size), or with a batch in front; constants, without a gradient.
    """
    return _rotary()(x, cosines, sines)


class _Norm(nn.Cell):
    def __init__(self, eps):
        super().__init__(auto_prefix=False)
        self.eps = eps
        self.used_bprop_inputs = (0, 1, 3)

    def construct(self, x, weight):
        factors = _product(_inverse(_rows(x), self.eps), _row(weight))
        return _cast(_cast(x, ms.float32) * ops.reshape(factors, x.shape), x.dtype)

    def bprop(self, x, weight, out, dout):
        rows, slopes, row = _rows(x), _rows(dout), _row(weight)
        inverse, products = _inverse(rows, self.eps), slopes * rows
        shift = _by_rows(products, row) * inverse * inverse * inverse * (1 / row.shape[1])
        of_rows = slopes * _product(inverse, row) - rows * _product(shift, _ones(row.shape[1]))
        of_weight = ops.reshape(_of_columns(inverse, products), weight.shape)
        return ops.reshape(_cast(of_rows, x.dtype), x.shape), _cast(of_weight, weight.dtype)


class _Rotary(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.used_bprop_inputs = (1, 2, 4)

    def construct(self, x, cosines, sines):
        rows, index = _rows(x), _index(x.shape, cosines.shape)
        cosines, sines = ops.gather(_rows(cosines), index, 0), ops.gather(_rows(sines), index, 0)
        turned = _product(rows, _turn(x.shape[3]))
        parts = ops.reshape(rows * cosines, x.shape), ops.reshape(turned * sines, x.shape)
        return _cast(parts[0] + parts[1], x.dtype)

    def bprop(self, x, cosines, sines, out, dout):
        rows, index = _rows(dout), _index(dout.shape, cosines.shape)
        both = ops.gather(_rows(cosines), index, 0), ops.gather(_rows(sines), index, 0)
        of_rows = rows * both[0] + _by_rows(rows * both[1], _turn(dout.shape[3]))
        return ops.reshape(_cast(of_rows, dout.dtype), dout.shape), ops.zeros_like(cosines), ops.zeros_like(sines)


_norm, _rotary = lru_cache(_Norm), lru_cache(_Rotary)


def _rows(x):
    return ops.reshape(_cast(x, ms.float32), (-1, x.shape[-1]))


def _row(weight):
    return ops.reshape(_cast(weight, ms.float32), (1, -1))


def _inverse(rows, eps):
    """1 / the root mean square of each row, (rows, 1)."""
    return ops.rsqrt(_by_rows(rows * rows, _ones(rows.shape[1])) * (1 / rows.shape[1]) + eps)


@lru_cache(maxsize=32)
def _ones(size):
    with outside_of_meta():
        return Tensor(np.ones((1, size), np.float32))


@lru_cache(maxsize=32)
def _index(shape, table):
    """Of each row of (batch, length, heads) its row of a table (length, 1, size) or (batch, length, 1, size)."""
    batch, length, heads, _ = shape
    places = np.arange(np.prod(table[:-2])).reshape(-1, length, 1)
    with outside_of_meta():
        return Tensor(np.broadcast_to(places, (batch, length, heads)).reshape(-1).astype(np.int32))


@lru_cache(maxsize=32)
def _turn(size):
    """What (a, b) is multiplied by to be (-b, a)."""
    half = np.eye(size // 2, dtype=np.float32)
    with outside_of_meta():
        return Tensor(np.block([[half * 0, half], [-half, half * 0]]))
