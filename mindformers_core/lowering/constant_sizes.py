"""Operators whose sizes, offsets or paddings are constant tensors, made of operators that know their shapes."""

import math

import numpy as np
from mindspore import Tensor, dtype as mstype, mint, ops

from mindformers_core.operators.rules.dims import per_dim


def numbers(argument):
    """The values of a constant tensor, or of what are numbers already."""
    return np.asarray(argument.asnumpy() if isinstance(argument, Tensor) else argument).tolist()


def _offset(k):
    """The one diagonal that `k` says: above the main one where it is positive."""
    first, *others = np.atleast_1d(numbers(k)).tolist()
    if others not in ([], [first]):
        raise ValueError(f"a band of diagonals {first} to {others[0]} is not available here: take them one by one")
    return first


def _on_diagonal(values, rows, columns, k, elsewhere):
    """Matrices with values (…, length of the diagonal) on diagonal `k`."""
    length = values.shape[-1]
    if (rows, k) != (length, 0):
        values = ops.gather(values, Tensor(np.clip(np.arange(rows) + min(k, 0), 0, length - 1)), values.ndim - 1)
    return ops.where(Tensor(np.eye(rows, columns, k, dtype=bool)), ops.expand_dims(values, -1), elsewhere)


def matrix_diag(x, k, rows, columns, padding):
    """The result of `MatrixDiagV3`; a number of rows or columns of -1 is the least one, of both the same."""
    k, (rows, columns) = _offset(k), (np.ravel(numbers(count)).tolist()[0] for count in (rows, columns))
    least = x.shape[-1] - min(k, 0), x.shape[-1] + max(k, 0)
    both = max(least) if rows == columns == -1 else -1
    given = [max(both, low) if count == -1 else count for count, low in zip((rows, columns), least)]
    return _on_diagonal(x, *given, k, padding)


def matrix_diag_part(x, k, padding):
    """The result of `MatrixDiagPartV3`: of each row the only element on the diagonal."""
    k, (rows, columns) = _offset(k), x.shape[-2:]
    first, length = -min(k, 0), min(rows + min(k, 0), columns - max(k, 0))
    picked = ops.where(Tensor(np.eye(rows, columns, k, dtype=bool)), x, ops.zeros_like(x))
    return mint.narrow(mint.sum(picked, -1, dtype=x.dtype), -1, first, length)


def matrix_set_diag(x, diagonal, k):
    """The result of `MatrixSetDiagV3`."""
    return _on_diagonal(diagonal, *x.shape[-2:], _offset(k), x)


def col2im(x, size, kernel_size, dilation=1, padding=0, stride=1):
    """The result of `Col2Im`: (n, c, places in a window, windows) added up to images."""
    given = [per_dim(value, 2) for value in (kernel_size, dilation, padding, stride)]
    rows, columns = (
        np.add.outer(np.arange(k) * d - p, np.arange((n + 2 * p - d * (k - 1) - 1) // s + 1) * s)
        for n, k, d, p, s in zip(numbers(size), *given)
    )
    rows, columns = rows[:, None, :, None], columns[None, :, None, :]
    height, width = numbers(size)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = Tensor(np.where(inside, rows * width + columns, height * width).ravel().astype(np.int32))
    windows = ops.reshape(ops.transpose(x, (2, 3, 0, 1)), (-1, *x.shape[:2]))
    added = ops.unsorted_segment_sum(windows, places, height * width + 1)[: height * width]
    return ops.reshape(ops.transpose(added, (1, 2, 0)), (*x.shape[:2], height, width))


def adaptive_max_pool_3d(x, size):
    """Results of `AdaptiveMaxPool3D`: the largest elements of windows that overlap by one at most, and their places."""
    sizes, places = [old if new < 0 else new for old, new in zip(x.shape[-3:], numbers(size))], 0
    for dim, (old, new) in enumerate(zip(x.shape[-3:], sizes)):
        first, last = np.arange(new) * old // new, -(np.arange(1, new + 1) * -old // new) - 1
        window = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
        places = places * old + np.expand_dims(window, [axis for axis in range(6) if axis not in (dim, dim + 3)])
    places = places.reshape(math.prod(sizes), -1).astype(np.int32)
    windows = ops.gather(ops.reshape(x, (*x.shape[:-3], -1)), Tensor(places), x.ndim - 3)
    value, found = ops.max(windows, -1)
    found = ops.cast(found, mstype.int32) + Tensor(np.arange(len(places), dtype=np.int32) * places.shape[1])
    index = ops.gather(Tensor(places.ravel()), ops.stop_gradient(found), 0)
    return tuple(ops.reshape(result, (*x.shape[:-3], *sizes)) for result in (value, index))


def window(values, length, periodic=True, dtype=mstype.float32):
    """The result of `BartlettWindow`, `BlackmanWindow`: `values` are NumPy's of a symmetric window."""
    length = numbers(length)
    return Tensor(values(length + periodic)[:length] if length > 1 else np.ones(length), dtype)


def conv_tbc(x, weight, bias=None, pad=0):
    """The result of `ConvTbc`: (time, batch, channels) with weights (kernel, channels in, channels out)."""
    x, weight = ops.transpose(x, (1, 2, 0)), ops.transpose(weight, (2, 1, 0))
    return ops.transpose(ops.conv1d(x, weight, bias, 1, "pad", pad), (2, 0, 1))


def mirrored(x, paddings, mode="REFLECT"):
    """The result of `MirrorPad`."""
    pairs = numbers(paddings)
    padded = [dim for dim, pair in enumerate(pairs) if any(pair)]
    if mode == "REFLECT" and padded[:1] in ([1], [2]) and x.ndim - padded[0] <= 2:  # what `pad` takes
        return ops.pad(x, tuple(size for pair in pairs[::-1][: x.ndim - padded[0]] for size in pair), "reflect")
    for dim in padded:
        places = np.pad(np.arange(x.shape[dim]), pairs[dim], mode.lower())
        x = ops.gather(x, Tensor(places), dim)
    return x
