"""Batch norm in training, of a rank's part of a batch or of all parts together, by few passes over the tensor.

On CPU an operator of a tensor and one number a channel takes ten times one of equal shapes; `BatchNorm` with known
statistics doesn't, and products with ones add rows quickly. So large tensors meet these operators alone.
"""

import math

from mindspore import dtype as mstype, ops
from mindspore.ops.auto_generate import BatchNormGrad

from mindformers_core.algorithms.compiled import on_cpu
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
    if x.dtype == mstype.float64:
        mean, variance = _moments(x)
        return apply_factors(x, ops.rsqrt(variance + epsilon) * scale, bias, mean), mean, variance
    running = ops.zeros_like(scale), ops.ones_like(scale)  # with momentum 0 the kernel writes the same values into them
    y, _, _, mean, variance = ops.BatchNorm(True, epsilon, 0.0)(_planes(x), scale, bias, *running)
    if not on_cpu():  # other kernels keep other things for the gradient, as a reciprocal
        mean, variance = _moments(ops.stop_gradient(_planes(x)))
    return ops.reshape(y, x.shape), mean, variance


trained_batch_norm = custom_operator("TrainedBatchNorm", train_norm)


def _known_gradient(gradient, x, scale, mean, variance, epsilon):
    """The gradients of x, scale and bias by that of a norm of known statistics."""
    if x.dtype == mstype.float64 or not on_cpu():
        deviation, zeros = ops.rsqrt(variance + epsilon), ops.zeros_like(mean)
        of_scale = _sums(gradient * channel_factors(x, deviation, zeros, mean))
        return channel_factors(gradient, scale * deviation, zeros, zeros), of_scale, _sums(gradient)
    given = _planes(gradient), _planes(x), scale, mean, variance, variance
    of_x, of_scale, of_bias = BatchNormGrad(False, epsilon)(*given)
    return ops.reshape(of_x, x.shape), of_scale, of_bias


def norm_of_parts(_, args, context):
    """`TrainedBatchNorm` by the moments of all parts, which are put together without a loss of digits (Chan, Golub and
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979).
    """
    x, scale, bias, epsilon = args
    _, center, spread = trained_batch_norm(x, scale, bias, epsilon)
    part = _count(x.shape) / _count(context.shapes[0])
    mean = context.combined(center * part)
    variance = context.combined((spread + ops.square(center - mean)) * part)
    return channel_factors(x, ops.rsqrt(variance + epsilon) * scale, bias, mean), mean, variance


def gradient_of_parts(args, results, gradients, context):
    """The gradients of the tensor, scale and bias; statistics pass none on."""
    (x, scale, _, epsilon), (_, mean, variance), (gradient, *_) = args, results, gradients
    of_x, of_scale, of_bias = _known_gradient(gradient, x, scale, mean, variance, epsilon)
    deviation, count = ops.rsqrt(variance + epsilon), _count(context.shapes[0])
    factor = scale * deviation / count
    sums = context.combined(ops.stack((of_scale, of_bias)))
    along, center = factor * deviation * sums[0], factor * sums[1]
    return of_x - channel_factors(x, along, center, mean), of_scale, of_bias


def _moments(x):
    """Mean and variance (C,) of x (N, C, …)."""
    count = _count(x.shape)
    mean = _sums(x) / count
    centered = apply_factors(x, ops.ones_like(mean), ops.zeros_like(mean), mean)
    return mean, _sums(centered * centered) / count


def _planes(x):
    """x (N, C, …) with four dims, as `BatchNorm` takes it."""
    return x if x.ndim == 4 else ops.reshape(x, (*x.shape[:2], -1, 1))


def _sums(x):
    """The sums (C,) of x (N, C, …)."""
    rows = ops.reshape(x, (x.shape[0] * x.shape[1], -1))
    sums = ops.matmul(rows, ops.ones((rows.shape[1], 1), x.dtype))
    return ops.sum(ops.reshape(sums, x.shape[:2]), 0)


def _count(shape):
    """The number of elements of a channel."""
    return math.prod(shape) // shape[1]
