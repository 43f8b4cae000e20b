"""Distributed algorithms of norms, variances, products and diagonals; see `distributed_operators`.

Each computes from the local tensor what one card would, with reductions of as many numbers as the result has. They
don't call the operator that they replace, except for the product.
"""

import functools
import math

from mindspore import dtype as mstype, ops


def norm(_, args, context):
    """The root of the sum of all parts' powers. Where it is 0, so is its gradient.

    Args:
        args: the tensor, the order (a finite number, not 0), the dims, and whether they are kept.
    """
    x, order, dims, keepdim = args
    large = wide(x)
    powers = large * large if order == 2 else ops.abs(large) if order == 1 else ops.pow(ops.abs(large), order)
    total = context.combined(ops.sum(powers, dims, keepdim))
    return ops.cast(total if order == 1 else _power(total, 1 / order), x.dtype)


def spread(root, with_mean, _, args, context):
    """The variance, or its root, by the mean of all parts; and the mean. The shifted sum loses no digits.

    The gradient through the mean that is subtracted is 0, since differences from a mean add up to 0.

    Args:
        args: the tensor, the correction, the dims, and whether they are kept.
    """
    x, correction, dims, keepdim = args
    large, count = wide(x), math.prod(context.shapes[0][dim] for dim in dims)
    mean = context.combined(ops.sum(large, dims, True)) / count
    differences = large - ops.stop_gradient(mean)
    result = context.combined(ops.sum(differences * differences, dims, keepdim)) / max(count - correction, 0)
    result = ops.cast(ops.sqrt(result) if root else result, x.dtype)
    return (result, ops.cast(ops.reshape(mean, result.shape), x.dtype)) if with_mean else result


def group_norm(operator, args, context):
    """The normalised tensor, and every group's mean and reciprocal standard deviation, which pass no gradient on."""
    x, groups, weight, bias, epsilon = (*args, *(None, None, 1e-5)[len(args) - 2 :])
    parts = wide(ops.reshape(x, (x.shape[0], groups, -1)))
    count = parts.shape[2] * context.count
    mean = context.combined(ops.sum(parts, 2, keepdim=True), varying=True) / count
    centred = parts - mean
    variance = context.combined(ops.sum(ops.square(centred), 2, keepdim=True), varying=True) / count
    scale, channels = ops.rsqrt(variance + epsilon), (1, -1) + (1,) * (x.ndim - 2)
    y = ops.reshape(centred * scale, x.shape)
    y = y if weight is None else y * ops.reshape(weight, channels)
    y = y if bias is None else y + ops.reshape(bias, channels)
    moments = (ops.reshape(ops.stop_gradient(each), x.shape[:1] + (groups,)) for each in (mean, scale))
    return tuple(ops.cast(each, x.dtype) for each in (y, *moments))


def product(operator, args, context):
    """The product of all parts' products, which are gathered: the gradient is right where one of them is 0."""
    local = ops.expand_dims(operator(*args), 0)
    return functools.reduce(ops.mul, ops.unstack(context.gathered(local, 0)))


def band(_, args, context):
    """A band of the matrices in the last two dims, whose parts know where they begin: zero elsewhere.

    Args:
        args: the tensor, and the lowest and highest number of a diagonal that is kept, or None.
    """
    x, *limits = args
    above = context.positions(x.ndim - 1) - context.positions(x.ndim - 2)
    compared = zip((ops.greater_equal, ops.less_equal), limits)
    kept = [compare(above, limit) for compare, limit in compared if limit is not None]
    return ops.where(functools.reduce(ops.logical_and, kept), x, ops.zeros_like(x)) if kept else x


def trace(_, args, context):
    """The sum of the part of a diagonal that is here: a term.

    Args:
        args: the tensor, the number of the diagonal, and the dims of rows and columns.
    """
    x, offset, rows, columns = args
    kept = ops.equal(context.positions(columns) - context.positions(rows), offset)
    return ops.sum(ops.where(kept, x, ops.zeros_like(x)), (rows, columns))


def wide(x):
    """In half precision the tensor in float32, in which its squares and sums are in range."""
    return ops.cast(x, mstype.float32) if x.dtype in (mstype.float16, mstype.bfloat16) else x


def _power(x, exponent):
    """`x ** exponent`, whose gradient at 0 is 0."""
    zero = ops.equal(x, 0)
    root = ops.where(zero, ops.ones_like(x), x)
    root = ops.sqrt(root) if exponent == 0.5 else ops.pow(root, exponent)
    return ops.where(zero, ops.zeros_like(x), root)
