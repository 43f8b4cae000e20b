"""RMS norm and rotary embedding as one operator each, with gradients that keep nothing but what they are given.

On CPU a factor that MindSpore broadcasts takes ten times as long as one of the same shape, and a sum or a permutation
of a row's elements ten times as long as a product of matrices: so all of these are products or gathers of rows. Devices
broadcast and add at no such cost, and round factors of float32 products: there, all is computed element by element.

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
    def __init__(self, eps, on_cpu):
        super().__init__(auto_prefix=False)
        self.eps, self.on_cpu = eps, on_cpu
        self.used_bprop_inputs = (0, 1, 3)

    def construct(self, x, weight):
        factors = _outer(self._inverse(_rows(x)), _row(weight), self.on_cpu)
        return _cast(_cast(x, ms.float32) * ops.reshape(factors, x.shape), x.dtype)

    def bprop(self, x, weight, out, dout):
        rows, slopes, row = _rows(x), _rows(dout), _row(weight)
        inverse, products = self._inverse(rows), slopes * rows
        shift = _of_each_row(products, row, self.on_cpu) * inverse * inverse * inverse * (1 / row.shape[1])
        of_rows = slopes * _outer(inverse, row, self.on_cpu)
        of_rows = of_rows - rows * _outer(shift, _ones(row.shape[1]), self.on_cpu)
        of_weight = _of_columns(inverse, products) if self.on_cpu else ops.sum(inverse * products, 0)
        return ops.reshape(_cast(of_rows, x.dtype), x.shape), _cast(ops.reshape(of_weight, weight.shape), weight.dtype)

    def _inverse(self, rows):
        """1 / the root mean square of each row, (rows, 1)."""
        squares = _of_each_row(rows * rows, _ones(rows.shape[1]), self.on_cpu)
        return ops.rsqrt(squares * (1 / rows.shape[1]) + self.eps)


class _Rotary(nn.Cell):
    def __init__(self, on_cpu):
        super().__init__(auto_prefix=False)
        self.on_cpu = on_cpu
        self.used_bprop_inputs = (1, 2, 4)

    def construct(self, x, cosines, sines):
        rows, cosines, sines = _rows(x), self._of_rows(cosines, x.shape), self._of_rows(sines, x.shape)
        if self.on_cpu:
            turned = _product(rows, _turn(x.shape[3]))
        else:
            first, second = _halves(rows)
            turned = ops.concat((ops.neg(second), first), 1)
        parts = ops.reshape(rows * cosines, x.shape), ops.reshape(turned * sines, x.shape)
        return _cast(parts[0] + parts[1], x.dtype)

    def bprop(self, x, cosines, sines, out, dout):
        rows = _rows(dout)
        turned = rows * self._of_rows(sines, dout.shape)
        if self.on_cpu:
            turned = _by_rows(turned, _turn(dout.shape[3]))
        else:
            first, second = _halves(turned)
            turned = ops.concat((second, ops.neg(first)), 1)
        of_rows = rows * self._of_rows(cosines, dout.shape) + turned
        return ops.reshape(_cast(of_rows, dout.dtype), dout.shape), ops.zeros_like(cosines), ops.zeros_like(sines)

    def _of_rows(self, table, shape):
        """The rows of a table for those of a tensor (batch, length, heads, size)."""
        if self.on_cpu:
            return ops.gather(_rows(table), _index(shape, table.shape), 0)
        return ops.reshape(ops.broadcast_to(table, shape), (-1, shape[3]))


@lru_cache(maxsize=32)
def _norm(eps):
    return _Norm(eps, _on_cpu())


@lru_cache(maxsize=1)
def _rotary():
    return _Rotary(_on_cpu())


def _on_cpu():
    with outside_of_meta():
        return ms.get_context("device_target") == "CPU"


def _outer(column, row, on_cpu):
    """The products of a column (n, 1) and a row (1, size)."""
    return _product(column, row) if on_cpu else column * row


def _of_each_row(rows, row, on_cpu):
    """The sum of each row's products with a row (1, size), as a column."""
    return _by_rows(rows, row) if on_cpu else ops.sum(rows * row, 1, keepdim=True)


def _halves(rows):
    half = rows.shape[1] // 2
    return rows[:, :half], rows[:, half:]


def _rows(x):
    return ops.reshape(_cast(x, ms.float32), (-1, x.shape[-1]))


def _row(weight):
    return ops.reshape(_cast(weight, ms.float32), (1, -1))


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
