"""Operator calls with what they compute, in NumPy: the table that the tests of the rules run through."""

from dataclasses import dataclass, field

import numpy as np
from support.image_functions import smooth_l1_loss

RANDOM = np.random.default_rng(7)


@dataclass
class Call:
    """One call: arrays stand for tensors. `function` takes the operator's arguments and computes it."""

    name: str
    args: list
    function: object
    named: dict = field(default_factory=dict)

    def __str__(self):
        shown = [*map(_show, self.args), *(f"{name}={_show(value)}" for name, value in self.named.items())]
        return f"{self.name}({', '.join(shown)})"


def _show(value):
    if is_many(value):
        return "[" + ", ".join(map(_show, value)) + "]"
    return str(list(value.shape)) if isinstance(value, np.ndarray) else str(value)


def is_many(value):
    """Whether an argument is a tuple or list of tensors."""
    return isinstance(value, (tuple, list)) and bool(value) and isinstance(value[0], np.ndarray)


def local(array):
    """An array as MindSpore takes it on CPU: floats and indices of 32 bits."""
    array = np.asarray(array)
    narrow = {"f": np.float32, "i": np.int32 if array.ndim else array.dtype}
    return array.astype(narrow.get(array.dtype.kind, array.dtype))


def f(*shape):
    """Random numbers, none near 0."""
    return RANDOM.uniform(0.5, 2, shape) * RANDOM.choice([-1, 1], shape)


def ints(high, *shape):
    """Random ints below `high`."""
    return RANDOM.integers(0, high, shape)


def bools(*shape):
    """Random truth values."""
    return RANDOM.random(shape) > 0.5


def _one(values):
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else tuple(values)


def _reduction(reduce):
    def function(x, dim=None, keepdim=False, *_, **named):
        dim, keepdim = named.get("dim", named.get("axis", dim)), named.get("keepdim", named.get("keepdims", keepdim))
        dims = None if dim in (None, ()) else tuple(dim) if isinstance(dim, (tuple, list)) else dim
        return reduce(x, axis=dims, keepdims=keepdim)

    return function


def _softmax(x, dim=-1, **named):
    dim = _one((named.get("axis", dim),))
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def _with_extreme(extreme, arg, index_first):
    def function(x, dim, keepdim=False, **named):
        keepdim = named.get("keepdim", keepdim)
        pair = arg(x, dim, keepdims=keepdim), extreme(x, dim, keepdims=keepdim)
        return pair if index_first else pair[::-1]

    return function


def _strided(x, begin, end, strides, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0):
    index = []
    for i, step in enumerate(strides):
        has = [bool(mask >> i & 1) for mask in (begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask)]
        bounds = slice(None if has[0] else begin[i], None if has[1] else end[i], step)
        index.append(... if has[2] else None if has[3] else begin[i] if has[4] else bounds)
    return x[tuple(index)]


def _slice(x, begin, size):
    return x[tuple(slice(b, None if s == -1 else b + s) for b, s in zip(begin, size))]


def _narrow(x, dim, start, length):
    return np.moveaxis(np.moveaxis(x, dim, 0)[start:][:length], 0, dim)


def _split(x, size, dim=0, **named):
    dim = named.get("axis", dim)
    cuts = np.cumsum(size)[:-1] if isinstance(size, (tuple, list)) else range(size, x.shape[dim], size)
    return tuple(np.split(x, list(cuts), dim))


def _squeeze(x, dim=None):
    dims = [d % x.ndim for d in _one((dim,))] if dim not in (None, ()) else range(x.ndim)
    return x.reshape([size for d, size in enumerate(x.shape) if size != 1 or d not in dims])


def _gather(x, input_indices, axis, batch_dims=0):
    if batch_dims:
        return np.stack([_gather(a, b, axis - 1, batch_dims - 1) for a, b in zip(x, input_indices)])
    return np.take(x, input_indices, axis)


def _gather_elements(x, dim, index):
    where = list(np.ix_(*[range(size) for size in index.shape]))
    where[dim] = index
    return x[tuple(where)]


def _one_hot(indices, depth, on, off, axis=-1):
    hot = np.where(indices[..., None] == np.arange(depth), on, off)
    return np.moveaxis(hot, -1, axis)


def _top_k(x, k, dim=-1, *_):
    order = np.take(np.argsort(-x, dim, kind="stable"), range(k), dim)
    return np.take_along_axis(x, order, dim), order


def _layer_norm(x, gamma, beta, start=-1, *_):
    dims = tuple(range(start % x.ndim, x.ndim))
    mean, var = x.mean(dims, keepdims=True), x.var(dims, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * gamma + beta, mean, var


def _layer_norm_shape(x, shape, weight, bias, eps):
    return _layer_norm(x, weight, bias, -len(shape))


def _rotary(x, cos, sin, _):
    first, second = np.split(x, 2, -1)
    return x * cos + np.concatenate((-second, first), -1) * sin


def _rms_norm(x, gamma, epsilon=1e-6):
    dims = tuple(range(x.ndim - gamma.ndim, x.ndim))
    scale = 1 / np.sqrt((x**2).mean(dims, keepdims=True) + epsilon)
    return x * scale * gamma, scale


def _tile(x, *counts, **named):
    return np.tile(x, _one(counts or tuple(named.values())))


def _expand(x, *shape):
    shape = _one(shape)
    new = len(shape) - x.ndim
    return np.broadcast_to(x, [x.shape[d - new] if size == -1 else size for d, size in enumerate(shape)])


X, Y, Z = f(4, 8), f(2, 4, 8), f(4, 4, 8)
SCALAR = np.array(3.0)

CALLS = [
    # elementwise
    Call("Exp", [X], np.exp),
    Call("Neg", [Y], np.negative),
    Call("AddExt", [Y, X], np.add),
    Call("AddExt", [Y], lambda x, alpha=1, other=None: x + alpha * other, {"alpha": 2, "other": X}),
    Call("Sub", [Y, f(4, 1)], np.subtract),
    Call("Sub", [1, X], np.subtract),
    Call("AddScalar", [X, 1], np.add),
    Call("AddN", [[X, f(4, 8), f(4, 8)]], sum),
    Call("Mul", [X, f(8)], np.multiply),
    Call("Muls", [X], lambda x, other: x * other, {"other": 2}),
    Call("Div", [X, f(4, 8)], np.divide),
    Call("Div", [2, X], np.divide),
    Call("Equal", [X], lambda x, other: x == other, {"other": f(4, 8)}),
    Call("ClampTensor", [X], lambda x, max: np.minimum(x, max), {"max": f(4, 8)}),
    Call("Select", [bools(4, 8), X, f(8)], np.where),
    Call("Select", [bools(4, 8), X, 0.0], np.where),
    Call("Select", [X, bools(4, 8), f(4, 8)], lambda x, condition, y: np.where(condition, x, y)),
    Call("MaskedFill", [X, bools(8), 0.0], lambda x, mask, value: np.where(mask, value, x)),
    Call("MaskedFill", [X, bools(8), SCALAR], lambda x, mask, value: np.where(mask, value, x)),
    Call("Cast", [X, 43], lambda x, dtype: x),
    Call("Cast", [X, 42], lambda x, dtype: x.astype(np.float16).astype(np.float64)),
    Call("TypeAs", [X, f(2, 4)], lambda x, other: x),
    Call("LogSigmoid", [X], lambda x: (-np.log1p(np.exp(-x)), np.exp(-x))),
    # matmul
    Call("MatMul", [X, f(8, 4), False, False], lambda a, b, *_: a @ b),
    Call("MatMul", [X, f(4, 8), False, True], lambda a, b, *_: a @ b.T),
    Call("MatMul", [X, f(4, 8), True, False], lambda a, b, *_: a.T @ b),
    Call("DeprecatedMatmul", [X], lambda x, tensor2: x @ tensor2, {"tensor2": f(8, 4)}),
    Call("BatchMatMul", [Y, f(2, 8, 4)], np.matmul),
    Call("MatMulExt", [Y, f(8, 4)], np.matmul),
    Call("MatMulExt", [Y, f(8)], np.matmul),
    Call("Dense", [Y, f(4, 8)], lambda x, w: x @ w.T),
    Call("Dense", [Y, f(4, 8), f(4)], lambda x, w, b: x @ w.T + b),
    Call("BiasAdd", [X, f(8), 0], lambda x, b, _: x + b),
    Call("Addmm", [f(4), X, f(8, 4)], lambda x, a, b: x + a @ b),
    Call("Baddbmm", [f(2, 4, 1), Y, f(2, 8, 4), 2, 3], lambda x, a, b, beta, alpha: beta * x + alpha * a @ b),
    Call("Outer", [f(4), f(8)], np.outer),
    # reductions
    Call("SumExt", [X], _reduction(np.sum)),
    Call("SumExt", [Y, (0, -1), True], _reduction(np.sum)),
    Call("SumExt", [X], lambda x, dtype: x.astype(np.float16).astype(float).sum(), {"dtype": 42}),
    Call("ReduceSum", [Y, (), False, False], _reduction(np.sum)),
    Call("ReduceSum", [X, (), False, True], lambda x, *_: x),
    Call("DeprecatedSum", [X], _reduction(np.sum), {"axis": 1, "keepdims": True}),
    Call("DeprecatedSum", [X, 1, None, True], lambda x, dim, dtype, keepdim: x.sum(dim, keepdims=keepdim)),
    Call("MeanExt", [X, -1, True], _reduction(np.mean)),
    Call("ReduceMean", [Y, (), False], _reduction(np.mean)),
    Call("ProdExt", [X, 1], _reduction(np.prod)),
    Call("Max", [X], _reduction(np.max)),
    Call("ReduceMax", [Y, 1, True], _reduction(np.max)),
    Call("ReduceMin", [Y, (1, 2), False], _reduction(np.min)),
    Call("DeprecatedMax", [X], _reduction(np.max), {"axis": 1}),
    Call("ReduceAll", [bools(4, 8), 1], _reduction(np.all)),
    Call("Any", [bools(4, 8)], _reduction(np.any)),
    Call("Argmax", [X, -1, 34], lambda x, dim, _: x.argmax(dim)),
    Call("ArgMinExt", [X, None, False], lambda x, *_: x.argmin()),
    Call("DeprecatedArgmax", [X], _reduction(np.argmax), {"axis": 1, "keepdims": True}),
    Call("ArgMaxWithValue", [Y, 1, False], _with_extreme(np.max, np.argmax, True)),
    Call("ArgMinWithValue", [X, 0, True], _with_extreme(np.min, np.argmin, True)),
    Call("MaxDim", [X, 0], _with_extreme(np.max, np.argmax, False)),
    Call("MinDim", [Y, 2], _with_extreme(np.min, np.argmin, False), {"keepdim": True}),
    Call("Std", [Y], _reduction(np.std), {"dim": 1, "correction": 0, "keepdim": True}),
    Call("DeprecatedVar", [X, 1], _reduction(np.var)),
    Call("ReduceStd", [X, (1,), False, False], lambda x, dim, *_: (x.std(dim), x.mean(dim))),
    Call("LogSumExp", [X, 1], _reduction(lambda x, axis, keepdims: np.log(np.exp(x).sum(axis, keepdims=keepdims)))),
    Call("LinalgVectorNorm", [X, 2.0, 1, False, None], lambda x, order, dim, *_: np.sqrt((x**2).sum(dim))),
    Call("Softmax", [Y, (-1,)], _softmax),
    Call("Softmax", [Y, (0, 1)], _softmax),
    Call("LogSoftmax", [X, 0], lambda x, dim: np.log(_softmax(x, dim))),
    *[Call(name, [SCALAR, dim], lambda x, _: x) for name in ("SumExt", "MeanExt", "ReduceMax") for dim in (-1, (0,))],
    Call("MaxDim", [SCALAR, -1], lambda x, _: (x, np.int64(0))),
    # shape
    Call("Reshape", [Y, (8, 8)], lambda x, *s: x.reshape(_one(s))),
    Call("Reshape", [Y, 2, -1], lambda x, *s: x.reshape(_one(s))),
    Call("Reshape", [Z, (4, 2, 2, 2, 4)], lambda x, *s: x.reshape(_one(s))),
    Call("Reshape", [f(6, 4), (4, 6)], lambda x, *s: x.reshape(_one(s))),
    Call("Reshape", [f(1, 4, 1, 12), (4, 4, 3, 1)], lambda x, *s: x.reshape(_one(s))),
    Call("Reshape", [Z], lambda x, *s, shape=(): x.reshape(_one(s or (shape,))), {"shape": (16, -1)}),
    Call("Reshape", [SCALAR, (1, 1)], lambda x, *s: x.reshape(_one(s))),
    Call("ViewAs", [Z, f(16, 8)], lambda x, other: x.reshape(other.shape)),
    Call("Flatten", [Z], lambda x: x.reshape(x.shape[0], -1)),
    Call("FlattenExt", [Z, 1], lambda x, start_dim, end_dim=-1: x.reshape(x.shape[0], -1)),
    Call("FlattenExt", [Z], lambda x, end_dim=-1: x.reshape(-1, x.shape[-1]), {"end_dim": 1}),
    Call("Transpose", [Y, (2, 0, 1)], lambda x, *order: x.transpose(_one(order))),
    Call("Transpose", [Y, 0, -1, 1], lambda x, *order: x.transpose(_one(order))),
    Call("TransposeExtView", [Y], lambda x, dim0, dim1: x.swapaxes(dim0, dim1), {"dim0": 0, "dim1": -1}),
    Call("TExt", [X], np.transpose),
    Call("ExpandDims", [X, -1], np.expand_dims),
    Call("Squeeze", [f(1, 4, 1, 8)], _squeeze),
    Call("Squeeze", [f(1, 4, 1, 2), ()], _squeeze),
    Call("Squeeze", [f(2, 4)], _squeeze),
    Call("Squeeze", [f(2, 4, 1), (0, -1)], _squeeze),
    Call("BroadcastTo", [f(4, 1), (2, -1, 8)], _expand),
    Call("BroadcastTo", [X, 2, 4, 8], _expand),
    Call("ExpandAs", [f(4, 1), Y], lambda x, other: np.broadcast_to(x, other.shape)),
    Call("Tile", [X, (2, 1)], _tile),
    Call("Tile", [X], _tile, {"dims": (4, 1, 2)}),
    Call("Tile", [Y, (2,)], _tile),
    Call("RepeatInterleaveInt", [X, 2, 0], np.repeat),
    Call("DeprecatedRepeatInterleave", [X, 2], np.repeat),
    Call("ReverseV2", [X, (0,)], np.flip),
    Call("Roll", [X, 1, 1], np.roll),
    # joining
    Call("Concat", [(Y, f(2, 2, 8)), 1], lambda parts, dim: np.concatenate(parts, dim)),
    Call("StackExt", [[X, f(4, 8)], -1], lambda parts, dim: np.stack(parts, dim)),
    Call("Split", [X, 1, 2], lambda x, dim, number: tuple(np.split(x, number, dim))),
    Call("SplitTensor", [X, 3, 1], _split),
    Call("SplitWithSize", [X, (2, 6), -1], _split),
    Call("DeprecatedSplit", [X, 4], _split, {"axis": 1}),
    Call("Chunk", [X, 3, 1], lambda x, number, dim: _split(x, 3, dim)),
    Call("DeprecatedChunk", [X, 3, 1], lambda x, number, dim: _split(x, 3, dim)),
    Call("UnstackExtView", [Y, 0], lambda x, dim: tuple(x)),
    Call("Unstack", [Y], lambda x, axis: tuple(np.moveaxis(x, axis, 0)), {"axis": 1}),
    # slices
    Call("StridedSlice", [X, (0, 2), (4, 8), (1, 2), 0, 0, 0, 0, 0], _strided),
    Call("StridedSlice", [X, (0, 1), (4, 2), (1, 1), 1, 1, 0, 0, 2], _strided),
    Call("StridedSlice", [Y, (-2, 0, 0, -1), (2, 0, 0, 9), (1, 1, 1, 1), 0, 0, 2, 4, 0], _strided),
    Call("StridedSlice", [Y, (1,), (2,), (1,)], _strided),
    Call("Slice", [X, (0, 2), (4, -1)], _slice),
    Call("Narrow", [X, 1, 0, 4], _narrow),
    Call("Narrow", [X, 0, 0, 4], _narrow),
    Call("SliceExt", [X, 1, 2, 8, 2], lambda x, dim, start, end, step: x[:, start:end:step]),
    Call("SliceExt", [X, 1, 0, 100, 1], lambda x, dim, start, end, step: x[:, start:end:step]),
    Call("SelectExtView", [Y, 1, 2], lambda x, dim, index: np.take(x, index, dim)),
    # indexing
    Call("Gather", [X, ints(8, 2, 4), 1, 0], _gather),
    Call("Gather", [Y, ints(4, 2, 4), 1, 1], _gather),
    Call("DeprecatedGather", [X], _gather, {"input_indices": ints(4, 8), "axis": 0}),
    Call("IndexSelect", [Y, 1, ints(4, 8)], lambda x, dim, index: np.take(x, index, dim)),
    Call("DeprecatedTake", [X, ints(32, 4)], np.take),
    Call("GatherD", [X, 1, ints(8, 4, 2)], _gather_elements),
    Call("GatherD", [X, 0, ints(4, 4, 4)], _gather_elements),
    Call("GatherD", [X], _gather_elements, {"dim": 1, "index": ints(8, 4, 8)}),
    Call("GatherNd", [Y, ints(2, 8, 2)], lambda x, at: x[tuple(np.moveaxis(at, -1, 0))]),
    Call("Embedding", [ints(8, 2, 4), f(8, 4), None, None, 2.0, False], lambda i, w, *_: w[i]),
    Call("Embedding", [ints(8, 2, 4), f(8, 4), 0], lambda i, w, *_: w[i]),
    Call("OneHot", [ints(4, 2, 4), 4, SCALAR, np.array(0.5), -1], _one_hot),
    Call("OneHot", [ints(4, 2, 4), 4, SCALAR, np.array(0.5), 1], _one_hot),
    Call("TopK", [X, 3], _top_k),
    Call("TopkExt", [X, 2], _top_k, {"dim": 0}),
    Call("Sort", [X], lambda x, axis: (np.sort(x, axis), np.argsort(x, axis)), {"axis": 0}),
    Call("ArgSort", [X, 1], np.argsort),
    Call("CumSum", [X, 1, False, False], lambda x, dim, *_: x.cumsum(dim)),
    Call("CumsumExt", [X], lambda x, dim, *_: x.cumsum(dim), {"dim": 0}),
    Call("CumProd", [X, 1, False, False], lambda x, dim, *_: x.cumprod(dim)),
    Call("Triu", [Y, 1], np.triu),
    Call("Tril", [Y], np.tril),
    # norms
    Call("LayerNorm", [Y, f(8), f(8), -1, -1, 1e-5], _layer_norm),
    Call("LayerNorm", [Y, f(8), f(8), 1, 2, 1e-5], _layer_norm),
    Call("LayerNormExt", [Y, (4, 8), f(4, 8), f(4, 8), 1e-5], _layer_norm_shape),
    Call("Swiglu", [X, -1], lambda x, dim: np.prod(np.split(x, 2, dim), 0)),
    Call("RotaryPositionEmbedding", [Z, f(4, 8), f(4, 8), 0], _rotary),
    Call("RmsNorm", [Y, f(8), 1e-6], _rms_norm),
    *(Call("SmoothL1Loss", [X, f(4, 8), 1.0, reduction], smooth_l1_loss) for reduction in (0, 1, 2)),
]
