"""Rules of operators that work element by element, with broadcasting: a table per algebraic property."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.signature import Signature, TensorMeta, is_float

__all__ = ["broadcast_shape", "elementwise", "keeps_digits", "tensors_in"]

_LINEAR_UNARY = ("Neg", "Identity", "Contiguous", "Copy", "Clone", "StopGradient")
_LINEAR_IN_FIRST = ("Muls", "Divs", "Div", "RealDiv")
_SUMS = ("Add", "AddExt", "AddScalar", "Sub", "SubExt", "SubScalar", "AddN")
_PRODUCTS = ("Mul",)
_NONLINEAR = (
    # unary
    "Abs", "ACos", "Asin", "Atan", "Ceil", "CeLU", "Cos", "Cosh", "Elu", "EluExt", "Erf", "Erfc", "Exp", "Expm1",
    "FastGeLU", "Floor", "GeLU", "GeluExt", "HSigmoid", "HSwish", "IsFinite", "IsInf", "IsNan",
    "LeakyReLUExt", "Log", "Log1p", "Log2", "Log10", "LogicalNot",
    "Mish", "OnesLike", "OnesLikeExt", "ReLU", "ReLU6", "Reciprocal", "Round", "Rsqrt", "Sigmoid", "Sign", "SiLU",
    "Sin", "Sinh", "Softplus", "SoftplusExt", "Sqrt", "Square", "Tan", "Tanh", "Trunc", "ZerosLike", "ZerosLikeExt",
    "FullLike", "EmptyLike", "BitwiseNot", "Inv", "MishExt", "SeLU", "SeLUExt",
    # binary and ternary
    "Addcdiv", "AddcdivExt", "Addcmul", "AddcmulExt", "Atan2", "Atan2Ext", "BitwiseAnd",
    "BitwiseOr", "BitwiseXor", "BitwiseAndScalar", "BitwiseAndTensor", "BitwiseOrScalar", "BitwiseOrTensor",
    "BitwiseXorScalar", "BitwiseXorTensor", "DivMod", "DivMods", "Equal", "EqualExt", "FloorDiv", "FloorDivScalar",
    "FloorMod", "Greater", "GreaterEqual", "GreaterEqualScalar", "Less", "LessEqual",
    "LessScalar", "EqScalar", "LogicalAnd", "LogicalOr", "LogicalXor", "Maximum",
    "Minimum", "Mod", "NotEqual", "Pow", "PowScalarTensor", "PowTensorScalar",
    "RemainderTensorScalar", "RemainderTensorTensor", "FmodScalar", "FmodTensor", "SquaredDifference", "Xlogy",
    "ClampScalar", "ClampTensor", "LogAddExp", "NanToNum", "Lerp", "LerpScalar",
    "TruncateDiv", "TruncateMod",
)  # fmt: skip


def tensors_in(args):
    """All `TensorMeta` of an argument list in order, as a `Signature` numbers its inputs, tuples and lists included."""
    found = []
    for argument in args:
        if isinstance(argument, TensorMeta):
            found.append(argument)
        elif isinstance(argument, (tuple, list)):
            found += tensors_in(argument)
    return found


def broadcast_shape(shapes):
    """The shape that `shapes` broadcast to. Raises `ValueError` where they don't."""
    ndim = max(map(len, shapes), default=0)
    result = []
    for place in range(-ndim, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
        if len(sizes) > 1:
            shown = ", ".join(map(str, shapes))
            raise ValueError(f"shapes {shown} don't broadcast: sizes {sorted(sizes)} meet in dim {place}")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def elementwise(*args, linear=(), **more):
    """The `Signature` of an operator whose output elements each depend on one element of every (broadcast) input."""
    tensors = tensors_in(args)
    shape = broadcast_shape([tensor.shape for tensor in tensors])
    starts = [len(shape) - tensor.ndim for tensor in tensors]
    dims = [
        tuple((f"d{dim}",) if size == shape[dim] else () for dim, size in enumerate(tensor.shape, start))
        for tensor, start in zip(tensors, starts)
    ]
    output = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes = {f"d{dim}": size for dim, size in enumerate(shape)}
    return Signature(tuple(dims), (output,), sizes, linear=linear, **more)


@register_operator(*_NONLINEAR)
def _nonlinear(*args, **named):
    return elementwise(*args, *named.values())


@register_operator("LogSigmoid")
def _log_sigmoid(x):
    """The second output is what the kernel keeps for its gradient."""
    plain = elementwise(x)
    return Signature(plain.inputs, plain.outputs * 2, plain.sizes)


@register_operator(*_LINEAR_UNARY)
def _linear_unary(x, *_, **__):
    return elementwise(x, linear=({0},))


@register_operator(*_LINEAR_IN_FIRST)
def _linear_in_first(x, *args, **named):
    return elementwise(x, *args, *named.values(), linear=({0},) if isinstance(x, TensorMeta) else ())


@register_operator(*_PRODUCTS)
def _product(*factors, **named):
    tensors = tensors_in([*factors, *named.values()])
    return elementwise(*tensors, linear=tuple({index} for index in range(len(tensors))))


@register_operator(*_SUMS)
def _sum_of_terms(*terms, **named):
    """A sum of tensors is linear in all of them together; with anything else than a 0 among them it is only affine."""
    terms = [*terms, *(value for name, value in named.items() if name != "alpha")]
    tensors = tensors_in(terms)
    affine = any(not isinstance(term, (TensorMeta, tuple, list)) and term != 0 for term in terms[:2])
    return elementwise(*tensors, linear=() if affine else (set(range(len(tensors))),))


@register_operator("Select", "DeprecatedWhere")
def _select(*args, **named):
    """The condition comes first, or, called as a method, second."""
    tensors = tensors_in([*args, *named.values()])
    condition = next((index for index, tensor in enumerate(tensors) if "bool" in tensor.dtype), 0)
    return elementwise(*tensors, linear=({0, 1, 2} - {condition},) if len(tensors) == 3 else ())


@register_operator("MaskedFill", "MaskedFillScalar")
def _masked_fill(x, mask, value):
    return elementwise(x, mask, value, linear=({0},) if isinstance(value, (int, float)) and value == 0 else ())


@register_operator("Cast", "ToDtype", "ToDevice")
def _cast(x, dtype=None, *_, **__):
    """Partial sums pass where the new dtype holds what the old one does: half-precision terms would lose digits."""
    return elementwise(x, linear=({0},) if is_float(x.dtype) and keeps_digits(dtype) else ())


@register_operator("TypeAs", "ToOther")
def _cast_like(x, other, *_, **__):
    plain = elementwise(x)
    looked_at = {f"t{dim}": size for dim, size in enumerate(other.shape)}
    inputs = (*plain.inputs, tuple((name,) for name in looked_at))
    return Signature(inputs, plain.outputs, plain.sizes | looked_at, whole=frozenset(looked_at))


def keeps_digits(dtype):
    """Whether a dtype argument is a wide float. MindSpore's enum values 43 and 44 are float32 and float64."""
    if isinstance(dtype, int):
        return dtype in (43, 44)
    return any(name in str(dtype).lower() for name in ("float32", "float64"))
