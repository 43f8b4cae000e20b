"""Norms over dims that are cut: mean and variance of all parts, by two sums."""

from mindspore import ops


def group_norm(operator, args, context):
    """The normalised tensor, and every group's mean and reciprocal standard deviation, which pass no gradient on."""
    x, groups, weight, bias, epsilon = (*args, *(None, None, 1e-5)[len(args) - 2 :])
    parts = ops.reshape(x, (x.shape[0], groups, -1))
    count = parts.shape[2] * context.count
    mean = context.combined(ops.sum(parts, 2, keepdim=True), varying=True) / count
    centred = parts - mean
    variance = context.combined(ops.sum(ops.square(centred), 2, keepdim=True), varying=True) / count
    scale, channels = ops.rsqrt(variance + epsilon), (1, -1) + (1,) * (x.ndim - 2)
    y = ops.reshape(centred * scale, x.shape)
    y = y if weight is None else y * ops.reshape(weight, channels)
    y = y if bias is None else y + ops.reshape(bias, channels)
    return y, *(ops.reshape(ops.stop_gradient(each), x.shape[:1] + (groups,)) for each in (mean, scale))
