"""Samples of the classic primitives that the seed's table names, and of spellings that are no functions."""

__all__ = ["EXPRESSIONS", "SAMPLES"]

_UNARY = (
    "Abs Atan Asinh BesselI0e BesselI1e Ceil Cos Cosh Elu Erf Erfc Exp Expm1 Floor GeLU HShrink HSigmoid Inv IsFinite "
    "Mish Neg OnesLike ReLU ReLU6 Rint Round SeLU Sigmoid Sign Sin Sinh SoftShrink Softplus Softsign Square Tan Tanh "
    "ZerosLike Reciprocal L2Loss"
)
_PROBABILITIES = "ACos Asin Atanh Erfinv Log Log1p Rsqrt Sqrt"
_BINARY = (
    "Add ApproximateEqual Atan2 Div DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual Less LessEqual Maximum "
    "Minimum Mod Mul MulNoNan NotEqual RealDiv SquaredDifference Sub TruncateDiv TruncateMod"
)
_REDUCED = "ReduceMax ReduceMin ReduceSum ReduceMean"
_SCATTER = "ScatterAdd ScatterDiv ScatterMax ScatterMin ScatterMul ScatterSub ScatterUpdate"
_SCATTER_ND = "ScatterNdAdd ScatterNdSub ScatterNdUpdate"
_TENSOR_SCATTER = (
    "TensorScatterAdd TensorScatterDiv TensorScatterMax TensorScatterMin TensorScatterMul TensorScatterSub "
    "TensorScatterUpdate"
)
_FAMILIES = (
    (_UNARY, "; f(4, 8)"),
    (_PROBABILITIES, "; pos(4, 8)"),
    (_BINARY, "; f(4, 8), f(4, 8)"),
    ("Pow Xdivy Xlogy", "; pos(4, 8), pos(4, 8)"),
    ("BitwiseAnd BitwiseOr BitwiseXor", "; i(4, 8), i(4, 8)"),
    ("LogicalAnd LogicalOr", "; b(4, 8), b(4, 8)"),
    (_REDUCED, "; f(4, 8), 1"),
    ("ArgMaxWithValue ArgMinWithValue", "axis=1; f(4, 8)"),
    ("Assign AssignAdd AssignSub", "; P(f(4, 8)), f(4, 8)"),
    (_SCATTER, "; P(f(4, 8)), t(0, 2, dtype='int32'), f(2, 8)"),
    (_SCATTER_ND, "; P(f(8)), i(4, 1), f(4)"),
    (_TENSOR_SCATTER, "; f(4, 8), i(4, 1), f(4, 8)"),
    ("InplaceAdd InplaceSub InplaceUpdate", "(0, 2); f(4, 8), f(2, 8)"),
    ("UnsortedSegmentSum UnsortedSegmentMin UnsortedSegmentMax", "; f(4, 8), t(2, 0, 1, 0), 3"),
    ("AvgPool MaxPool", "2, 2; f(2, 4, 8, 8)"),
    ("AvgPool3D MaxPool3D", "2, 2; f(2, 4, 4, 4, 4)"),
    ("CumProd CumSum", "; f(4, 8), 1"),
)

SAMPLES = {"ops": {name: text for names, text in _FAMILIES for name in names.split()}}
SAMPLES["ops"] |= {
    "Acosh": "; pos(4, 8, least=1.1, most=3)",
    "AddN": "; [f(4, 8), f(4, 8)]",
    "BatchMatMul": "; f(2, 4, 6), f(2, 6, 8)",
    "BatchNorm": "is_training=True; f(2, 4, 8, 8), f(4), f(4), P(f(4)), P(pos(4))",
    "BiasAdd": "; f(4, 8), f(8)",
    "BoundingBoxEncode": "; pos(4, 4), pos(4, 4)",
    "BroadcastTo": "(4, 8); f(4, 1)",
    "Cast": "; f(4, 8), ms.float16",
    "Cdist": "; f(2, 4, 8), f(2, 6, 8)",
    "Concat": "1; [f(4, 8), f(4, 8)]",
    "Conv2D": "6, 3; f(2, 4, 8, 8), f(6, 4, 3, 3)",
    "Conv3D": "6, 3; f(2, 4, 4, 4, 4), f(6, 4, 3, 3, 3)",
    "CropAndResize": "; f(2, 8, 8, 4), pos(4, 4), i(4, high=2), (4, 4)",
    "Dropout": "keep_prob=0.5; f(4, 8)",
    "EmbeddingLookup": "; f(8, 4), i(4, 2), 0",
    "ExpandDims": "; f(4, 8), 1",
    "Gamma": "; (4, 8), pos(1), pos(1)",
    "Gather": "; f(4, 8), i(6), 1",
    "GatherD": "; f(4, 8), 1, i(4, 4)",
    "GatherNd": "; f(4, 8), i(6, 1)",
    "IOU": "; pos(4, 4), pos(6, 4)",
    "KLDivLoss": "; f(4, 8), pos(4, 8)",
    "L2Normalize": "axis=1; f(4, 8)",
    "LayerNorm": "1, 1; f(4, 8), f(8), f(8)",
    "Lerp": "; f(4, 8), f(4, 8), f(4, 8)",
    "LinSpace": "; k(0.0), k(1.0), 8",
    "LogSoftmax": "1; f(4, 8)",
    "LogicalNot": "; b(4, 8)",
    "MaskedFill": "; f(4, 8), b(4, 8), 0.5",
    "MatMul": "; f(4, 6), f(6, 8)",
    "OneHot": "; i(4, 2), 4, k(1.0), k(0.0)",
    "PReLU": "; f(2, 4, 8, 8), f(4)",
    "ROIAlign": "2, 2, 0.5, 2; f(2, 4, 8, 8), pos(4, 5)",
    "RandomChoiceWithMask": "8; b(4, 8)",
    "Reshape": "; f(4, 8), (8, 4)",
    "ResizeNearestNeighbor": "(16, 16); f(2, 4, 8, 8)",
    "Select": "; b(4, 8), f(4, 8), f(4, 8)",
    "SigmoidCrossEntropyWithLogits": "; f(4, 8), pos(4, 8)",
    "Slice": "; f(4, 8), (0, 2), (4, 4)",
    "Softmax": "1; f(4, 8)",
    "SoftmaxCrossEntropyWithLogits": "; f(4, 8), pos(4, 8)",
    "SparseGatherV2": "; f(4, 8), i(6), 1",
    "Split": "1, 2; f(4, 8)",
    "Squeeze": "1; f(4, 1, 8)",
    "Stack": "; [f(4, 8), f(4, 8)]",
    "StridedSlice": "; f(4, 8), (0, 2), (4, 8), (1, 2)",
    "Tile": "; f(4, 8), (2, 1)",
    "TopK": "; f(4, 8), 2",
    "Transpose": "; f(2, 4, 8), (2, 0, 1)",
    "Unique": "; i(8)",
}

# the names in an expression stand for the values, in the order of their first appearance
EXPRESSIONS = {
    **{f"p {sign} q": "f(4, 8), f(4, 8)" for sign in ("+", "-", "*", "/", "//", "%", "==", "!=", "<", "<=", ">", ">=")},
    "p + 2.0": "f(4, 8)",
    "p * 2.0": "f(4, 8)",
    "2.0 - p": "f(4, 8)",
    "p > 0.5": "f(4, 8)",
    "p ** 2": "f(4, 8)",
    "2 ** p": "f(4, 8)",
    "p & q": "b(4, 8), b(4, 8)",
    "p @ q": "f(4, 6), f(6, 8)",
    "t @ bm": "f(2, 4, 6), f(2, 6, 8)",
    "x[i]": "f(4, 8), i(6)",
    "x[:, i]": "f(4, 8), i(6)",
    "x[i, i]": "f(4, 8), i(6)",
    "x[:, :4]": "f(4, 8)",
    "x[:, ::2]": "f(4, 8)",
    "x[:, None]": "f(4, 8)",
    "x.T": "f(4, 8)",
}
