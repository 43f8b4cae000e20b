"""Batch norm in training, of a rank's part of a batch or of all parts together, by few passes over the tensor.

On CPU an operator of a tensor and one number a channel takes ten times one of equal shapes; `BatchNorm` with known
statistics doesn't, and products with ones add rows quickly. So large tensors meet these operators alone.
"""

import math

from mindspore import dtype as mstype, ops

from mindformers_core.algorithms.custom import custom_operator

_LITTLE = 2.0**-20  # an epsilon: with a variance of 1 - _LITTLE, which is exact, the factor is exactly 1
_known_norm = ops.BatchNorm(False, _LITTLE)


def apply_factors(x, factor, shift, center):
    """The operator `ChannelFactors`: x (N, C, …), and factor, shift and center (C,) → (x - center) · factor + shift."""
    if x.dtype == mstype.float64:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        factor, shift, center = (ops.reshape(each, shape) for each in (factor, shift, center))
        return (x - center) * factor + shift
    known = ops.stop_gradient(center)
    shift = shift - ops.stop_gradient(factor) * (center - known)  # the kernel's statistics get no gradient
    variance = ops.ones_like(known) - _LITTLE
    return ops.reshape(_known_norm(_planes(x), factor, shift, known, variance)[0], x.shape)


channel_factors = custom_operator("ChannelFactors", apply_factors)


def train_norm(x, scale, bias, epsilon):
    """The operator `TrainedBatchNorm`: x (N, C, …), scale and bias (C,) → the result, mean and variance (C,)."""
    count = _count(x.shape)
    if x.dtype == mstype.float64:
        mean, variance = _moments(x, _alone, count)
        return apply_factors(x, ops.rsqrt(variance + epsilon) * scale, bias, mean), mean, variance
    mean, variance = _moments(ops.stop_gradient(x), _alone, count)
    running = mean + 1, variance + 1  # tensors of its own: the kernel changes them in place
    y = ops.BatchNorm(True, epsilon)(_planes(x), scale, bias, *running)[0]
    return ops.reshape(y, x.shape), mean, variance


trained_batch_norm = custom_operator("TrainedBatchNorm", train_norm)


def norm_of_parts(_, args, context):
    """`TrainedBatchNorm` by the mean of all parts, and the squares of differences from it, which lose no digits."""
    x, scale, bias, epsilon = args
    mean, variance = _moments(x, context.combined, _count(context.shapes[0]))
    return channel_factors(x, ops.rsqrt(variance + epsilon) * scale, bias, mean), mean, variance


def gradient_of_parts(args, results, gradients, context):
    """The gradients of the tensor, scale and bias; statistics pass none on."""
    (x, scale, _, epsilon), (_, mean, variance), (gradient, *_) = args, results, gradients
    deviation, zeros, count = ops.rsqrt(variance + epsilon), ops.zeros_like(mean), _count(context.shapes[0])
    of_bias = _sums(gradient)
    of_scale = _sums(gradient * channel_factors(x, deviation, zeros, mean))
    factor, center = scale * deviation, context.combined(of_bias) / count
    along = factor * deviation * context.combined(of_scale) / count
    return channel_factors(gradient, factor, zeros, center) - channel_factors(x, along, zeros, mean), of_scale, of_bias


def _moments(x, combined, count):
    """Mean and variance (C,) of x (N, C, …), of which all parts have so many elements a channel."""
    mean = combined(_sums(x)) / count
    centered = channel_factors(x, ops.ones_like(mean), ops.zeros_like(mean), mean)
    return mean, combined(_sums(centered * centered)) / count


def _planes(x):
    """x (N, C, …) with four dims, as `BatchNorm` takes it."""
    return x if x.ndim == 4 else ops.reshape(x, (*x.shape[:2], -1, 1))


def _alone(local):
    return local


def _sums(x):
    """The sums (C,) of x (N, C, …)."""
    rows = ops.reshape(x, (x.shape[0] * x.shape[1], -1))
    sums = ops.matmul(rows, ops.ones((rows.shape[1], 1), x.dtype))
    return ops.sum(ops.reshape(sums, x.shape[:2]), 0)


def _count(shape):
    """The number of elements of a channel."""
    return math.prod(shape) // shape[1]
