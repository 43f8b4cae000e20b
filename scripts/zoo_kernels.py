"""Operators of `mint` without a kernel on CPU, of others that have one: models for Ascend then run on one card here."""

import re
from contextlib import ExitStack
from functools import wraps

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import gen_ops_prim

from mindformers_core.lowering.einsum import contract
from mindformers_core.lowering.indexing import IndexedTensor
from mindformers_core.program.structure import tree_leaves
from mindformers_core.scopes import replaced

_DRAW = np.random.default_rng(0)


def _array(values, dtype):
    kind = np.asarray(values).dtype
    return Tensor(values, dtype or (ms.int64 if kind.kind in "iu" else ms.float32))


def _number(value):
    return value.item() if isinstance(value, Tensor) else value


def _arange(start, end, step, dtype=None):
    return _array(np.arange(_number(start), _number(end), _number(step)), dtype)


def _full(size, value, dtype=None):
    return ops.full(size, _number(value), dtype=dtype)


def _convolution(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    if input.ndim == 3:
        one = lambda value: (1, value if isinstance(value, int) else value[0])  # noqa: E731
        pad = padding if isinstance(padding, (int, str)) else padding[0]
        if isinstance(pad, int) and pad:
            input, pad = ops.cat((*[input[..., :1] * 0] * pad, input, *[input[..., :1] * 0] * pad), -1), 0
        mode = {"pad_mode": pad} if isinstance(pad, str) else {}
        result = ops.conv2d(
            input.expand_dims(2), weight.expand_dims(2), None, stride=one(stride), dilation=one(dilation),
            groups=groups, **mode,
        ).squeeze(2)  # fmt: skip
        return result if bias is None else result + bias.reshape(1, -1, 1)
    mode = {"pad_mode": padding} if isinstance(padding, str) else {"pad_mode": "pad", "padding": _both(padding)}
    result = ops.conv2d(input, weight, None, stride=_both(stride), dilation=_both(dilation), groups=groups, **mode)
    return result if bias is None else result + bias.reshape(1, -1, 1, 1)


def _both(value):
    return value if isinstance(value, int) else tuple(value) * (3 - len(value))


def _embedding(input, weight, *_):
    return ops.gather(weight, input, 0)


def _vector_norm(x, ord=2, dim=None, keepdim=False, dtype=None):
    dims = tuple(range(x.ndim)) if dim is None else dim
    return ops.sqrt(ops.reduce_sum(ops.square(x), dims) if not keepdim else ops.ReduceSum(True)(ops.square(x), dims))


def _gelu(input, approximate="none"):
    approximate = {0: "none", 1: "tanh"}.get(approximate, approximate)
    return ops.gelu(input, approximate=approximate)


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    dims = tuple(range(-len(normalized_shape), 0))
    mean = ops.ReduceMean(True)(input, dims)
    scale = ops.rsqrt(ops.ReduceMean(True)(ops.square(input - mean), dims) + eps)
    result = (input - mean) * scale
    result = result if weight is None else result * weight
    return (result if bias is None else result + bias).astype(input.dtype), mean, scale


def _group_norm(input, num_groups, weight=None, bias=None, eps=1e-5):
    parts = input.reshape(input.shape[0], num_groups, -1)
    mean = ops.ReduceMean(True)(parts, -1)
    scale = ops.rsqrt(ops.ReduceMean(True)(ops.square(parts - mean), -1) + eps)
    result = ((parts - mean) * scale).reshape(input.shape)
    shape = (1, -1, *[1] * (input.ndim - 2))
    result = result if weight is None else result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape), mean[..., 0], scale[..., 0]


def _rms_norm(x, gamma, epsilon=1e-6):
    scale = ops.rsqrt(ops.ReduceMean(True)(ops.square(x.astype(ms.float32)), (-1,)) + epsilon)
    return (x * scale).astype(x.dtype) * gamma, scale


def _batch_norm(input, weight=None, bias=None, mean=None, variance=None, training=False, momentum=0.1, epsilon=1e-5):
    shape, dims = (1, -1, *[1] * (input.ndim - 2)), (0, *range(2, input.ndim))
    if training or mean is None:
        mean = ops.ReduceMean(False)(input, dims)
        variance = ops.ReduceMean(False)(ops.square(input - mean.reshape(shape)), dims)
    result = (input - mean.reshape(shape)) * ops.rsqrt(variance.reshape(shape) + epsilon)
    result = result if weight is None else result * weight.reshape(shape)
    return result if bias is None else result + bias.reshape(shape), mean, variance


def _repeated(input, repeats, dim=None, output_size=None):
    shape, dim = input.shape, dim % input.ndim
    input = ops.broadcast_to(input.expand_dims(dim + 1), (*shape[: dim + 1], repeats, *shape[dim + 1 :]))
    return input.reshape((*shape[:dim], -1, *shape[dim + 1 :]))


def _rolled(input, shifts, dims=None):
    shifts, dims = ([each] if isinstance(each, int) else list(each) for each in (shifts, dims))
    for shift, dim in zip(shifts, dims):
        size = input.shape[dim]
        input = ops.gather(input, Tensor((np.arange(size) - shift) % size), dim)
    return input


def _one_hot(tensor, num_classes):
    classes = num_classes if num_classes > 0 else int(tensor.max()) + 1
    return (tensor.expand_dims(-1) == _array(np.arange(classes), None)).astype(ms.int64)


def _padded(input, padding, value=0.0):
    for place in range(0, len(padding), 2):
        dim = input.ndim - 1 - place // 2
        for count, side in zip(padding[place : place + 2], (0, 1)):
            if count < 0:
                input = input.narrow(dim, 0 if side else -count, input.shape[dim] + count)
            elif count:
                shape = (*input.shape[:dim], count, *input.shape[dim + 1 :])
                more = ops.full(shape, value, dtype=input.dtype)
                input = ops.cat((input, more) if side else (more, input), dim)
    return input


def _windows(input, size, stride, padding=0, dilation=1, value=0.0, ceil_mode=False):
    """The pixels of each window, as (N, C, H, W) for every place in it, in the order of rows."""
    size, stride, padding, dilation = (each if isinstance(each, (tuple, list)) else (each,) * 2
                                       for each in (size, stride or size, padding, dilation))  # fmt: skip
    counts, more = [], []
    for pixels, kernel, step, pad, gap in zip(input.shape[-2:], size, stride, padding, dilation):
        free = pixels + 2 * pad - gap * (kernel - 1) - 1
        count = (-(-free // step) if ceil_mode else free // step) + 1
        count -= ceil_mode and (count - 1) * step >= pixels + pad
        counts.append(count)
        more.append((pad, max((count - 1) * step + gap * (kernel - 1) + 1 - pixels - pad, 0)))
    input = _padded(input, (*more[1], *more[0]), value)
    for y, x in np.ndindex(*size):
        y, x = y * dilation[0], x * dilation[1]
        rows, columns = (at + (count - 1) * step + 1 for at, count, step in zip((y, x), counts, stride))
        yield input[:, :, y : rows : stride[0], x : columns : stride[1]]


def _unfolded(input, kernel_size, dilation=1, padding=0, stride=1):
    windows = list(_windows(input, kernel_size, stride, padding, dilation))
    windows = ops.cat([each.expand_dims(2) for each in windows], 2)  # (N, C, places, H, W)
    return windows.reshape(windows.shape[0], windows.shape[1] * windows.shape[2], -1)


def _max_pool(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    if ceil_mode or _both(dilation) not in (1, (1, 1)):
        raise RuntimeError("FuncMaxPool2D has no kernel on CPU, and no substitute with a dilation or ceil_mode")
    rows, columns = padding if isinstance(padding, (tuple, list)) else (padding, padding)
    input = _padded(input, (columns, columns, rows, rows), -1e4)
    return (ops.MaxPool(_both(kernel_size), _both(stride or kernel_size), "valid")(input),) * 2


def _average_pool(input, kernel_size, stride=None, padding=0, ceil_mode=False, with_padding=True, divisor=None):
    total, ones, counts = 0, input[:1, :1] * 0 + 1, 0
    for window in _windows(input, kernel_size, stride, padding, 1, 0.0, ceil_mode):
        total = total + window
    for window in _windows(ones, kernel_size, stride, padding, 1, 1.0 if with_padding else 0.0, ceil_mode):
        counts = counts + window
    return total / (divisor or counts)


def _adaptive_average_pool(input, output_size):
    output_size = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * 2
    for dim, size in zip((-2, -1), output_size):
        if size is None:
            continue
        ends = [(i * input.shape[dim] // size, -(-(i + 1) * input.shape[dim] // size)) for i in range(size)]
        parts = [input.narrow(input.ndim + dim, start, end - start) for start, end in ends]
        input = ops.cat([ops.ReduceMean(True)(part, dim) for part in parts], dim)
    return input


def _upsampled(x, output_size=None, scales=None, align_corners=False):
    size = output_size or [int(pixels * scale) for pixels, scale in zip(x.shape[-2:], scales)]
    return ops.ResizeBilinearV2(align_corners, not align_corners)(x, tuple(size))


KERNELS = {
    "AdaptiveAvgPool2DExt": _adaptive_average_pool,
    "AvgPool2D": _average_pool,
    "FuncMaxPool2D": _max_pool,
    "Im2ColExt": _unfolded,
    "NonZeroExt": lambda input: tuple(ops.nonzero(input).astype(ms.int64).T),
    "UpsampleBilinear2D": _upsampled,
    "Arange": _arange,
    "LinSpaceExt": lambda start, end, steps, dtype=None: _array(
        np.linspace(_number(start), _number(end), _number(steps), dtype=np.float32), dtype
    ),
    "Embedding": _embedding,
    "Conv2DExt": _convolution,
    "Conv2DPadding": _convolution,
    "Conv1DExt": _convolution,
    "Conv1DPadding": _convolution,
    "TrilExt": lambda input, diagonal=0: input * _array(np.tri(*input.shape[-2:], diagonal), input.dtype),
    "UniformExt": lambda tensor, a, b, seed, offset: _array(_DRAW.uniform(0, 1, tensor.shape), tensor.dtype),
    "Addmm": lambda input, a, b, beta=1, alpha=1: beta * input + alpha * ops.matmul(a, b),
    "LinalgVectorNorm": _vector_norm,
    "FillScalar": _full,
    "FillTensor": _full,
    "GeluExt": _gelu,
    "NormalFloatFloat": lambda mean, std, size, seed, offset: _array(_DRAW.normal(mean, std, size), ms.float32),
    "RandExt": lambda size, seed, offset, dtype=None, device=None: _array(_DRAW.uniform(0, 1, size), dtype),
    "Randn": lambda size, seed, offset, dtype=None, device=None: _array(_DRAW.normal(0, 1, size), dtype),
    "ZerosLikeExt": lambda input, dtype=None: ops.zeros(input.shape, dtype or input.dtype),
    "OnesLikeExt": lambda input, dtype=None: ops.ones(input.shape, dtype or input.dtype),
    "FullLike": lambda input, value, dtype=None: _full(input.shape, value, dtype or input.dtype),
    "CumsumExt": lambda input, dim, dtype=None: ops.cumsum(
        input.astype(dtype or (ms.int64 if input.dtype in (ms.bool_, ms.int32) else input.dtype)), dim
    ),
    "StackExt": lambda tensors, dim=0: ops.cat([each.expand_dims(dim) for each in tensors], dim),
    "BatchNormExt": _batch_norm,
    "TopkExt": lambda input, k, dim=-1, largest=True, sorted=True: ops.topk(input, k, dim, largest, sorted),
    "RepeatInterleaveInt": _repeated,
    "RmsNorm": _rms_norm,
    "Outer": lambda input, vec2: input.reshape(-1, 1) * vec2,
    "Roll": _rolled,
    "LogSoftmaxExt": lambda input, dim=-1, dtype=None: ops.log_softmax(input, dim),
    "OneHotExt": lambda tensor, num_classes, *_: _one_hot(tensor, num_classes),
    "Baddbmm": lambda input, a, b, beta=1, alpha=1: beta * input + alpha * ops.matmul(a, b),
    "ArgSort": lambda input, dim=-1, descending=False, stable=False: ops.sort(input, dim, descending)[1],
    "LayerNormExt": _layer_norm,
    "Clone": lambda input: ops.mul(input, 1) if input.dtype != ms.bool_ else input.copy(),
    "ConstantPadND": _padded,
    "GroupNorm": _group_norm,
}


def _overwritten(make):
    def method(tensor, *args, **kwargs):
        tensor.copy_(Tensor(np.broadcast_to(make(tensor, *args, **kwargs), tensor.shape).copy(), tensor.dtype))
        return tensor

    return method


IN_PLACE = {
    "normal_": _overwritten(lambda x, mean=0.0, std=1.0, **_: _DRAW.normal(mean, std, x.shape)),
    "uniform_": _overwritten(lambda x, a=0.0, b=1.0, **_: _DRAW.uniform(0, 1, x.shape)),
    "clone": lambda x: ops.mul(x, 1) if x.dtype != ms.bool_ else x.copy(),
    "zero_": _overwritten(lambda x: 0.0),
    "fill_": _overwritten(lambda x, value: _number(value)),
}


def _on_cpu(original, function, skipped=0):
    """`function` for plain tensors, `original` for others."""

    @wraps(original)
    def call(*args, **kwargs):
        tensors = tree_leaves((args, kwargs), Tensor)
        if any(isinstance(each, IndexedTensor) or each.is_meta for each in tensors):
            return original(*args, **kwargs)
        return function(*args[skipped:], **kwargs)

    return call


def _repeat(x, *counts):
    counts = counts[0] if isinstance(counts[0], (tuple, list)) else counts
    return ops.tile(x, tuple(counts))


def _variance(x, dim=None, *, correction=1, keepdim=False, keepdims=False, axis=None):
    dim, keepdim = dim if axis is None else axis, keepdim or keepdims
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    count = np.prod([x.shape[each] for each in dims])
    centred = ops.square(x - ops.ReduceMean(True)(x, dims))
    return ops.ReduceSum(keepdim)(centred, dims) / float(count - correction)


def _log_sum_exp(x, dim, keepdim=False):
    top = ops.stop_gradient(ops.ReduceMax(True)(x, dim))
    result = ops.log(ops.ReduceSum(True)(ops.exp(x - top), dim)) + top
    return result if keepdim else result.squeeze(dim)


def _einsum(equation, *operands):
    result = contract(operands, equation)
    return result if equation.partition("->")[2] else result.reshape(())


def _masked_in_place(x, mask, value):
    if x.is_floating_point():
        raise RuntimeError("masked_fill_ of floats has no kernel on CPU, and no substitute with its gradient")
    return _overwritten(lambda x: np.where(mask.asnumpy(), _number(value), x.asnumpy()))(x)


METHODS = {
    "repeat": _repeat,
    "var": _variance,
    "std": lambda x, *args, **kwargs: ops.sqrt(_variance(x, *args, **kwargs)),
    "logsumexp": _log_sum_exp,
    "masked_fill_": _masked_in_place,
}
FUNCTIONS = (
    (ops, "rms_norm", _rms_norm),
    (mint, "where", lambda *args: mint.nonzero(args[0], as_tuple=True) if len(args) == 1 else ops.where(*args)),
    (mint, "stack", lambda tensors, dim=0: ops.cat([each.expand_dims(dim) for each in tensors], dim)),
    (mint, "einsum", _einsum),
    (mint, "roll", _rolled),
    (mint, "logsumexp", _log_sum_exp),
    (mint, "var", _variance),
    (mint, "std", lambda x, *args, **kwargs: ops.sqrt(_variance(x, *args, **kwargs))),
    (mint.nn.functional, "gelu", lambda input, *, approximate="none": ops.gelu(input, approximate=approximate)),
    (mint.nn.functional, "one_hot", lambda tensor, num_classes=-1: _one_hot(tensor, num_classes)),
    (mint.nn.functional, "relu6", lambda input: ops.clamp(input, 0, 6)),
)


def cpu_kernels():
    """A context in which the operators of `KERNELS` run on CPU; a capture sees them as they are."""
    stack = ExitStack()
    for name, function in KERNELS.items():
        kind, direct = getattr(gen_ops_prim, name), re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", name).lower() + "_impl"
        stack.enter_context(replaced(kind, __call__=_on_cpu(kind.__call__, function, 1)))
        if hasattr(ops.auto_generate, direct):
            original = getattr(ops.auto_generate, direct)
            stack.enter_context(replaced(ops.auto_generate, **{direct: _on_cpu(original, function)}))
    for name, function in (IN_PLACE | METHODS).items():
        stack.enter_context(replaced(Tensor, **{name: _on_cpu(getattr(Tensor, name), function)}))
    for owner, name, function in FUNCTIONS:
        stack.enter_context(replaced(owner, **{name: _on_cpu(getattr(owner, name), function)}))
    return stack
