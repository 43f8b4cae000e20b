"""What operators on images (batch, channels, height, width) compute, in NumPy."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

__all__ = ["convolution", "group_norm", "pooling", "smooth_l1_loss"]


def _pair(value):
    return (value, value) if isinstance(value, int) else value


def _windows(x, kernel, mode, pad, stride, dilation=1):
    """(batch, channels, rows, columns, kernel height, kernel width); what is padded is 0."""
    (height, width), (down, right), (first, second) = _pair(kernel), _pair(stride), _pair(dilation)
    reach = [(size - 1) * step + 1 for size, step in ((height, first), (width, second))]
    if mode == "same":
        missing = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(x.shape[2:], (down, right), reach)]
        x = np.pad(x, [(0, 0), (0, 0), *((amount // 2, amount - amount // 2) for amount in missing)])
    elif mode == "pad":
        x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    return sliding_window_view(x, reach, (2, 3))[:, :, ::down, ::right, ::first, ::second]


def convolution(x, w, out_channel=0, kernel_size=1, mode=1, pad_mode="valid", pad=0, stride=1, dilation=1, group=1):
    """`ops.Conv2D`."""
    windows = np.split(_windows(x, w.shape[2:], pad_mode, pad, stride, dilation), group, 1)
    return np.concatenate([np.einsum("nchwij,ocij->nohw", *pair) for pair in zip(windows, np.split(w, group))], 1)


def pooling(reduce):
    """`ops.MaxPool`, `ops.AvgPool`, without padding."""

    def function(x, kernel_size, strides, *_, **__):
        return reduce(_windows(x, kernel_size, "valid", 0, strides), (-2, -1))

    return function


def group_norm(x, groups, weight, bias, eps):
    """`ops.group_norm`, and the mean and reciprocal standard deviation of every group."""
    parts = x.reshape(len(x), groups, -1)
    mean, scale = parts.mean(-1), 1 / np.sqrt(parts.var(-1) + eps)
    normed = ((parts - mean[..., None]) * scale[..., None]).reshape(x.shape)
    return normed * weight[:, None, None] + bias[:, None, None], mean, scale


def smooth_l1_loss(x, target, beta, reduction):
    """`ops.smooth_l1_loss`; the reduction is the sum (0), the mean (1) or none (2)."""
    off = np.abs(x - target)
    loss = np.where(off < beta, off**2 / (2 * beta), off - beta / 2)
    return (np.sum, np.mean, lambda each: each)[reduction](loss)
