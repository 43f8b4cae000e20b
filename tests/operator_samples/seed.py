"""The operators of MindSpore's table of usage constraints of operator-level parallelism: the seed of docs/operators.md.

The table has 167 rows. Two of them stand twice (TensorScatterMax, TensorScatterAdd), where Min and Sub are meant: these
are the last two here.
"""

from operator_samples.calls import NAMESPACES
from operator_samples.surface import targets

__all__ = ["CONSTRAINTS", "IMPOSSIBLE", "ROWS", "spellings"]

# A row's primitive, and what else is the same operator to an author: a name stands for the functions, methods and
# Cells of that name in all namespaces; with a dot it is one of them; anything else is an expression.
_TEXT = """
Abs: abs; absolute
ACos: acos; arccos
Acosh: acosh; arccosh
Add: add; p + q; p + 2.0; tensor_add
AddN: addn
ApproximateEqual: approximate_equal
ArgMaxWithValue: max; argmax_with_value
ArgMinWithValue: min; argmin_with_value
Asin: asin; arcsin
Asinh: asinh; arcsinh
Assign: assign
AssignAdd: assign_add
AssignSub: assign_sub
Atan: atan; arctan
Atan2: atan2; arctan2
Atanh: atanh; arctanh
AvgPool: AvgPool2d; avg_pool2d; avg_pool1d; AvgPool1d
AvgPool3D: AvgPool3d; avg_pool3d; ops.avg_pool3d
BatchMatMul: bmm; t @ bm; matmul
BatchNorm: batch_norm; BatchNorm1d; BatchNorm2d; BatchNorm3d
BesselI0e: bessel_i0e
BesselI1e: bessel_i1e
BiasAdd: bias_add
BitwiseAnd: bitwise_and
BitwiseOr: bitwise_or
BitwiseXor: bitwise_xor
BoundingBoxEncode: bounding_box_encode
BroadcastTo: broadcast_to; expand; expand_as
Cast: cast; astype; to; half; type_as; float; int; bool; double; long; short; byte; bfloat16
Cdist: cdist
Ceil: ceil
Concat: cat; concat
Conv2D: conv2d; Conv2d; conv1d; Conv1d
Conv3D: conv3d; Conv3d
Cos: cos
Cosh: cosh
CropAndResize: crop_and_resize
CumProd: cumprod
CumSum: cumsum
Div: div; p / q; divide; true_divide
DivNoNan
Dropout: dropout; Dropout
Elu: elu; ELU
EmbeddingLookup: Embedding; embedding; nn.EmbeddingLookup
Equal: eq; p == q
Erf: erf
Erfc: erfc
Erfinv: erfinv
Exp: exp; tensor_exp
ExpandDims: expand_dims; unsqueeze; x[:, None]
Expm1: expm1; tensor_expm1
Floor: floor
FloorDiv: floor_divide; p // q; floor_div; floordiv
FloorMod: remainder; p % q; floor_mod; floormod
Gamma: gamma; random_gamma
Gather: ops.gather; index_select; embedding; x[i]; x[:, i]
GatherD: gather_elements; mint.gather
GatherNd: gather_nd; x[i, i]
GeLU: gelu; GELU
Greater: greater; p > q; p > 0.5; gt; tensor_gt
GreaterEqual: greater_equal; p >= q; ge; tensor_ge
HShrink: hardshrink; HShrink; Hardshrink
HSigmoid: hardsigmoid; HSigmoid; Hardsigmoid
InplaceAdd: inplace_add
InplaceSub: inplace_sub
InplaceUpdate: inplace_update
Inv: ops.inv
IOU: iou
IsFinite
KLDivLoss: kl_div; nn.KLDivLoss; mint.nn.KLDivLoss
LayerNorm: layer_norm; LayerNorm; nn.LayerNorm
L2Loss
L2Normalize: normalize
Lerp: lerp
Less: less; p < q; lt; tensor_lt
LessEqual: less_equal; p <= q; le; tensor_le
LinSpace: linspace
LogicalAnd: logical_and; p & q
LogicalNot: logical_not
LogicalOr: logical_or
Log: log
Log1p: log1p
LogSoftmax: log_softmax; nn.LogSoftmax; mint.nn.LogSoftmax
MaskedFill: masked_fill
MatMul: matmul; mm; p @ q; dense; Dense; linear; nn.MatMul; nn.Linear; mint.nn.Linear
Maximum: maximum
MaxPool: MaxPool2d; max_pool2d; max_pool1d; MaxPool1d
MaxPool3D: MaxPool3d; max_pool3d
Minimum: minimum
Mish: mish; mint.nn.Mish; nn.Mish
Mod: fmod
Mul: mul; p * q; p * 2.0; multiply; tensor_mul
MulNoNan
Neg: neg; negative
NotEqual: ne; p != q; not_equal
OneHot: one_hot; nn.OneHot
OnesLike: ones_like
Pow: pow; p ** 2; 2 ** p; tensor_pow; float_power
PReLU: prelu; nn.PReLU; mint.nn.PReLU
RandomChoiceWithMask: choice_with_mask
RealDiv: div
Reciprocal: reciprocal
ReduceMax: amax; max; reduce_max
ReduceMin: amin; min; reduce_min
ReduceSum: sum; reduce_sum
ReduceMean: mean; reduce_mean
ReLU: relu; nn.ReLU; mint.nn.ReLU
ReLU6: relu6; nn.ReLU6; mint.nn.ReLU6
Reshape: reshape; view; view_as
ResizeNearestNeighbor: interpolate; upsample; Upsample
Rint
ROIAlign
Round: round
Rsqrt: rsqrt
ScatterAdd: ops.scatter_add; mint.scatter_add
ScatterDiv: ops.scatter_div
ScatterMax: ops.scatter_max
ScatterMin: ops.scatter_min
ScatterMul: ops.scatter_mul
ScatterNdAdd: scatter_nd_add
ScatterNdSub: scatter_nd_sub
ScatterNdUpdate: scatter_nd_update
ScatterSub
ScatterUpdate: scatter_update
TensorScatterAdd: tensor_scatter_add
TensorScatterDiv: tensor_scatter_div
TensorScatterMax: tensor_scatter_max
TensorScatterMul: tensor_scatter_mul
TensorScatterUpdate: tensor_scatter_update
Select: where; ops.select
SeLU: selu; nn.SeLU; SELU
Sigmoid: sigmoid; nn.Sigmoid; mint.nn.Sigmoid
SigmoidCrossEntropyWithLogits: binary_cross_entropy_with_logits; BCEWithLogitsLoss
Sign: sign
Sin: sin
Sinh: sinh
Softmax: softmax; nn.Softmax; mint.nn.Softmax
SoftmaxCrossEntropyWithLogits: SoftmaxCrossEntropyWithLogits; cross_entropy; CrossEntropyLoss
Softplus: softplus
Softsign: softsign; nn.Softsign
SoftShrink: softshrink; soft_shrink; nn.SoftShrink
SparseGatherV2
Split: split; chunk
Sqrt: sqrt
Square: square
SquaredDifference
Squeeze: squeeze
Stack: stack
StridedSlice: x[:, :4]; x[:, ::2]; narrow; strided_slice
Slice: slice
Sub: sub; p - q; 2.0 - p; subtract; tensor_sub
Tan: tan
Tanh: tanh; nn.Tanh; mint.nn.Tanh
Tile: tile; repeat
TopK: topk; top_k
Transpose: transpose; permute; x.T; swapaxes; swapdims; t
TruncateDiv: truncate_div
TruncateMod: truncate_mod
Unique: unique
UnsortedSegmentSum: unsorted_segment_sum
UnsortedSegmentMin: unsorted_segment_min
UnsortedSegmentMax: unsorted_segment_max
Xdivy: xdivy
Xlogy: xlogy
ZerosLike: zeros_like
TensorScatterMin: tensor_scatter_min
TensorScatterSub: tensor_scatter_sub
"""
ROWS = {line.partition(":")[0]: line.partition(":")[2].split("; ") for line in _TEXT.split("\n") if line}

_INDICES = "indices whole; leading dims of updates whole; the rest as x"
_BY_CONSTRAINT = {
    "axis cut: the result may differ from one card": "ArgMaxWithValue ArgMinWithValue ReduceMax ReduceMin",
    "NCHW; H and W cut where kernel <= stride and divisible": "AvgPool MaxPool",
    "NCDHW; W whole; D and H cut, neighbours exchanged on Ascend": "AvgPool3D MaxPool3D",
    "not on GPU": "BatchNorm",
    "first dim of both, alike": "BoundingBoxEncode",
    "a configured strategy has no effect": "Cast",
    "batch alike; M whole": "Cdist",
    "axis whole": "Concat CumProd CumSum L2Normalize LogSoftmax Softmax Split",
    "NCHW; C whole if groups; kernel dims whole; H and W cut with exchange (Ascend)": "Conv2D",
    "as Conv2D; W whole": "Conv3D",
    "H, W and the boxes' second dim whole": "CropAndResize",
    "as Gather": "EmbeddingLookup SparseGatherV2",
    "shape cut: the result differs from one card": "Gamma",
    "batch_dims: axis whole; else axis cut only for 1-D and 2-D params, no scalar indices, not both cut": "Gather",
    "dim whole": "GatherD",
    "first input whole; last dim of the second whole": "GatherNd",
    "first dim whole": "InplaceAdd InplaceSub InplaceUpdate",
    "first dims may be cut": "IOU",
    "gamma and beta cut as x from begin_params_axis on": "LayerNorm",
    "strategy of length 1": "LinSpace",
    "k cut alike; output (A, C) or (A*B, C)": "MatMul",
    "1-D indices only": "OneHot",
    "channels cut as the weight": "PReLU",
    "whole": "RandomChoiceWithMask Unique",
    "no strategy": "Reshape",
    "align_corners: batch and channels only": "ResizeNearestNeighbor",
    "H, W and the rois' second dim whole": "ROIAlign",
    _INDICES: "ScatterAdd ScatterDiv ScatterMax ScatterMin ScatterMul ScatterNdAdd ScatterNdSub ScatterNdUpdate "
    "ScatterSub ScatterUpdate TensorScatterAdd TensorScatterDiv TensorScatterMax TensorScatterMin TensorScatterMul "
    "TensorScatterSub TensorScatterUpdate",
    "last dim whole; only output 0": "SoftmaxCrossEntropyWithLogits",
    "masks 0; cut dims taken whole; strided dims whole": "StridedSlice",
    "cut dims taken whole": "Slice",
    "strategy for multiples only": "Tile",
    "last dim whole": "TopK",
    "x and segment_ids cut alike": "UnsortedSegmentSum UnsortedSegmentMin UnsortedSegmentMax",
}
CONSTRAINTS = {name: text for text, names in _BY_CONSTRAINT.items() for name in names.split()}

# why a spelling can't be parallel, whatever rule is written
IMPOSSIBLE = {
    "Unique": "the number of distinct values is the result's shape: known by values only, and capture has shapes",
}


def spellings(row):
    """The targets that are a row's operator: its primitive first."""
    found = [f"ops.{row}"]
    for token in filter(None, map(str.strip, ROWS[row])):
        if not token.isidentifier():
            found.append(token)
            continue
        for space in NAMESPACES:
            if token in targets(space):
                found.append(f"{space}.{token}")
    return list(dict.fromkeys(found))
