"""What the gradient of every operator keeps of its inputs and results, in PyNative on CPU: a table. Pure Python.

Measured with `mindspore.saved_tensors_hooks` (MindSpore 2.10); tests/test_recompute_saved_table.py holds it to that. An
operator that isn't in the table is taken to keep all floating inputs and all floating results.

An *operand* is a place among an operator's arguments as they were captured, positional ones first, tensor or not: in
`2 / x` the tensor `x` is operand 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from mindformers_core.operators.signature import is_float

__all__ = ["Operand", "SavedByOperator", "is_known", "known_operators", "saved_by"]

ALL, FLOATS, INTEGERS, BOOLS = "all", "floats", "integers", "bools"


@dataclass(frozen=True)
class Operand:
    """One tensor that an operator takes or gives, on one rank.

    Attributes:
        place: among the arguments, or among the results.
        shape: local shape.
        dtype: name.
        item_size: bytes of one element.
        needs: whether a gradient flows back to it.
    """

    place: int
    shape: tuple
    dtype: str
    item_size: int
    needs: bool = False

    @property
    def nbytes(self):
        """Bytes of the tensor on one rank."""
        return prod(self.shape) * self.item_size


@dataclass(frozen=True)
class SavedByOperator:
    """One row of the table.

    Attributes:
        inputs: places of operands that are kept whichever of them needs a gradient; or `"all"`, `"floats"`,
            `"integers"` (such as indices), or `"bools"` (masks).
        inputs_by_need: place of an operand -> places of those that are kept where it needs a gradient.
        outputs: places of the results that are kept; or `"floats"`.
        outputs_by_need: place of an operand -> places of the results that are kept where it needs a gradient.
        internal: `(operands, results) -> sizes`, bytes of each tensor that the operator makes for itself and keeps.
        as_they_are: whether an input that is a view is kept as such, that is, with the memory that it is a view of.
            Else the operator makes a copy first, even of a contiguous one, and that is what is kept.
    """

    inputs: tuple | str = ()
    inputs_by_need: dict = field(default_factory=dict)
    outputs: tuple | str = ()
    outputs_by_need: dict = field(default_factory=dict)
    internal: Callable | None = None
    as_they_are: bool = False

    def kept_inputs(self, operands):
        """Those of the `Operand`s that are kept, in order."""
        if self.inputs == ALL:
            return list(operands)
        if isinstance(self.inputs, str):
            return [operand for operand in operands if _kind(operand.dtype) == self.inputs]
        places = _places(self.inputs, self.inputs_by_need, operands)
        return [operand for operand in operands if operand.place in places]

    def kept_outputs(self, operands, results):
        """Those of the results, `Operand`s too, that are kept, in order."""
        if self.outputs == FLOATS:
            return [result for result in results if is_float(result.dtype)]
        places = _places(self.outputs, self.outputs_by_need, operands)
        return [result for result in results if result.place in places]

    def internal_sizes(self, operands, results):
        """Bytes of each tensor that is neither an input nor a result and is kept."""
        return list(self.internal(operands, results)) if self.internal else []


def saved_by(operator):
    """The `SavedByOperator` of an operator, by the name under which it is captured."""
    return _TABLE.get(operator, _UNKNOWN)


def is_known(operator):
    """Whether an operator is in the table; what isn't is taken to keep all that is floating."""
    return operator in _TABLE


def known_operators():
    """Names of all operators in the table, sorted."""
    return tuple(sorted(_TABLE))


def _kind(dtype):
    return FLOATS if is_float(dtype) else BOOLS if dtype == "bool" else INTEGERS


def _places(always, by_need, operands):
    found = set(always)
    for operand in operands:
        if operand.needs:
            found.update(by_need.get(operand.place, ()))
    return found


def _spread(operands, results):
    """Of a variance: the differences from the mean, and their powers."""
    return [operands[0].nbytes] * 2


def _spread_and_root(operands, results):
    """Of a standard deviation: that, and the variance."""
    return [*_spread(operands, results), results[0].nbytes]


def _index_of_extreme(operands, results):
    """Where each extreme stands, in int64."""
    return [prod(results[0].shape) * 8]


def _log_sum_exp(operands, results):
    """The maximum, the exponentials, and their sum."""
    return [results[0].nbytes, operands[0].nbytes, results[0].nbytes]


def _log_add_exp(operands, results):
    return [results[0].nbytes] * 2


def _factor(operands, results):
    """A float32 number."""
    return [4]


def _first_as_column(operands, results):
    return [operand.nbytes for operand in operands[:1] if any(other.needs for other in operands if other.place == 1)]


def _quotient(operands, results):
    return [results[0].nbytes] if any(operand.needs for operand in operands if operand.place == 1) else []


_UNKNOWN = SavedByOperator(FLOATS, outputs=FLOATS)
_OTHER = {0: (1,), 1: (0,)}  # of two operands, each is kept for the gradient of the other
_DIVISOR = {0: (1,), 1: (1,)}

_ROWS = (
    (
        SavedByOperator(),
        "Add AddExt AddN AddScalar Any AnyExt ArgMaxExt ArgMinExt Argmax Argmin BiasAdd BitwiseAnd BitwiseAndScalar "
        "BitwiseAndTensor BitwiseOr BitwiseOrScalar BitwiseOrTensor BitwiseXor BitwiseXorScalar BitwiseXorTensor "
        "BroadcastTo BroadcastToView Cast Ceil ChunkView Concat Contiguous CumSum CumsumExt DeprecatedArgmax "
        "DeprecatedArgmin DeprecatedCumsum DeprecatedMean DeprecatedReduceAll DeprecatedReduceAny "
        "DeprecatedRepeatInterleave DeprecatedSplit DeprecatedSum DeprecatedTranspose DeprecatedUnsqueeze DivMods "
        "Divs EmptyLike EqScalar Equal ExpandAs ExpandDims ExpandDimsView Flatten FlattenExt Floor FloorDiv FullLike "
        "Greater GreaterEqual GreaterEqualScalar Identity IsFinite IsInf IsNan Less LessEqual LessScalar LogicalAnd "
        "LogicalNot LogicalOr LogicalXor MeanExt Muls Neg NotEqual OneHot OnesLike PadV3 ReduceAll ReduceAny "
        "ReduceMean ReduceSum RemainderTensorScalar Repeat RepeatInterleaveInt Reshape ReverseV2 Round SelectExtView "
        "Sign SliceExt SliceExtView Split SplitTensorView SplitWithSize SplitWithSizeView Squeeze Stack "
        "StopGradient StridedSlice Sub SubExt SubScalar SumExt TExt Tile ToDevice ToDtype ToOther Transpose "
        "TransposeExtView TransposeView Tril TrilExt Triu Trunc TruncateDiv TypeAs Unstack UnstackExtView View ViewAs "
        "ZerosLike",
    ),
    (
        SavedByOperator(ALL),
        "Abs BatchMatMul BatchMatMulExt ClampScalar ClampTensor Cos Cosh DivMod Erf Erfc FmodScalar GLU GatherD "
        "HSigmoid HSwish Lerp LerpScalar Log Log1p Maximum Minimum NanToNum PowTensorScalar SiLU Sin Sinh SmoothL1Loss "
        "Square Xlogy",
    ),
    (
        SavedByOperator(ALL, as_they_are=True),
        "ACos ArgSort Asin Atan Atan2 Atan2Ext Chunk CumProd FastGeLU FloorMod Mish Mod Narrow NarrowView ReLU6 "
        "ReduceProd Slice Softplus Sort SortExt SplitTensor SquaredDifference TruncateMod",
    ),
    (SavedByOperator((0, 1)), "Dense"),
    (
        SavedByOperator(outputs=(0,)),
        "Elu Exp Expm1 Inv LogSoftmax ReLU Reciprocal Rsqrt SeLU Sigmoid Softmax Sqrt Tanh",
    ),
    (SavedByOperator(outputs=(1,)), "Dropout MaxDim MinDim SoftmaxCrossEntropyWithLogits TopK TopkExt"),
    (SavedByOperator(outputs=(0, 1)), "ArgMaxWithValue ArgMinWithValue"),
    (
        SavedByOperator(ALL, outputs=(0,)),
        "DeprecatedProd GeLU Max Min Pow PowScalarTensor ProdExt ReduceMax ReduceMin Tan",
    ),
    (
        SavedByOperator(ALL, outputs=(0,), as_they_are=True),
        "AvgPool CeLU MaxPool SparseSoftmaxCrossEntropyWithLogits",
    ),
    (SavedByOperator(ALL, outputs=(0, 1), as_they_are=True), "ReduceStd"),
    (SavedByOperator(ALL, outputs=(1,)), "NLLLoss"),
    (SavedByOperator((0, 1), outputs=(1, 2), as_they_are=True), "LayerNorm"),
    (SavedByOperator(ALL, outputs=(1, 2)), "GroupNorm"),
    (SavedByOperator(inputs_by_need=_OTHER), "DeprecatedMatmul Dot MatMul MatMulExt Mm Mul Mv"),
    (SavedByOperator(inputs_by_need=_OTHER, as_they_are=True), "Conv2D"),
    (SavedByOperator(inputs_by_need=_DIVISOR, outputs_by_need={1: (0,)}), "Div"),
    (SavedByOperator(inputs_by_need=_DIVISOR, outputs_by_need={1: (0,)}, as_they_are=True), "RealDiv"),
    (SavedByOperator(BOOLS), "DeprecatedWhere MaskedFill MaskedFillScalar Select"),
    (
        SavedByOperator(INTEGERS, as_they_are=True),
        "DeprecatedGather DeprecatedIndexSelect Gather GatherNd IndexSelect",
    ),
    (SavedByOperator(inputs_by_need={1: (2,), 2: (1,)}), "Addmm"),
    (SavedByOperator(inputs_by_need={1: (1, 2), 2: (1, 2)}), "Baddbmm"),
    (SavedByOperator(inputs_by_need={0: (1,)}, internal=_first_as_column), "Outer"),
    (SavedByOperator(internal=_spread), "DeprecatedVar Var"),
    (SavedByOperator(outputs=(0,), internal=_spread_and_root), "DeprecatedStd Std"),
    (SavedByOperator(outputs=(0,), internal=_index_of_extreme), "DeprecatedMax DeprecatedMin"),
    (SavedByOperator(ALL, internal=_log_sum_exp), "LogSumExp"),
    (SavedByOperator(ALL, internal=_log_add_exp), "LogAddExp"),
    (SavedByOperator(ALL, internal=_factor), "Log10 Log2"),
    (SavedByOperator(ALL, internal=_quotient), "FmodTensor"),
    (SavedByOperator((1,), internal=_quotient), "RemainderTensorTensor"),
)
_TABLE = {name: row for row, names in _ROWS for name in names.split()}
