"""Calls of scatters, losses and operators of experts, with what they compute, in NumPy: a part of `ALL_CALLS`."""

import numpy as np
from support.operator_calls import Call, bools, f, ints

__all__ = [
    "BROKEN",
    "EXPERTS_CALLS",
    "LOSS_CALLS",
    "SCATTER_CALLS",
    "WITHOUT_GRADIENT",
    "WITHOUT_KERNEL",
    "WITHOUT_META",
]

# nor on the meta device
WITHOUT_META = ("BincountExt", "CosineEmbeddingLoss", "Gmm", "GmmV2", "MoeTokenUnpermute", "NpuGelu")
WITHOUT_FLOAT32 = ("FusedInferAttentionScore", "IncreFlashAttention", "PromptFlashAttention")  # on the meta device
WITHOUT_KERNEL = (
    "GroupedMatmulV4", "HistcExt", "IndexFillScalar", "IndexFillTensor", "InnerMoeTokenUnpermute", "KLDiv",
    "L1LossExt", "MSELossExt", "MoeInitRoutingV2", "MoeTokenPermute", "MultilabelMarginLoss", "NLLLoss2d",
    "ScatterAddExt", "SoftMarginLoss", "SparseGatherV2", "TripletMarginLoss", *WITHOUT_META,
)  # fmt: skip
X, Y, P = f(4, 8), f(4, 8), np.random.default_rng(3).uniform(0.1, 0.9, (4, 8))
CUBE, COLUMNS = f(4, 8, 2), np.random.default_rng(4).permuted(np.tile(np.arange(8), (4, 1)), axis=1)[:, :6]
PLACES = np.array([[0, 1], [1, 7], [2, 3], [3, 0], [3, 5], [0, 6]])
SEGMENTS = np.array([[0, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 1]] * 2)
_UFUNCS = {
    "add": np.add,
    "sub": np.subtract,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "div": np.divide,
}
_HOW = {"Add": "add", "Sub": "sub", "Update": "none", "Max": "max", "Min": "min", "Mul": "mul", "Div": "div"}


def at(how, x, where, updates):
    """`x` with the updates at `where`, one after the other."""
    result = np.array(x)
    if how == "none":
        result[where] = updates
    else:
        _UFUNCS[how].at(result, where, updates)
    return result


def along(dim, index):
    """The place of every element of an index of elements."""
    where = list(np.ix_(*map(range, index.shape)))
    where[dim % index.ndim] = index
    return tuple(where)


def elements(x, dim, index, src, how="none"):
    """`mint.scatter`."""
    src = src[tuple(map(slice, index.shape))] if isinstance(src, np.ndarray) else src
    return at({0: "none", 1: "add"}.get(how, how), x, along(dim, index), src)


def slices(x, dim, index, source, alpha=1):
    """`index_add`."""
    return at("add", x, (slice(None),) * dim + (index,), alpha * source)


def filled(x, dim, index, value):
    return at("none", x, (slice(None),) * int(dim) + (index,), value)


def masked_scatter(x, mask, source):
    result = np.array(x)
    result[np.broadcast_to(mask, x.shape)] = source.ravel()[: np.broadcast_to(mask, x.shape).sum()]
    return result


def segments(reduce, first):
    def function(x, ids, count):
        result = np.full((count, *x.shape[ids.ndim :]), first)
        reduce.at(result, ids, x)
        return result

    return function


def histogram(x, bins=100, min=0, max=0):
    return np.histogram(x, bins, (x.min(), x.max()) if min == max else (min, max))[0]


def lookup(params, indices, offset):
    rows = indices - offset
    return np.where(((rows >= 0) & (rows < len(params)))[..., None], params[rows.clip(0, len(params) - 1)], 0)


def search_sorted(sequence, values, sorter=None, dtype=None, right=False):
    rows = np.broadcast_to(sequence, (*values.shape[:-1], sequence.shape[-1]))
    return (
        (rows[..., None, :] <= values[..., None]).sum(-1) if right else (rows[..., None, :] < values[..., None]).sum(-1)
    )


SCATTER_CALLS = [
    *(
        Call(f"TensorScatter{name}", [CUBE, PLACES, f(6, 2)], lambda x, i, u, how=how: at(how, x, tuple(i.T), u))
        for name, how in _HOW.items()
    ),
    Call("TensorScatterAdd", [X, ints(4, 2, 6, 1), f(2, 6, 8)], lambda x, i, u: at("add", x, i[..., 0], u)),
    Call("ScatterNd", [ints(4, 6, 2), f(6, 2), (4, 8, 2)], lambda i, u, s: at("add", np.zeros(s), tuple(i.T), u)),
    Call("ScatterAddExt", [X, 1, ints(8, 4, 6), f(4, 6)], lambda x, d, i, u: elements(x, d, i, u, "add")),
    Call("ScatterAddExt", [X, 0, ints(4, 6, 8), f(8, 8)], lambda x, d, i, u: elements(x, d, i, u, "add")),
    Call("Scatter", [X, 1, COLUMNS, f(4, 6), 0], elements),
    Call("Scatter", [X, -1, ints(8, 4, 6), f(4, 6)], lambda *a, reduce: elements(*a, reduce), {"reduce": "add"}),
    Call("ScatterValue", [X, 1, COLUMNS, 2.5, 0], elements),
    Call("DeprecatedScatter", [X], lambda x, axis, index, src: elements(x, axis, index, src),
         {"axis": 1, "index": COLUMNS, "src": f(4, 6)}),
    Call("TensorScatterElements", [X, COLUMNS, f(4, 6), 1, "none"], lambda x, i, u, d, how: elements(x, d, i, u, how)),
    Call("TensorScatterElements", [X, ints(4, 6, 8), f(6, 8), 0, "add"], lambda x, i, u, d, h: elements(x, d, i, u, h)),
    Call("IndexAddExt", [X, 1, ints(8, 6), f(4, 6)], slices),
    Call("IndexAddExt", [CUBE, 0, ints(4, 6), f(6, 8, 2), 2], slices),
    Call("IndexFillScalar", [X, 1, ints(8, 4), 2.0], filled),
    Call("IndexFillTensor", [X, 0, ints(4, 2), np.float64(2)], filled),
    Call("IndexFill", [X, np.int32(1), ints(8, 4), np.float64(2)], filled),
    Call("MaskedScatter", [X, bools(4, 8), f(32)], masked_scatter),
    Call("IndexPut", [X, f(6), (PLACES[:, 0], PLACES[:, 1]), 0], lambda x, u, i, _: at("none", x, i, u)),
    Call("IndexPut", [X, f(6), (ints(4, 6), ints(8, 6)), 1], lambda x, u, i, _: at("add", x, i, u)),
    Call("UnsortedSegmentSum", [f(4, 6, 2), SEGMENTS, 4], segments(np.add, 0.0)),
    Call("UnsortedSegmentMax", [f(4, 6, 2), SEGMENTS, 3], segments(np.maximum, -np.inf)),
    Call("UnsortedSegmentMin", [f(4, 6, 2), SEGMENTS, 3], segments(np.minimum, np.inf)),
    Call("UnsortedSegmentProd", [f(4, 6, 2), SEGMENTS, 4], segments(np.multiply, 1.0)),
    *(Call(name, [X, 4, *ends], histogram) for name in ("HistcExt", "Histogram") for ends in ((-2.0, 2.0), (0.0, 0.0))),
    Call("EmbeddingLookup", [f(6, 4), ints(8, 4, 2), 1], lookup),
    Call("SearchSorted", [np.sort(X), Y], search_sorted),
    Call("SearchSorted", [np.sort(X), Y, None, 35, True], search_sorted),
    Call("SearchSorted", [np.sort(X[0]), Y], search_sorted),
    Call("SparseGatherV2", [X, ints(8, 2, 4), 1], lambda x, i, axis: np.take(x, i, axis)),
]  # fmt: skip


def _log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def with_logits(x, y, weight=1.0, pos_weight=1.0):
    return -weight * (pos_weight * y * _log_sigmoid(x) + (1 - y) * _log_sigmoid(-x))


def of_probabilities(x, y, weight=1.0):
    return -weight * (y * np.log(x) + (1 - y) * np.log(1 - x))


def reduced(function, place):
    """`function` with its elements reduced as the argument at `place` says."""

    def call(*args, reduction=None):
        word = args[place] if reduction is None else reduction
        word = ("sum", "mean", "none")[word] if isinstance(word, int) else word
        every = function(*(1.0 if given is None else given for given in args[:place]))
        means = {"sum": np.sum, "mean": np.mean, "none": np.copy, "batchmean": lambda x: x.sum() / len(x)}
        return means[word](every)

    return call


def multi_margin(x, target, weight):
    own = np.take_along_axis(x, target[:, None], 1)
    each = np.maximum(0, 1 - own + x) * weight[target][:, None]
    return (each.sum(1) - weight[target]) / x.shape[1]


def likelihood_of_images(x, labels, weight, reduction, ignored):
    picked = -np.take_along_axis(x, labels[:, None], 1)[:, 0]
    weights = weight[labels] * (labels != ignored)
    losses = picked * weights
    return (losses.sum(), losses.sum() / weights.sum(), losses)[reduction], weights.sum()


def alignments(x, targets, *_):
    """The shapes only."""
    return np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[0], 2 * targets.shape[1] + 1))


_ALL = [0, 1, 2]
_WORDS = ("sum", "mean", "none")
_ELEMENTS = [
    *(("BCEWithLogitsLoss", [X, P, P[0], P[1], number], with_logits) for number in _ALL),
    ("BCEWithLogitsLoss", [X, P, None, None, 1], with_logits),
    *(("BinaryCrossEntropy", [P, P[::-1], P, number], of_probabilities) for number in _ALL),
    *(("MSELossExt", [X, Y, number], lambda x, y: (x - y) ** 2) for number in _ALL),
    ("L1LossExt", [X, Y[0], 1], lambda x, y: abs(x - y)),
    ("SoftMarginLoss", [X, np.sign(Y), 1], lambda x, y: np.log1p(np.exp(-x * y))),
    *(("KLDivLoss", [X, P, word], lambda x, y: y * (np.log(y) - x)) for word in (*_WORDS, "batchmean")),
]
LOSS_CALLS = [
    *(Call(name, args, reduced(function, len(args) - 1)) for name, args, function in _ELEMENTS),
    Call("KLDiv", [X, P, 1, False], lambda x, y, *_: (y * (np.log(y) - x)).mean()),
    Call("SigmoidCrossEntropyWithLogits", [X, P], with_logits),
    *(
        Call("MultiMarginLoss", [X, ints(8, 4), P[0]], reduced(multi_margin, 3), {"reduction": word})
        for word in _WORDS
    ),
    Call("MultilabelMarginLoss", [X, ints(8, 4, 8)], lambda x, y, reduction: (x[:, 0], y), {"reduction": "none"}),
    Call("MultilabelMarginLoss", [X, ints(8, 4, 8)], lambda x, y, reduction: (x.sum(), y), {"reduction": "sum"}),
    Call("TripletMarginLoss", [CUBE, CUBE, CUBE, np.float64(1)], lambda x, *_, reduction: x[:, 0],
         {"reduction": "none"}),
    Call("TripletMarginLoss", [X, X, X, np.float64(1)], lambda x, *_, reduction: x.mean(), {"reduction": "mean"}),
    Call("CTCLossV2", [f(6, 2, 4), ints(3, 2, 2) + 1, np.array([6, 6]), np.array([2, 1])], alignments),
    Call("CTCLoss", [f(6, 2, 4), np.array([[0, 0], [1, 0]]), ints(3, 2), np.array([6, 6])],
         lambda x, *_: (np.zeros(x.shape[1]), x)),
    *(
        Call("NLLLoss2d", [f(2, 8, 4, 2), ints(8, 2, 4, 2), P[0], number, 2], likelihood_of_images) for number in _ALL
    ),
]  # fmt: skip

TOKENS, EXPERTS, ENDS = f(8, 4), f(2, 4, 6), np.array([3, 8])


def counted(x, weights=None, minlength=0):
    return np.bincount(x, weights, minlength)


def cosine_loss(x, y, target, margin, reduction):
    cosine = (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    loss = np.where(target == 1, 1 - cosine, np.maximum(0, cosine - margin))
    return loss if reduction == 2 else loss.mean() if reduction == 1 else loss.sum()


def gelu(x, approximate):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def grouped(x, weight, bias=None, *rest, **_):
    """Of two groups: 3 rows, and 5."""
    (x,), (weight,) = x, weight
    if weight.ndim == 2:
        return np.stack([x[:, :3] @ weight[:3], x[:, 3:] @ weight[3:]])
    added = (0, 0) if bias is None else bias[0]
    return np.concatenate([x[:3] @ weight[0] + added[0], x[3:] @ weight[1] + added[1]])


def permuted(tokens, indices, *_):
    order = np.argsort(indices.ravel(), kind="stable")
    return tokens[order // (indices.size // len(tokens))], np.argsort(order)


def unpermuted(tokens, places, probs=None, *_):
    found = tokens[places]
    return found if probs is None else (found.reshape(*probs.shape, -1) * probs[..., None]).sum(1)


def routed(x, experts, active_num, capacity, count, *_):
    rows, places = permuted(x, experts)
    counts = np.bincount(experts.ravel(), minlength=count)
    return rows, places, counts, counts


_GROUPS = {"group_list": ENDS, "split_item": 3}
EXPERTS_CALLS = [
    Call("BincountExt", [ints(4, 8), None, 4], counted),
    Call("BincountExt", [ints(4, 8), f(8), 4], counted),
    *(Call("CosineEmbeddingLoss", [X, Y, np.array([1, -1, 1, -1.0]), 0.1, how], cosine_loss) for how in (0, 1, 2)),
    Call("NpuGelu", [X, "tanh"], gelu),
    Call("GroupedMatmulV4", [[TOKENS], [EXPERTS]], grouped, _GROUPS | {"group_type": 0}),
    Call("GroupedMatmulV4", [[TOKENS], [EXPERTS], [f(2, 6)]], grouped, _GROUPS | {"group_type": 0}),
    Call("GroupedMatmulV4", [[f(4, 8)], [f(8, 6)]], grouped, _GROUPS | {"group_type": 2}),
    *(Call(name, [[TOKENS], [EXPERTS], None, ENDS, 0, 0], grouped) for name in ("Gmm", "GmmV2")),
    Call("MoeTokenPermute", [X, ints(2, 4, 2), None, False], permuted),
    *(
        Call(name, [TOKENS, np.random.default_rng(5).permutation(8), *more], unpermuted)
        for name in ("MoeTokenUnpermute", "InnerMoeTokenUnpermute")
        for more in ([], [P[:, :2]])
    ),
    Call("MoeInitRoutingV2", [X, ints(2, 4, 2), 0, 0, 2, 0, 1, False], routed),
]

BROKEN = {  # on CPU
    str(call): "indices of 64 bits are needed" if call.name != "CTCLossV2" else "NumPy gives its shapes only"
    for call in LOSS_CALLS
    if call.name in ("MultiMarginLoss", "CTCLoss", "CTCLossV2")
}
WITHOUT_GRADIENT = {
    "KLDivLoss([4, 8], [4, 8], batchmean)": "it is divided by the number of rows of a process's first call",
    **{
        str(call): "its gradient is sparse, or there is none"
        for call in SCATTER_CALLS
        if call.name in ("EmbeddingLookup", "Histogram")
    },
}
