"""RMS norm and rotary embedding as one operator each, with gradients that keep nothing but what they are given.

On CPU a factor that MindSpore broadcasts takes ten times as long as one of the same shape, and a sum or a permutation
of a row's elements ten times as long as a product of matrices: so all of these are products or gathers of rows. Devices
broadcast and add at no such cost, and round factors of float32 products: there, all is computed element by element.

Results are no views, of which each gradient would keep a copy. In graphs they have a dim more in front, which is taken
off behind the Cell: all results of a Cell with a `bprop` would be those of its last call else (docs/mindspore.md).
"""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_core.algorithms.compiled import in_graph, on_cpu
from mindformers_core.mindspore_private import forbid_reuse, outside_of_meta

_product, _by_rows, _of_columns = ops.MatMul(), ops.MatMul(False, True), ops.MatMul(True, False)
_cast = ops.Cast()


def rms_norm(x, weight, eps):
    """`x / sqrt(mean(x²) + eps) * weight` over the last dim, in the dtype of x; computed in float32 or float64."""
    if in_graph():
        return ops.reshape(_norm(x.dtype, eps, (1,))(x, weight), x.shape)
    return _norm(x.dtype, eps)(x, weight)


def rotate(x, cosines, sines):
    """`x * cosines + turned * sines`, where the halves (a, b) of each head are turned to (-b, a), in the dtype of x.

    Args:
        x: (batch, length, heads, size).
        cosines, sines: float32 (length, 1, size), or with a batch in front; constants, without a gradient.
    """
    if in_graph():
        return ops.reshape(_rotary(x.dtype, (1,))(x, cosines, sines), x.shape)
    return _rotary(x.dtype)(x, cosines, sines)


class _OfRows(nn.Cell):
    """A Cell that computes rows. (A branch that both of its passes reach can't be compiled.)

    Args:
        dtype: in which it computes.
        front: 1s, the shape of what is in front of a result's dims.
    """

    def __init__(self, dtype, front=()):
        super().__init__(auto_prefix=False)
        self.dtype, self.front = dtype, front
        forbid_reuse(self)

    def rows(self, x):
        """All but the last dim of a tensor as one."""
        return ops.reshape(_cast(x, self.dtype), (-1, x.shape[-1]))


class _Norm(_OfRows):
    """RMS norm element by element."""

    def __init__(self, dtype, eps, front=()):
        super().__init__(dtype, front)
        self.eps = eps
        self.used_bprop_inputs = (0, 1, 3)

    def construct(self, x, weight):
        factors, shape = self.outer(self.inverse(self.rows(x)), self.rows(weight)), self.front + x.shape
        return _cast(ops.reshape(_cast(x, self.dtype), shape) * ops.reshape(factors, shape), x.dtype)

    def bprop(self, x, weight, out, dout):
        rows, slopes, row = self.rows(x), self.rows(dout), self.rows(weight)
        inverse, products = self.inverse(rows), slopes * rows
        shift = self.of_each_row(products, row) * inverse * inverse * inverse * (1 / row.shape[1])
        of_rows = slopes * self.outer(inverse, row) - rows * self.outer(shift, _ones(rows.shape[1], self.dtype))
        of_weight = ops.reshape(self.of_columns(inverse, products), weight.shape)
        return ops.reshape(_cast(of_rows, x.dtype), x.shape), _cast(of_weight, weight.dtype)

    def inverse(self, rows):
        """1 / the root mean square of each row, (rows, 1)."""
        return ops.rsqrt(
            self.of_each_row(rows * rows, _ones(rows.shape[1], self.dtype)) * (1 / rows.shape[1]) + self.eps
        )

    def outer(self, column, row):
        """The products of a column (n, 1) and a row (1, size)."""
        return column * row

    def of_each_row(self, rows, row):
        """The sum of each row's products with a row (1, size), as a column."""
        return ops.sum(rows * row, 1, keepdim=True)

    def of_columns(self, column, rows):
        """The sum of all rows' products with their numbers of a column (n, 1)."""
        return ops.sum(column * rows, 0)


class _NormOfProducts(_Norm):
    """The same by products of matrices."""

    def outer(self, column, row):
        return _product(column, row)

    def of_each_row(self, rows, row):
        return _by_rows(rows, row)

    def of_columns(self, column, rows):
        return _of_columns(column, rows)


class _Rotary(_OfRows):
    """Rotary embedding element by element."""

    def __init__(self, dtype, front=()):
        super().__init__(dtype, front)
        self.used_bprop_inputs = (1, 2, 4)

    def construct(self, x, cosines, sines):
        rows, shape = self.rows(x), self.front + x.shape
        straight, turned = rows * self.of_rows(cosines, x.shape), self.turned(rows) * self.of_rows(sines, x.shape)
        return _cast(ops.reshape(straight, shape) + ops.reshape(turned, shape), x.dtype)

    def bprop(self, x, cosines, sines, out, dout):
        rows, shape = self.rows(dout), dout.shape[-4:]
        of_rows = rows * self.of_rows(cosines, shape) + self.turned_back(rows * self.of_rows(sines, shape))
        return ops.reshape(_cast(of_rows, dout.dtype), shape), ops.zeros_like(cosines), ops.zeros_like(sines)

    def of_rows(self, table, shape):
        """The rows of a table for those of a tensor (batch, length, heads, size)."""
        return ops.reshape(ops.broadcast_to(table, shape), (-1, shape[3]))

    def turned(self, rows):
        half = rows.shape[1] // 2
        return ops.concat((ops.neg(rows[:, half:]), rows[:, :half]), 1)

    def turned_back(self, rows):
        half = rows.shape[1] // 2
        return ops.concat((rows[:, half:], ops.neg(rows[:, :half])), 1)


class _RotaryOfProducts(_Rotary):
    """The same by gathers of rows and products of matrices."""

    def of_rows(self, table, shape):
        return ops.gather(self.rows(table), _index(shape, table.shape), 0)

    def turned(self, rows):
        return _product(rows, _turn(rows.shape[1], self.dtype))

    def turned_back(self, rows):
        return _by_rows(rows, _turn(rows.shape[1], self.dtype))


@lru_cache(maxsize=32)
def _norm(dtype, eps, front=()):
    return (_NormOfProducts if on_cpu() else _Norm)(_wide(dtype), eps, front)


@lru_cache(maxsize=8)
def _rotary(dtype, front=()):
    return (_RotaryOfProducts if on_cpu() else _Rotary)(_wide(dtype), front)


def _wide(dtype):
    return ms.float64 if dtype == ms.float64 else ms.float32


@lru_cache(maxsize=32)
def _ones(size, dtype):
    with outside_of_meta():
        return Tensor(np.ones((1, size)), dtype)


@lru_cache(maxsize=32)
def _index(shape, table):
    """Of each row of (batch, length, heads) its row of a table (length, 1, size) or (batch, length, 1, size)."""
    batch, length, heads, _ = shape
    places = np.arange(np.prod(table[:-2])).reshape(-1, length, 1)
    with outside_of_meta():
        return Tensor(np.broadcast_to(places, (batch, length, heads)).reshape(-1).astype(np.int32))


@lru_cache(maxsize=32)
def _turn(size, dtype):
    """What (a, b) is multiplied by to be (-b, a)."""
    half = np.eye(size // 2)
    with outside_of_meta():
        return Tensor(np.block([[half * 0, half], [-half, half * 0]]), dtype)
