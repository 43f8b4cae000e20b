"""Operators that are computed, and captured, as others: those that change an argument, or that know no shapes alone.

Batch norm in training is an operator that gives the statistics, too, those of all parts where a batch is cut, and its
running statistics are changed in place. On CPU, MindSpore's operator leaves two results unwritten.
"""

import math
from functools import partial

import numpy as np
from mindspore import Tensor, dtype as mstype, mint, ops

from mindformers_core.algorithms.batch_norm import (
    channel_factors,
    gradient_of_parts,
    norm_of_parts,
    trained_batch_norm,
)
from mindformers_core.lowering import constant_sizes as sizes
from mindformers_core.lowering.draws import DRAWN
from mindformers_core.lowering.in_place import scatter_update, written
from mindformers_core.lowering.indexing import index_tensor
from mindformers_core.lowering.split_lookup import split_by_attribute
from mindformers_core.mindspore_private import RecurrentLayers, type_id_to_type
from mindformers_core.operators import Algorithm, register_algorithm
from mindformers_core.operators.registry import facts_of, register_operator
from mindformers_core.operators.rules import normalization as rules


def batch_norm(x, scale, bias, mean, variance, is_training=False, epsilon=1e-5, momentum=0.1, data_format=0):
    """Results of `BatchNorm`: `y`, and the batch's mean and variance twice."""
    y, center, spread = _normalised(x, scale, bias, mean, variance, is_training, momentum, epsilon)
    return y, center, spread, center, spread


def batch_norm_ext(x, scale=None, bias=None, mean=None, variance=None, training=False, momentum=0.1, epsilon=1e-5):
    """Results of `BatchNormExt`: `y`, and the batch's mean and reciprocal standard deviation."""
    y, center, spread = _normalised(x, scale, bias, mean, variance, training, momentum, epsilon)
    return y, center, ops.rsqrt(spread + epsilon)


def _normalised(x, scale, bias, mean, variance, is_training, momentum, epsilon):
    """The result, and the mean and the variance of every channel, in float32 where `x` is narrower."""
    wide = x if x.dtype in (mstype.float32, mstype.float64) else ops.cast(x, mstype.float32)
    scale = ops.ones(x.shape[1], wide.dtype) if scale is None else ops.cast(scale, wide.dtype)
    bias = ops.zeros(x.shape[1], wide.dtype) if bias is None else ops.cast(bias, wide.dtype)
    if not is_training:
        factor = ops.rsqrt(variance + epsilon) * scale
        return ops.cast(channel_factors(wide, factor, bias, mean), x.dtype), mean, variance
    y, center, spread = trained_batch_norm(wide, scale, bias, epsilon)
    if mean is not None:
        count = math.prod(x.shape) // x.shape[1]
        ops.assign(mean, mean * (1 - momentum) + ops.cast(center * momentum, mean.dtype))
        unbiased = spread * (momentum * count / max(count - 1, 1))
        ops.assign(variance, variance * (1 - momentum) + ops.cast(unbiased, variance.dtype))
    return ops.cast(y, x.dtype), center, spread


def _gathered_statistics(x, means, deviations, mean, variance, momentum, epsilon, counts):
    """Results of `BatchNormGatherStatsWithCounts`: those of `BatchNormStats` for all parts, of which each is a row."""
    counts, total = ops.reshape(counts, (-1, 1)), mint.sum(counts)
    center = mint.sum(counts * means, 0) / total
    spread = 1.0 / ops.square(deviations) - epsilon + ops.square(means - center)
    spread = mint.sum(counts * spread, 0) / total
    if mean is not None:
        ops.assign(mean, mean * (1 - momentum) + center * momentum)
        ops.assign(variance, variance * (1 - momentum) + spread * momentum * total / (total - 1))
    return center, ops.rsqrt(spread + epsilon)


def instance_norm(x, scale, bias, mean, variance, epsilon=1e-5, momentum=0.1):
    """Results of `InstanceNorm`: `y`, and the mean and variance of each instance; running ones are of their means."""
    dims, channels = tuple(range(2, x.ndim)), (1, -1) + (1,) * (x.ndim - 2)
    center = mint.mean(x, dims, keepdim=True)
    spread = mint.mean(ops.square(x - center), dims, keepdim=True)
    count = math.prod(x.shape[2:])
    for running, found, factor in ((mean, center, 1.0), (variance, spread, count / max(count - 1, 1))):
        ops.assign(running, running * (1 - momentum) + mint.mean(found, (0, *dims)) * (momentum * factor))
    y = (x - center) * ops.rsqrt(spread + epsilon) * ops.reshape(scale, channels) + ops.reshape(bias, channels)
    return y, ops.reshape(center, (-1,)), ops.reshape(spread, (-1,))


def lstm(x, state, cell, weights, input_size, hidden_size, has_bias):
    """Results of `LSTM`, one layer in one direction, step by step; the two that are for its own gradient are zeros."""
    flat, gates = ops.reshape(weights, (-1,)), 4 * hidden_size
    end = gates * (input_size + hidden_size)
    parts = flat[: gates * input_size], flat[gates * input_size : end], flat[end:]
    *matrices, biases = (ops.reshape(part, (-1, size)) for part, size in zip(parts, (input_size, hidden_size, gates)))
    biases = (biases.sum(0), ops.zeros(gates)) if has_bias else (None, None)
    y, (state, cell) = RecurrentLayers("LSTM").recurrent(x, (state[0], cell[0]), *matrices, *biases)
    return y, ops.expand_dims(state, 0), ops.expand_dims(cell, 0), *(ops.zeros((1, 1)),) * 2


def index_added(x, index, updates, axis):
    """The result of `IndexAdd`, which a Parameter has then, too."""
    value = x.index_add(axis, index, updates)
    ops.assign(x, value)
    return value


def max_pool(x, kernel, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Results of `FuncMaxPool2D`: the largest elements, and their positions."""
    return ops.MaxPoolWithArgmaxV2(kernel, stride or kernel, padding, dilation, ceil_mode)(x)


def batch_norm_elemt(x, weight=None, bias=None, mean=None, invstd=None, eps=1e-5):
    """The result of `BatchNormElemt`, by the statistics of `BatchNormStats`."""
    return _normalised(x, weight, bias, mean, ops.reciprocal(ops.square(invstd)) - eps, False, 0.0, eps)[0]


def clip_by_norm(x, clip_norm, axis):
    """The result of `ClipByNorm`, in float32."""
    wide = ops.cast(x, mstype.float32)
    norm = ops.sqrt(ops.sum(ops.square(wide), None if axis == () else axis, keepdim=True))
    return wide * ops.cast(clip_norm, mstype.float32) / ops.maximum(norm, ops.cast(clip_norm, mstype.float32))


def created(value, x, size, dtype=None, device=None):
    """The result of `NewOnes` and its like: a tensor of `value`, of the dtype of `x` where none is given."""
    return ops.full(tuple(size), value, dtype=x.dtype if dtype is None else type_id_to_type(dtype))


def _write_rows(write, x, updates, indices):
    """The tensor with rows of it written. MindSpore calls these operators `Inplace…`, and yet makes new tensors."""
    places = indices if isinstance(indices, Tensor) else Tensor(np.ravel(np.int32(indices)))
    return write(x, ops.reshape(places, (-1, 1)), updates)


_ROW_WRITES = {"Add": ops.tensor_scatter_add, "Sub": ops.tensor_scatter_sub, "Update": scatter_update}
_DECOMPOSITIONS = {  # function of an operator's arguments, and names of a primitive's attributes that it takes besides
    "BatchNorm": batch_norm,
    "BatchNormExt": batch_norm_ext,
    "BatchNormGatherStatsWithCounts": _gathered_statistics,
    "SyncBatchNorm": (partial(batch_norm, is_training=True), "epsilon momentum"),
    "BatchNormStats": lambda x, eps: batch_norm_ext(x, training=True, epsilon=eps)[1:],
    "BatchNormElemt": batch_norm_elemt,
    "InstanceNorm": (instance_norm, "epsilon momentum"),
    "IndexAdd": (index_added, "axis"),
    "LSTM": (lstm, "input_size hidden_size has_bias"),
    "Dot": lambda x, y: ops.dot(x, y) if x.ndim > 1 else ops.matmul(x, y),
    **{"FuncMaxPool2D": max_pool, "AdaptiveMaxPool3D": sizes.adaptive_max_pool_3d},
    **{"ConvTbc": sizes.conv_tbc, "PixelShuffle": ops.pixel_shuffle},
    "Expand": lambda x, size: ops.broadcast_to(x, tuple(sizes.numbers(size))),
    **{f"Inplace{name}": (partial(_write_rows, write), "indices") for name, write in _ROW_WRITES.items()},
    "InplaceUpdateV2": lambda x, indices, updates: _write_rows(scatter_update, x, updates, indices),
    "BartlettWindow": (partial(sizes.window, np.bartlett), "periodic dtype"),
    "BlackmanWindow": (partial(sizes.window, np.blackman), "periodic dtype"),
    "ClipByNorm": (clip_by_norm, "axis"),
    "Col2Im": (sizes.col2im, "kernel_size dilation padding stride"),
    "Index": lambda x, indices: index_tensor(x, tuple(indices)),
    **{f"New{name}": partial(created, value) for name, value in (("Empty", 0), ("Ones", 1), ("Zeros", 0))},
    "NewFull": lambda x, size, value, dtype=None: created(value, x, size, dtype),
    "MatrixDiag": lambda x, assist: sizes.matrix_diag(x, 0, *assist.shape[-2:], 0.0),
    "MatrixDiagPart": lambda x, assist: sizes.matrix_diag_part(x, 0, 0.0),
    "MatrixSetDiag": lambda x, diagonal, assist: sizes.matrix_set_diag(x, diagonal, 0),
    **{"MatrixDiagPartV3": sizes.matrix_diag_part, "MatrixDiagV3": sizes.matrix_diag},
    "MatrixSetDiagV3": sizes.matrix_set_diag,
    "MirrorPad": (sizes.mirrored, "mode"),
}
register_algorithm(
    Algorithm("batch_norm", "means and variances over all parts", False, norm_of_parts, gradient_of_parts, True)
)
_SOURCE = "mindformers_core.algorithms.batch_norm"
register_operator("ChannelFactors", source=f"{_SOURCE}.apply_factors", operations=3)(rules.channel_factors)
register_operator(
    "TrainedBatchNorm", source=f"{_SOURCE}.train_norm", operations=7, algorithms=("batch_norm",)
)(rules.trained_batch_norm)  # fmt: skip
for _draws, _table in ((False, _DECOMPOSITIONS), (True, DRAWN)):
    for _name, _entry in _table.items():
        _function, _attributes = _entry if isinstance(_entry, tuple) else (_entry, "")
        register_operator(_name, decomposition=_function, attributes=tuple(_attributes.split()), draws=_draws)


def composed(name, args, kwargs, primitive):
    """The results of an operator as those of others; None where it is computed as it is."""
    facts = facts_of(name)
    if name == "PadV3" and len(args) > 2 and type(args[1]) is tuple and min(args[1], default=0) < 0:
        return mint.nn.functional.pad(args[0], args[1], value=float(args[2]))  # see `corrected.padded`
    if (found := split_by_attribute(name, args, primitive)) is not None:
        return found
    if facts.decomposition is None:
        return written(name, args, kwargs)
    attributes = {name: getattr(primitive, name) for name in facts.attributes}
    return facts.decomposition(*args, **kwargs, **attributes)
