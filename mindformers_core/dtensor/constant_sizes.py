"""Operators whose sizes, offsets or paddings are constant tensors, made of operators that know their shapes."""

import numpy as np
from mindspore import Tensor, mint, ops

__all__ = ["conv_tbc", "expand", "matrix_diag", "matrix_diag_part", "matrix_set_diag", "mirrored"]


def _numbers(argument):
    """The values of a constant tensor, or of what are numbers already."""
    return np.asarray(argument.asnumpy() if isinstance(argument, Tensor) else argument).tolist()


def _offset(k):
    """The one diagonal that `k` says: above the main one where it is positive."""
    first, *others = np.atleast_1d(_numbers(k)).tolist()
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
    k, (rows, columns) = _offset(k), (np.ravel(_numbers(count)).tolist()[0] for count in (rows, columns))
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


def expand(x, size):
    """The result of `Expand`."""
    return ops.broadcast_to(x, tuple(_numbers(size)))


def conv_tbc(x, weight, bias=None, pad=0):
    """The result of `ConvTbc`: (time, batch, channels) with weights (kernel, channels in, channels out)."""
    x, weight = ops.transpose(x, (1, 2, 0)), ops.transpose(weight, (2, 1, 0))
    return ops.transpose(ops.conv1d(x, weight, bias, 1, "pad", pad), (2, 0, 1))


def mirrored(x, paddings, mode="REFLECT"):
    """The result of `MirrorPad`."""
    pairs = _numbers(paddings)
    padded = [dim for dim, pair in enumerate(pairs) if any(pair)]
    if mode == "REFLECT" and padded[:1] in ([1], [2]) and x.ndim - padded[0] <= 2:  # what `pad` takes
        return ops.pad(x, tuple(size for pair in pairs[::-1][: x.ndim - padded[0]] for size in pair), "reflect")
    for dim in padded:
        places = np.pad(np.arange(x.shape[dim]), pairs[dim], mode.lower())
        x = ops.gather(x, Tensor(places), dim)
    return x
