"""Operator calls beside those of `operator_calls`: together they are of every operator that has a rule."""

import numpy as np
from support import image_calls, scatter_calls
from support.operator_calls import CALLS, Call, bools, f, ints

X, Y, POSITIVE = f(4, 8), f(2, 4, 8), np.abs(f(4, 8))
SMALL = X / 4

# Operators without a kernel on CPU: their source is run on the meta device only.
WITHOUT_KERNEL = (
    "AddcdivExt", "AddcmulExt", "BitwiseNot", "Clone", "EluExt", "Embedding", "EqualExt", "FloorDivScalar",
    "FuncDropoutExt", "GeluExt", "LayerNormExt", "LeakyReLUExt", "LinalgVectorNorm", "LogSigmoid", "LogSoftmaxExt",
    "ConstantPadND", "DiagExt", "FlashAttentionScore", "FusedInferAttentionScore", "IncreFlashAttention",
    "PromptFlashAttention", "SpeedFusionAttention",
    "MishExt", "OneHotExt", "OnesLikeExt", "RmsNorm", "Roll", "RotaryPositionEmbedding", "SeLUExt", "StackExt",
    "StdMean", "Swiglu", "Take", "VarMean", "ZerosLikeExt", *image_calls.WITHOUT_KERNEL,
    "StdMean", "Swiglu", "Take", "VarMean", "ZerosLikeExt", *scatter_calls.WITHOUT_KERNEL,
)  # fmt: skip

# Calls that fail on CPU, or give something else, whatever form they are written in.
BROKEN = {
    "ReduceSum([4, 8], (), False, True)": "its result is memory that was never written",
    "Softmax([2, 4, 8], (0, 1))": "several dims have no kernel on CPU",
    "StridedSlice([2, 4, 8], (-2, 0, 0, -1), (2, 0, 0, 9), (1, 1, 1, 1), 0, 0, 2, 4, 0)": "more entries than dims",
    "Copy([4, 8])": "a graph has no such kernel; PyNative no gradient",
    "ToDevice([4, 8], CPU)": "a graph has no such kernel",
    "EmptyLike([4, 8])": "memory that was never written",
    **scatter_calls.BROKEN,
}
WITHOUT_GRADIENT = {
    "Slice([4, 8], (0, 2), (4, -1))": "MindSpore's gradient takes no -1",
    **dict.fromkeys(("UniqueWithPad([4], [])", "LinSpace([], [], 4)", "CheckValid([2, 4], [3])"), "it has none"),
    "SoftplusExt([4, 8])": "its gradient has no kernel on CPU",
    **image_calls.WITHOUT_GRADIENT,
    **scatter_calls.WITHOUT_GRADIENT,
}


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _erf(x):
    points = np.linspace(0, 1, 20001)
    return 2 / np.sqrt(np.pi) * x * np.trapz(np.exp(-((x[..., None] * points) ** 2)), points)


def _selu(x):
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))


def _round_to_zero(x, y):
    return np.trunc(x / y)


def _all_equal(x, y):
    return np.array([(x == y).all()])


_UNARY = {
    "Abs": np.abs, "ACos": np.arccos, "Asin": np.arcsin, "Atan": np.arctan, "Ceil": np.ceil,
    "CeLU": lambda x: np.where(x > 0, x, np.expm1(x)), "Clone": np.copy, "Contiguous": np.copy,
    "Copy": np.copy, "Cos": np.cos, "Cosh": np.cosh, "Elu": lambda x: np.where(x > 0, x, np.expm1(x)), "Erf": _erf,
    "EluExt": lambda x: np.where(x > 0, x, np.expm1(x)), "Erfc": lambda x: 1 - _erf(x), "EmptyLike": np.empty_like,
    "Expm1": np.expm1, "FastGeLU": lambda x: x / (1 + np.exp(-1.702 * np.abs(x))) * np.exp(0.851 * (x - np.abs(x))),
    "Floor": np.floor, "GeLU": _gelu, "GeluExt": _gelu, "HSigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "HSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "Identity": np.copy, "Inv": np.reciprocal,
    "IsFinite": np.isfinite, "IsInf": np.isinf, "IsNan": np.isnan, "LeakyReLUExt": np.copy, "Log1p": np.log1p,
    "Min": np.min, "Mish": lambda x: x * np.tanh(np.log1p(np.exp(x))), "MishExt": np.copy, "OnesLike": np.ones_like,
    "OnesLikeExt": np.ones_like, "ReLU": lambda x: np.maximum(x, 0), "ReLU6": lambda x: np.clip(x, 0, 6),
    "Reciprocal": np.reciprocal, "Round": np.round, "SeLU": _selu, "SeLUExt": _selu, "SiLU": lambda x: x * _sigmoid(x),
    "Sigmoid": _sigmoid, "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh, "Softplus": lambda x: np.log1p(np.exp(x)),
    "SoftplusExt": lambda x: np.log1p(np.exp(x)), "Square": np.square, "StopGradient": np.copy, "Tan": np.tan,
    "Tanh": np.tanh, "Trunc": np.trunc, "TrilExt": np.tril, "ZerosLike": np.zeros_like, "NanToNum": np.nan_to_num,
    "ZerosLikeExt": np.zeros_like, "GLU": lambda x: x[:, :4] * _sigmoid(x[:, 4:]), "DeprecatedTranspose": np.transpose,
    "StdMean": lambda x: (x.std(), x.mean()), "VarMean": lambda x: (x.var(), x.mean()), "Flatten": np.copy,
    "Var": lambda x: x.var(ddof=1), "Std": np.std, "DeprecatedArgmax": np.argmax, "DeprecatedArgmin": np.argmin,
}  # fmt: skip
_OF_POSITIVE = {"Log": np.log, "Log10": np.log10, "Log2": np.log2, "Rsqrt": lambda x: x**-0.5, "Sqrt": np.sqrt}
_BINARY = {
    "Add": np.add, "Atan2": np.arctan2, "Atan2Ext": np.arctan2, "Equal": np.equal, "EqualExt": _all_equal,
    "FloorDiv": np.floor_divide, "FloorMod": np.mod, "FmodTensor": np.fmod, "Greater": np.greater, "Less": np.less,
    "GreaterEqual": np.greater_equal, "LessEqual": np.less_equal, "LogAddExp": np.logaddexp, "Maximum": np.maximum,
    "Minimum": np.minimum, "Mod": np.fmod, "NotEqual": np.not_equal, "RealDiv": np.divide, "SubExt": np.subtract,
    "RemainderTensorTensor": np.mod, "SquaredDifference": lambda x, y: (x - y) ** 2, "TruncateDiv": _round_to_zero,
    "TruncateMod": np.fmod, "DivMod": np.divide, "ToOther": lambda x, y: x,
}  # fmt: skip
_WITH_NUMBER = {
    "EqScalar": np.equal, "FloorDivScalar": np.floor_divide, "FmodScalar": np.fmod, "Muls": np.multiply,
    "GreaterEqualScalar": np.greater_equal, "LessScalar": np.less, "Divs": np.divide, "DivMods": np.divide,
    "PowTensorScalar": np.power, "RemainderTensorScalar": np.mod, "SubScalar": np.subtract, "FullLike": np.full_like,
    "Greater": np.greater, "NotEqual": np.not_equal, "Maximum": np.maximum, "Pow": np.power,
}  # fmt: skip
_OF_BOOLS = {
    "LogicalAnd": np.logical_and, "LogicalOr": np.logical_or, "LogicalXor": np.logical_xor,
    "BitwiseAndTensor": np.logical_and, "BitwiseOrTensor": np.logical_or, "BitwiseXorTensor": np.logical_xor,
}  # fmt: skip
_BITS = {"And": np.bitwise_and, "Or": np.bitwise_or, "Xor": np.bitwise_xor}


def _reduced(reduce):
    return lambda x, dim=None, *_, axis=None: reduce(x, axis=axis if dim is None else dim)


def _spread(x, dim, correction=1, keepdim=False):
    return x.std(dim, ddof=correction, keepdims=keepdim)


def _take(x, axis, index):
    return np.take(x, index, axis)


def _padded(x, padding, value):
    pairs = list(zip(padding[::2], padding[1::2]))[::-1]
    return np.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, constant_values=value)


def _likelihood(x, labels, weight, reduction, ignored):
    weights = weight[labels] * (labels != ignored)
    losses = -x[range(len(labels)), labels] * weights
    return (losses.sum(), losses.sum() / weights.sum(), losses)[reduction], weights.sum()


def _cross_entropy(x, labels):
    log_of = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return -(labels * log_of).sum(-1), np.exp(log_of) - labels


def _attention(query, *_):
    return np.zeros((2, 4, 4, 8)), np.zeros((2, 4, 4, 8)), np.zeros(1), np.zeros_like(query)


QKV = [f(2, 4, 64), f(2, 4, 32), f(2, 4, 32)]
LISTS = [f(2, 1, 64), [f(2, 4, 32)], [f(2, 4, 32)]]

MORE_CALLS = [
    *(Call(name, [SMALL], function) for name, function in _UNARY.items()),
    *(Call(name, [POSITIVE], function) for name, function in _OF_POSITIVE.items()),
    *(Call(name, [X, f(4, 8)], function) for name, function in _BINARY.items()),
    *(Call(name, [X, 2], function) for name, function in _WITH_NUMBER.items()),
    *(Call(name, [bools(4, 8), bools(4, 8)], function) for name, function in _OF_BOOLS.items()),
    *(Call(f"Bitwise{name}", [ints(4, 4, 8), ints(4, 4, 8)], function) for name, function in _BITS.items()),
    *(Call(f"Bitwise{name}Scalar", [ints(4, 4, 8), 1], function) for name, function in _BITS.items()),
    *(Call(name, [ints(4, 4, 8), 0.5], _WITH_NUMBER[name]) for name in ("Muls", "Divs", "SubScalar")),
    Call("AddScalar", [ints(4, 4, 8), 0.5], np.add),
    Call("AddScalar", [X, 1, 2], lambda x, y, alpha: x + alpha * y),
    Call("SubExt", [X, f(4, 8), 2], lambda x, y, alpha: x - alpha * y),
    Call("Pow", [POSITIVE, f(4, 8)], np.power),
    Call("PowScalarTensor", [2, X], np.power),
    Call("Xlogy", [X, POSITIVE], lambda x, y: x * np.log(y)),
    Call("DivMod", [X, f(4, 8), 2], lambda x, y, _: np.floor(x / y)),
    Call("Invert", [ints(4, 4, 8)], np.invert),
    Call(
        "UniqueWithPad",
        [np.array([5, 5, 2, 7]), np.array(9)],
        lambda x, pad: (np.array([5, 2, 7, 9]), np.array([0, 0, 1, 2])),
    ),
    Call("LinSpace", [np.array(1.0), np.array(4.0), 4], np.linspace),
    Call("LogicalNot", [bools(4, 8)], np.logical_not),
    Call("BitwiseNot", [ints(4, 4, 8)], np.invert),
    *(Call(name, [X, X, POSITIVE, np.float64(1)], lambda x, a, b, _: x + a / b) for name in ("Addcdiv",)),
    *(Call(name, [X, X, POSITIVE, np.float64(1)], lambda x, a, b, _: x + a * b) for name in ("Addcmul",)),
    *(Call(name, [X, X, POSITIVE, 1], lambda x, *_: x) for name in ("AddcdivExt", "AddcmulExt")),
    Call("ClampScalar", [X, -1, 1.0], np.clip),
    Call("Lerp", [X, f(4, 8), f(4, 8)], lambda x, y, weight: x + weight * (y - x)),
    Call("Lerp", [X, f(4, 8), 0.5], lambda x, y, weight: x + weight * (y - x)),
    Call("LerpScalar", [X, f(4, 8), 0.5], lambda x, y, weight: x + weight * (y - x)),
    Call("MaskedFillScalar", [X, bools(4, 8), 0.5], lambda x, mask, value: np.where(mask, value, x)),
    Call("MaskedFillScalar", [ints(9, 4, 8), bools(4, 8), 2], lambda x, mask, value: np.where(mask, value, x)),
    Call("MaskedFillScalar", [bools(4, 8), bools(4, 8), True], lambda x, mask, value: x | mask),
    Call("DeprecatedWhere", [X, bools(4, 8), f(4, 8)], lambda x, mask, y: np.where(mask, x, y)),
    Call("ToDtype", [X, 42], lambda x, dtype: x.astype(np.float16)),
    Call("ToDevice", [X, "CPU"], lambda x, device: x),
    Call("BatchMatMulExt", [Y, f(2, 8, 4)], np.matmul),
    Call("TensorDot", [Y, f(8, 4), 1], lambda x, y, axes: np.tensordot(x, y, axes)),
    Call("Mm", [X, f(8, 4)], np.matmul),
    Call("Mv", [X, f(8)], np.matmul),
    Call("Vdot", [f(8), f(8)], np.matmul),
    Call("AnyExt", [bools(4, 8), 1], _reduced(np.any)),
    Call("ReduceAny", [bools(4, 8), (1,), True], lambda x, *_: x.any(1, keepdims=True)),
    Call("DeprecatedReduceAll", [bools(4, 8)], _reduced(np.all), {"axis": 1}),
    Call("DeprecatedReduceAny", [bools(4, 8)], _reduced(np.any), {"axis": 1}),
    Call("ArgMaxExt", [X, 1], _reduced(np.argmax)),
    Call("Argmin", [X, 1, 34], _reduced(np.argmin)),
    Call("DeprecatedArgmin", [X, 1], _reduced(np.argmin)),
    Call("DeprecatedMean", [X], _reduced(np.mean), {"axis": (0, 1)}),
    Call("ReduceSum", [ints(9, 4, 8), (0,), True, False], lambda x, *_: x.sum(0, keepdims=True)),
    Call("ReduceSum", [Y, (0, 2), True, False], lambda x, *_: x.sum((0, 2), keepdims=True)),
    Call("DeprecatedMin", [X], _reduced(np.min), {"axis": 1}),
    Call("DeprecatedProd", [X, 1], _reduced(np.prod)),
    Call("ReduceProd", [X, 1, False], _reduced(np.prod)),
    Call("DeprecatedStd", [X, 1, 1, True], _spread),
    Call("Var", [X, 1, 0], lambda x, dim, _: x.var(dim)),
    Call("SumExt", [X, -1, True, None], lambda x, *_: x.sum(-1, keepdims=True)),
    Call("LogSoftmaxExt", [X, -1, None], lambda x, *_: x),
    Call("BroadcastToView", [X, (2, 4, 8)], np.broadcast_to),
    Call("ChunkView", [X, 2, 1], lambda x, number, dim: tuple(np.split(x, number, dim))),
    Call("SplitTensorView", [X, 4, 1], lambda x, size, dim: tuple(np.split(x, 2, dim))),
    Call("SplitWithSizeView", [X, (2, 6), 1], lambda x, sizes, dim: tuple(np.split(x, [2], dim))),
    Call("DeprecatedSplit", [X, (2, 6)], lambda x, sizes, axis: tuple(np.split(x, [2], axis)), {"axis": 1}),
    Call("ExpandDimsView", [X, 1], np.expand_dims),
    Call("DeprecatedUnsqueeze", [X, 1], np.expand_dims),
    Call("DeprecatedTranspose", [Y, 2, 0, 1], lambda x, *order: x.transpose(order)),
    Call("TransposeView", [X, (1, 0)], np.transpose),
    Call("View", [X, (8, 4)], np.reshape),
    Call("Repeat", [X, 2, 1], lambda x, *counts: np.tile(x, counts)),
    Call("RepeatInterleaveInt", [X, 2, 1, None], lambda x, count, dim, _: np.repeat(x, count, dim)),
    Call("Stack", [[X, f(4, 8)], 1], np.stack),
    Call("NarrowView", [X, 1, 0, 4], lambda x, dim, start, length: x[:, start : start + length]),
    Call("SelectExtView", [X, -1, -1], lambda x, dim, index: x[:, -1]),
    Call("SliceExtView", [X, 1, 2, 8, 2], lambda x, dim, start, end, step: x[:, start:end:step]),
    Call("SliceExt", [X, 0, 1, 3], lambda x, dim, start, end: x[start:end]),
    Call("DeprecatedIndexSelect", [X], _take, {"axis": 1, "index": ints(8, 2)}),
    Call("DeprecatedTake", [X, ints(4, 3), 1], np.take),
    Call("DeprecatedCumsum", [X], lambda x, axis: x.cumsum(axis), {"axis": 1}),
    Call("CumSum", [X, 1, False, True], lambda x, *_: x[:, ::-1].cumsum(1)[:, ::-1]),
    Call("SortExt", [X, 1, True], lambda x, *_: (-np.sort(-x, 1), np.argsort(-x, 1))),
    Call("OneHotExt", [ints(4, 2, 4), 4, np.int64(1), np.int64(0), -1], lambda x, *_: np.eye(4)[x]),
    Call("CumProd", [X, 1, False, False], lambda x, dim, *_: x.cumprod(dim)),
    *(Call(name, [Y, (1, 2), 0.0], _padded) for name in ("ConstantPadND", "PadV3")),
    *(Call(name, [Y, (0, 0, 2, 2), 1.5], _padded) for name in ("ConstantPadND", "PadV3")),
    Call("Take", [X, ints(32, 4)], np.take),
    Call("DiagExt", [f(8), 1], np.diag),
    Call("DiagExt", [X, 2], np.diag),
    *(Call("NLLLoss", [X, np.array([3, 2, 7, 2]), POSITIVE[0], reduction, 2], _likelihood) for reduction in (0, 1, 2)),
    Call("SoftmaxCrossEntropyWithLogits", [X, POSITIVE], _cross_entropy),
    Call(
        "SparseSoftmaxCrossEntropyWithLogits", [X, ints(8, 4)], lambda x, at: _cross_entropy(x, np.eye(8)[at])[0].mean()
    ),
    Call("FlashAttentionScore", [f(2, 4, 64), f(2, 4, 32), f(2, 4, 32), *[None] * 7, 4, 1.0, 0.25], _attention),
    Call(
        "PromptFlashAttention",
        [*QKV, *[None] * 9, 4, 1.0, 2**31 - 1, 0, 0, 2, 0, 1],
        lambda query, *_: np.zeros_like(query),
    ),
    Call("IncreFlashAttention", [*LISTS, *[None] * 12, 4, 0, 1.0, 2, 0, 1], lambda query, *_: np.zeros_like(query)),
    Call(
        "FusedInferAttentionScore",
        [*LISTS, *[None] * 21, 4, 1.0, 2**31 - 1, 2**31 - 1, 0, 2, 0, 1, 0, 0, False, 0, 0],
        lambda query, *_: (np.zeros_like(query), np.zeros(1)),
    ),
    Call(
        "SpeedFusionAttention",
        [*QKV, 4, 0, np.int64(1), np.int64(1), None, None, None, 1.0, 1.0],
        lambda query, *_: (np.zeros_like(query), *_attention(query)[:2], np.zeros(0), *[np.int64(0)] * 3),
    ),
    Call("Dropout", [X, 1.0, 0, 0], lambda x, *_: x),
    Call("FuncDropoutExt", [X, 0.5, True, False, np.int64(1), np.int64(1)], lambda x, *_: x),
]
ALL_CALLS = [
    *CALLS,
    *MORE_CALLS,
    *image_calls.IMAGE_CALLS,
    *scatter_calls.SCATTER_CALLS,
    *scatter_calls.LOSS_CALLS,
    *scatter_calls.EXPERTS_CALLS,
]
