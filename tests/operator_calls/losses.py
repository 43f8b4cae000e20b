"""Losses, and operators of mixtures of experts."""

import numpy as np

from operator_calls.call import CUBE, Call, X, f, ints, p, positive

P = p(4, 8)
_ALL = 0, 1, 2
_WORDS = "sum", "mean", "none"
WIDE = "indices of 64 bits are needed"


def smooth_l1_loss(x, target, beta, reduction):
    """`ops.smooth_l1_loss`; the reduction is the sum (0), the mean (1) or none (2)."""
    off = np.abs(x - target)
    loss = np.where(off < beta, off**2 / (2 * beta), off - beta / 2)
    return (np.sum, np.mean, lambda each: each)[reduction](loss)


def _cross_entropy(x, labels):
    log_of = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return -(labels * log_of).sum(-1), np.exp(log_of) - labels


def _log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def with_logits(x, y, weight=1.0, pos_weight=1.0):
    return -weight * (pos_weight * y * _log_sigmoid(x) + (1 - y) * _log_sigmoid(-x))


def of_probabilities(x, y, weight=1.0):
    return -weight * (y * np.log(x) + (1 - y) * np.log(1 - x))


def reduced(name, args, function, named=None, **exceptions):
    """The call of a loss whose elements are reduced as its last argument says."""
    place = len(args) - (named is None)

    def call(*args, reduction=None):
        word = args[place] if reduction is None else reduction
        word = _WORDS[word] if isinstance(word, int) else word
        every = function(*(1.0 if given is None else given for given in args[:place]))
        means = {"sum": np.sum, "mean": np.mean, "none": np.copy, "batchmean": lambda x: x.sum() / len(x)}
        return means[word](every)

    return Call(name, args, call, named or {}, **exceptions)


def divergence(x, y):
    return y * (np.log(y) - x)


def multi_margin(x, target, weight):
    own = np.take_along_axis(x, target[:, None], 1)
    each = np.maximum(0, 1 - own + x) * weight[target][:, None]
    return (each.sum(1) - weight[target]) / x.shape[1]


def likelihood(x, labels, weight, reduction, ignored):
    picked = -np.take_along_axis(x, labels[:, None], 1)[:, 0]
    weights = weight[labels] * (labels != ignored)
    losses = picked * weights
    return (losses.sum(), losses.sum() / weights.sum(), losses)[reduction], weights.sum()


def alignments(x, targets, *_):
    """The shapes only."""
    return np.zeros(x.shape[1]), np.zeros((x.shape[1], x.shape[0], 2 * targets.shape[1] + 1))


TOKENS, EXPERTS, ENDS, SIGNS = f(8, 4), f(2, 4, 6), np.array([3, 8]), np.array([1, -1, 1, -1.0])


def cosine_loss(x, y, target, margin, reduction):
    cosine = (x * y).sum(-1) / np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    loss = np.where(target == 1, 1 - cosine, np.maximum(0, cosine - margin))
    return loss if reduction == 2 else loss.mean() if reduction == 1 else loss.sum()


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


CALLS = [
    *(Call("SmoothL1Loss", [X, f(4, 8), 1.0, reduction], smooth_l1_loss) for reduction in (0, 1, 2)),
]
OTHERS = [
    *(Call("NLLLoss", [X, np.array([3, 2, 7, 2]), positive(8), reduction, 2], likelihood) for reduction in (0, 1, 2)),
    Call("SoftmaxCrossEntropyWithLogits", [X, positive(4, 8)], _cross_entropy),
    Call(
        "SparseSoftmaxCrossEntropyWithLogits", [X, ints(8, 4)], lambda x, at: _cross_entropy(x, np.eye(8)[at])[0].mean()
    ),
    *(reduced("BCEWithLogitsLoss", [X, P, p(8), p(8), number], with_logits) for number in _ALL),
    reduced("BCEWithLogitsLoss", [X, P, None, None, 1], with_logits),
    *(reduced("BinaryCrossEntropy", [P, P, P, number], of_probabilities) for number in _ALL),
    *(reduced("MSELossExt", [X, X, number], lambda x, y: (x - y) ** 2, runs="meta") for number in _ALL),
    reduced("L1LossExt", [X, f(8), 1], lambda x, y: abs(x - y), runs="meta"),
    reduced("SoftMarginLoss", [X, f(4, 8).then(np.sign), 1], lambda x, y: np.log1p(np.exp(-x * y)), runs="meta"),
    *(reduced("KLDivLoss", [X, P, word], divergence) for word in _WORDS),
    reduced("KLDivLoss", [X, P, "batchmean"], divergence, gradient="it is divided by a process's first number of rows"),
    Call("KLDiv", [X, P, 1, False], lambda x, y, *_: divergence(x, y).mean(), runs="meta"),
    Call("SigmoidCrossEntropyWithLogits", [X, P], with_logits),
    *(
        reduced("MultiMarginLoss", [X, ints(8, 4), p(8)], multi_margin, {"reduction": word}, broken=WIDE)
        for word in _WORDS
    ),
    Call(
        "MultilabelMarginLoss",
        [X, ints(8, 4, 8)],
        lambda x, y, reduction: (x[:, 0], y),
        {"reduction": "none"},
        runs="meta",
    ),
    Call(
        "MultilabelMarginLoss",
        [X, ints(8, 4, 8)],
        lambda x, y, reduction: (x.sum(), y),
        {"reduction": "sum"},
        runs="meta",
    ),
    Call(
        "TripletMarginLoss",
        [CUBE, CUBE, CUBE, np.float64(1)],
        lambda x, *_, reduction: x[:, 0],
        {"reduction": "none"},
        runs="meta",
    ),
    Call(
        "TripletMarginLoss",
        [X, X, X, np.float64(1)],
        lambda x, *_, reduction: x.mean(),
        {"reduction": "mean"},
        runs="meta",
    ),
    Call(
        "CTCLossV2",
        [f(6, 2, 4), ints(3, 2, 2) + 1, np.array([6, 6]), np.array([2, 1])],
        alignments,
        broken="NumPy gives its shapes only",
    ),
    Call(
        "CTCLoss",
        [f(6, 2, 4), np.array([[0, 0], [1, 0]]), ints(3, 2), np.array([6, 6])],
        lambda x, *_: (np.zeros(x.shape[1]), x),
        broken=WIDE,
    ),
    *(
        Call("NLLLoss2d", [f(2, 8, 4, 2), ints(8, 2, 4, 2), p(8), number, 2], likelihood, runs="meta")
        for number in _ALL
    ),
    *(Call("CosineEmbeddingLoss", [X, X, SIGNS, 0.1, how], cosine_loss, runs="") for how in _ALL),
    Call("GroupedMatmulV4", [[TOKENS], [EXPERTS]], grouped, _GROUPS | {"group_type": 0}, runs="meta"),
    Call("GroupedMatmulV4", [[TOKENS], [EXPERTS], [f(2, 6)]], grouped, _GROUPS | {"group_type": 0}, runs="meta"),
    Call("GroupedMatmulV4", [[f(4, 8)], [f(8, 6)]], grouped, _GROUPS | {"group_type": 2}, runs="meta"),
    *(Call(name, [[TOKENS], [EXPERTS], None, ENDS, 0, 0], grouped, runs="") for name in ("Gmm", "GmmV2")),
    Call("MoeTokenPermute", [X, ints(2, 4, 2), None, False], permuted, runs="meta"),
    *(
        Call(name, [TOKENS, np.random.default_rng(5).permutation(8), *more], unpermuted, runs=runs)
        for name, runs in (("MoeTokenUnpermute", ""), ("InnerMoeTokenUnpermute", "meta"))
        for more in ([], [p(4, 2)])
    ),
    Call("MoeInitRoutingV2", [X, ints(2, 4, 2), 0, 0, 2, 0, 1, False], routed, runs="meta"),
]
