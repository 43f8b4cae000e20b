"""Rules of operators that work element by element, with broadcasting: a table per algebraic property."""

from dataclasses import replace

from mindformers_core.operators import saved, views
from mindformers_core.operators.registry import NO_GRADIENT, ZERO, register_operator
from mindformers_core.operators.rewrites import as_cast, condition_first, masked_fill, without_alpha
from mindformers_core.operators.rules.dims import equation, unary
from mindformers_core.operators.signature import TensorMeta, is_float, tensors_in
from mindformers_core.operators.words import WORDS, word


def _quotient(operands, results):
    """The truncated quotient, where the divisor needs a gradient."""
    return [results[0].nbytes] if any(operand.needs for operand in operands if operand.place == 1) else []


_QUOTIENT = saved.SavedByOperator(inputs_by_need={0: (1,), 1: (1,)}, outputs_by_need={1: (0,)})
_LOGARITHM = saved.SavedByOperator("all", internal=lambda operands, results: [4])  # a float32 number
_LOG_ADD_EXP = saved.SavedByOperator("all", internal=lambda operands, results: [results[0].nbytes] * 2)
_WITH_SCALAR = ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "GreaterEqual", "Less")
_ARCS = ("Acos", "Acosh", "Asin", "Asinh", "Atan")
# operators that are linear in no input: names, what their gradient saves, and their other facts
_NONLINEAR = (
    ("Abs Cos Cosh Erf Erfc HSigmoid HSwish Log Log1p NanToNum Sin Sinh Square", saved.INPUTS, {}),
    ("ClampScalar ClampTensor DivMod Lerp Maximum Minimum PowTensorScalar Xlogy", saved.INPUTS, {}),
    ("ACos Asin Atan Atan2 FloorMod Mod ReLU6 TruncateMod", saved.INPUTS_AS_THEY_ARE, {}),
    ("Elu Exp Expm1 Inv ReLU Reciprocal Rsqrt SeLU Sqrt", saved.RESULT, {}),
    ("Pow PowScalarTensor Tan", saved.INPUTS_AND_RESULT, {}),
    ("CeLU", saved.SavedByOperator("all", outputs=(0,), as_they_are=True), {}),
    ("BitwiseAnd BitwiseAndTensor BitwiseOr BitwiseXor DivMods FloorDiv TruncateDiv", saved.NOTHING, {}),
    ("Equal Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr LogicalXor NotEqual", saved.NOTHING, {}),
    ("Invert IsFinite IsInf IsNan LogicalNot", saved.NOTHING, {}),
    ("Addcdiv AddcdivExt Addcmul AddcmulExt BitwiseNot EqualExt FloorDivScalar", saved.UNMEASURED, {}),
    ("Acosh Asinh Atanh EluExt Erfinv Exp2 LeakyReLUExt MishExt SeLUExt Sinc", saved.UNMEASURED, {}),
    ("BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e", saved.UNMEASURED, {}),
    ("BesselK1 BesselK1e BesselY0 BesselY1 Digamma Lgamma Mvlgamma Polygamma Zeta", saved.UNMEASURED, {}),
    ("HShrink Hardtanh Logit SoftShrink Softsign Threshold", saved.UNMEASURED, {}),
    ("Complex Fmax Fmin Heaviside Hypot Igamma Igammac NextAfter Polar Xdivy", saved.UNMEASURED, {}),
    ("Angle ApproximateEqual Gcd IsClose Lcm LeftShift PopulationCount RightShift", saved.UNMEASURED, {}),
    ("Eps Fills OnesLikeExt Rint ZerosLikeExt", saved.UNMEASURED, {"gradient": ZERO}),
    ("Ceil Floor OnesLike Round Sign Trunc ZerosLike", saved.NOTHING, {"gradient": ZERO}),
    ("EmptyLike", saved.NOTHING, {"gradient": NO_GRADIENT}),
    ("FullLike", saved.NOTHING, {"gradient": NO_GRADIENT, "source": "ops.full_like(input, fill_value, dtype=None)"}),
    # of several operations an element
    ("SquaredDifference", saved.INPUTS_AS_THEY_ARE, {"operations": 2}),
    ("Sigmoid", saved.RESULT, {"operations": 3}),  # exp, add, divide
    ("Softplus", saved.INPUTS_AS_THEY_ARE, {"operations": 3}),
    ("SoftplusExt", saved.UNMEASURED, {"operations": 3}),
    ("Mish", saved.UNMEASURED, {"operations": 5}),
    ("Tanh", saved.RESULT, {"operations": 4}),
    ("SiLU", saved.INPUTS, {"operations": 4}),
    ("GeLU", saved.INPUTS_AND_RESULT, {"operations": 8}),
    ("FastGeLU", saved.INPUTS_AS_THEY_ARE, {"operations": 8}),
    ("GeluExt NpuGelu", saved.UNMEASURED, {"operations": 8}),
    # called in another way
    *((f"{name}Scalar", saved.NOTHING, {"rewrite": name}) for name in _WITH_SCALAR),
    ("EqScalar", saved.NOTHING, {"rewrite": "Equal"}),
    ("Atan2Ext", saved.INPUTS_AS_THEY_ARE, {"rewrite": "Atan2"}),
    ("LerpScalar", saved.INPUTS, {"rewrite": "Lerp"}),
    *((name, _LOGARITHM, {"source": f".{name.lower()}"}) for name in ("Log2", "Log10")),
    ("LogAddExp", _LOG_ADD_EXP, {"source": ".logaddexp"}),
    *((f"{name}Ext", saved.UNMEASURED, {"source": f".{name.lower()}"}) for name in _ARCS),
    *((name, saved.UNMEASURED, {"source": f".{name.lower()}"}) for name in ("Frac", "IsNegInf", "LogAddExp2")),
    ("FmodScalar", saved.INPUTS, {"source": ".fmod"}),
    ("FmodTensor", saved.SavedByOperator("all", internal=_quotient), {"source": ".fmod"}),
    ("RemainderTensorTensor", saved.SavedByOperator((1,), internal=_quotient), {"source": ".remainder"}),
    ("RemainderTensorScalar", saved.NOTHING, {"source": ".remainder"}),
    *((f"Bitwise{name}Tensor", saved.NOTHING, {"source": f".bitwise_{name.lower()}"}) for name in ("Or", "Xor")),
)


def elementwise(*args, linear=(), **more):
    """The `Signature` of an operator whose output elements each depend on one element of every (broadcast) input."""
    tensors = tensors_in(args)
    return equation(f"{', '.join(['...'] * len(tensors))} -> ...", *tensors, linear=linear, **more)


for _names, _saves, _facts in _NONLINEAR:
    register_operator(*_names.split(), saves=_saves, **_facts)(
        lambda *args, **named: elementwise(*args, *named.values())
    )


# the second output is the tensor that the kernel saves for its gradient
register_operator("LogSigmoid")(lambda x: unary(x, outputs=2))


@register_operator("Neg", "Identity", saves=saved.NOTHING)
@register_operator("Conj", "Imag", "ImagView", "Real", "RealView")
@register_operator("Contiguous", saves=saved.NOTHING, rewrite="Identity")  # graphs may not schedule one they return
@register_operator("Copy", "Clone")
@register_operator(
    "StopGradient", saves=saved.NOTHING, gradient=NO_GRADIENT, view=views.INPUT, source="ops.stop_gradient(value)"
)
def _linear_unary(x, *_, **__):
    return elementwise(x, linear=({0},))


@register_operator("Muls", "Divs", saves=saved.NOTHING)
@register_operator("DivNoNan", "MulNoNan")
@register_operator("Div", saves=_QUOTIENT)
@register_operator("RealDiv", saves=replace(_QUOTIENT, as_they_are=True))
def _linear_in_first(x, *args, **named):
    return elementwise(x, *args, *named.values(), linear=({0},) if isinstance(x, TensorMeta) else ())


@register_operator("Mul", saves=saved.OTHER_OPERAND)
def _product(*factors, **named):
    tensors = tensors_in([*factors, *named.values()])
    return elementwise(*tensors, linear=tuple({index} for index in range(len(tensors))))


@register_operator("Add", "Sub", saves=saved.NOTHING)
@register_operator("AddExt", "AddScalar", saves=saved.NOTHING, rewrite=without_alpha("Add"))
@register_operator("SubExt", "SubScalar", saves=saved.NOTHING, rewrite=without_alpha("Sub"))
@register_operator("AddN", saves=saved.NOTHING, source="(x)")
@register_operator("AccumulateNV2", source="(x)")
def _sum_of_terms(*terms, **named):
    """A sum of tensors is linear in all of them together; with anything else than a 0 among them it is only affine."""
    terms = [*terms, *(value for name, value in named.items() if name != "alpha")]
    tensors = tensors_in(terms)
    affine = any(not isinstance(term, (TensorMeta, tuple, list)) and term != 0 for term in terms[:2])
    return elementwise(*tensors, linear=() if affine else (set(range(len(tensors))),))


@register_operator("Assign", gradient=NO_GRADIENT, writes=True)
def _assign(parameter, value):
    """What is written is whole, or a part, as the Parameter is."""
    if parameter.shape != value.shape:
        raise ValueError(f"a Parameter of shape {list(parameter.shape)} is assigned {value!r}, of another shape")
    return elementwise(parameter, value)


@register_operator("Select", "DeprecatedWhere", saves=saved.MASKS, rewrite=condition_first)
def _select(*args, **named):
    """The condition comes first, or, called as a method, second."""
    tensors = tensors_in([*args, *named.values()])
    condition = next((index for index, tensor in enumerate(tensors) if "bool" in tensor.dtype), 0)
    return elementwise(*tensors, linear=({0, 1, 2} - {condition},) if len(tensors) == 3 else ())


@register_operator("MaskedFill", saves=saved.MASKS, rewrite=masked_fill)
@register_operator("MaskedFillScalar", saves=saved.MASKS, rewrite=masked_fill, source=".masked_fill")
def _masked_fill(x, mask, value):
    return elementwise(x, mask, value, linear=({0},) if isinstance(value, (int, float)) and value == 0 else ())


@register_operator("Cast", saves=saved.NOTHING, view=views.INPUT_IF_OF_ITS_DTYPE, source="ops.cast(input, dtype)")
@register_operator("ToDtype", saves=saved.NOTHING, rewrite=as_cast)
@register_operator("ToDevice", saves=saved.NOTHING, view=views.INPUT_IF_CONTIGUOUS)
def _cast(x, dtype=None, *_, **__):
    """Partial sums pass where the new dtype holds what the old one does: half-precision terms would lose digits."""
    return elementwise(x, linear=({0},) if is_float(x.dtype) and keeps_digits(dtype) else ())


@register_operator("TypeAs", saves=saved.NOTHING, view=views.INPUT_IF_OF_ITS_DTYPE, source=".type_as")
@register_operator("ToOther", saves=saved.NOTHING, view=views.INPUT_IF_CONTIGUOUS)
def _cast_like(x, other, *_, **__):
    return equation(f"..., {' '.join(f'T{dim}' for dim in range(other.ndim))} -> ...", x, other)


@register_operator("Dropout", draws=True, saves=saved.SECOND_RESULT, algorithms=("dropout",), operations=10)  # to draw
def dropout(x, keep_prob=0.5, seed0=0, seed1=0):
    """The tensor with some elements zeroed and the others scaled, and the mask. Any mesh draws the same numbers."""
    return unary(x, outputs=2, run="dropout")


@register_operator("FuncDropoutExt", draws=True, operations=10, algorithms=("func_dropout",))
def functional_dropout(x, p=0.5, training=True, inplace=False, seed=None, offset=None):
    """As `Dropout`, without the mask: what `mint` calls. `seed` and `offset` are scalar tensors."""
    if inplace:
        raise ValueError("dropout in place is not available for a distributed tensor: use its result")
    return elementwise(x, seed, offset, **{"run": "func_dropout"} if training else {"linear": ({0},)})


def keeps_digits(dtype):
    """Whether a dtype argument is a wide float."""
    return any(name in str(word("dtype", dtype)).lower() for name in WORDS["dtype"].values())
