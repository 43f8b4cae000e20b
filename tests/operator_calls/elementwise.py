"""Operators that compute elements from elements."""

import numpy as np

from operator_calls.call import SCALAR, Call, X, Y, Z, bools, f, ints, positive


def _rotary(x, cos, sin, _):
    first, second = np.split(x, 2, -1)
    return x * cos + np.concatenate((-second, first), -1) * sin


POSITIVE, SMALL = positive(4, 8), X / 4


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


_UNARY = {
    "Abs": np.abs, "ACos": np.arccos, "Asin": np.arcsin, "Atan": np.arctan, "Ceil": np.ceil,
    "CeLU": lambda x: np.where(x > 0, x, np.expm1(x)), "Contiguous": np.copy,
    "Cos": np.cos, "Cosh": np.cosh, "Elu": lambda x: np.where(x > 0, x, np.expm1(x)), "Erf": _erf,
    "Erfc": lambda x: 1 - _erf(x),
    "Expm1": np.expm1, "FastGeLU": lambda x: x / (1 + np.exp(-1.702 * np.abs(x))) * np.exp(0.851 * (x - np.abs(x))),
    "Floor": np.floor, "GeLU": _gelu, "HSigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "HSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "Identity": np.copy, "Inv": np.reciprocal,
    "IsFinite": np.isfinite, "IsInf": np.isinf, "IsNan": np.isnan, "Log1p": np.log1p,
    "Min": np.min, "Mish": lambda x: x * np.tanh(np.log1p(np.exp(x))), "OnesLike": np.ones_like,
    "ReLU": lambda x: np.maximum(x, 0), "ReLU6": lambda x: np.clip(x, 0, 6),
    "Reciprocal": np.reciprocal, "Round": np.round, "SeLU": _selu, "SiLU": lambda x: x * _sigmoid(x),
    "Sigmoid": _sigmoid, "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh, "Softplus": lambda x: np.log1p(np.exp(x)),
    "Square": np.square, "StopGradient": np.copy, "Tan": np.tan,
    "Tanh": np.tanh, "Trunc": np.trunc, "TrilExt": np.tril, "ZerosLike": np.zeros_like, "NanToNum": np.nan_to_num,
    "GLU": lambda x: x[:, :4] * _sigmoid(x[:, 4:]), "DeprecatedTranspose": np.transpose,
    "Flatten": np.copy,
    "Var": lambda x: x.var(ddof=1), "Std": np.std, "DeprecatedArgmax": np.argmax, "DeprecatedArgmin": np.argmin,
}  # fmt: skip
_UNARY_SHAPES = {  # without a kernel on CPU
    "Clone": np.copy, "EluExt": np.copy, "GeluExt": _gelu, "LeakyReLUExt": np.copy, "MishExt": np.copy,
    "OnesLikeExt": np.ones_like, "SeLUExt": _selu, "ZerosLikeExt": np.zeros_like,
    "StdMean": lambda x: (x.std(), x.mean()), "VarMean": lambda x: (x.var(), x.mean()),
}  # fmt: skip
_OF_POSITIVE = {"Log": np.log, "Log10": np.log10, "Log2": np.log2, "Rsqrt": lambda x: x**-0.5, "Sqrt": np.sqrt}

_BINARY = {
    "Add": np.add, "Atan2": np.arctan2, "Atan2Ext": np.arctan2, "Equal": np.equal,
    "FloorDiv": np.floor_divide, "FloorMod": np.mod, "FmodTensor": np.fmod, "Greater": np.greater, "Less": np.less,
    "GreaterEqual": np.greater_equal, "LessEqual": np.less_equal, "LogAddExp": np.logaddexp, "Maximum": np.maximum,
    "Minimum": np.minimum, "Mod": np.fmod, "NotEqual": np.not_equal, "RealDiv": np.divide, "SubExt": np.subtract,
    "RemainderTensorTensor": np.mod, "SquaredDifference": lambda x, y: (x - y) ** 2, "TruncateDiv": _round_to_zero,
    "TruncateMod": np.fmod, "DivMod": np.divide, "ToOther": lambda x, y: x,
}  # fmt: skip
_WITH_NUMBER = {
    "EqScalar": np.equal, "FmodScalar": np.fmod, "Muls": np.multiply,
    "GreaterEqualScalar": np.greater_equal, "LessScalar": np.less, "Divs": np.divide, "DivMods": np.divide,
    "PowTensorScalar": np.power, "RemainderTensorScalar": np.mod, "SubScalar": np.subtract, "FullLike": np.full_like,
    "Greater": np.greater, "NotEqual": np.not_equal, "Maximum": np.maximum, "Pow": np.power,
}  # fmt: skip
_OF_BOOLS = {
    "LogicalAnd": np.logical_and, "LogicalOr": np.logical_or, "LogicalXor": np.logical_xor,
    "BitwiseAndTensor": np.logical_and, "BitwiseOrTensor": np.logical_or, "BitwiseXorTensor": np.logical_xor,
}  # fmt: skip
_BITS = {"And": np.bitwise_and, "Or": np.bitwise_or, "Xor": np.bitwise_xor}


CALLS = [
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
    Call("LogSigmoid", [X], lambda x: (-np.log1p(np.exp(-x)), np.exp(-x)), runs="meta"),
    Call("Swiglu", [X, -1], lambda x, dim: np.prod(np.split(x, 2, dim), 0), runs="meta"),
    Call("RotaryPositionEmbedding", [Z, f(4, 8), f(4, 8), 0], _rotary, runs="meta"),
]
OTHERS = [
    *(Call(name, [SMALL], function) for name, function in _UNARY.items()),
    *(Call(name, [SMALL], function, runs="meta") for name, function in _UNARY_SHAPES.items()),
    Call("Copy", [SMALL], np.copy, broken="a graph has no such kernel; PyNative no gradient"),
    Call("EmptyLike", [SMALL], np.empty_like, broken="memory that was never written"),
    Call("SoftplusExt", [SMALL], lambda x: np.log1p(np.exp(x)), gradient="it has no kernel on CPU"),
    *(Call(name, [POSITIVE], function) for name, function in _OF_POSITIVE.items()),
    *(Call(name, [X, f(4, 8)], function) for name, function in _BINARY.items()),
    Call("EqualExt", [X, X], lambda x, y: np.array([(x == y).all()]), runs="meta"),
    *(Call(name, [X, 2], function) for name, function in _WITH_NUMBER.items()),
    Call("FloorDivScalar", [X, 2], np.floor_divide, runs="meta"),
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
    Call("LogicalNot", [bools(4, 8)], np.logical_not),
    Call("BitwiseNot", [ints(4, 4, 8)], np.invert, runs="meta"),
    Call("Addcdiv", [X, X, POSITIVE, np.float64(1)], lambda x, a, b, _: x + a / b),
    Call("Addcmul", [X, X, POSITIVE, np.float64(1)], lambda x, a, b, _: x + a * b),
    *(Call(name, [X, X, POSITIVE, 1], lambda x, *_: x, runs="meta") for name in ("AddcdivExt", "AddcmulExt")),
    Call("ClampScalar", [X, -1, 1.0], np.clip),
    Call("Lerp", [X, f(4, 8), f(4, 8)], lambda x, y, weight: x + weight * (y - x)),
    Call("Lerp", [X, f(4, 8), 0.5], lambda x, y, weight: x + weight * (y - x)),
    Call("LerpScalar", [X, f(4, 8), 0.5], lambda x, y, weight: x + weight * (y - x)),
    Call("MaskedFillScalar", [X, bools(4, 8), 0.5], lambda x, mask, value: np.where(mask, value, x)),
    Call("MaskedFillScalar", [ints(9, 4, 8), bools(4, 8), 2], lambda x, mask, value: np.where(mask, value, x)),
    Call("MaskedFillScalar", [bools(4, 8), bools(4, 8), True], lambda x, mask, value: x | mask),
    Call("DeprecatedWhere", [X, bools(4, 8), f(4, 8)], lambda x, mask, y: np.where(mask, x, y)),
    Call("ToDtype", [X, 42], lambda x, dtype: x.astype(np.float16)),
    Call("ToDevice", [X, "CPU"], lambda x, device: x, broken="a graph has no such kernel"),
    Call("Dropout", [X, 1.0, 0, 0], lambda x, *_: x),
    Call("FuncDropoutExt", [X, 0.5, True, False, np.int64(1), np.int64(1)], lambda x, *_: x, runs="meta"),
    Call("NpuGelu", [X, "tanh"], lambda x, _: _gelu(x), runs=""),
]
