"""Functions of scatters, lookups and losses, as authors write them, and the tensors that they are called with."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore.ops import auto_generate
from support.verified_calls import Sample

__all__ = ["BY_NIGHT", "SAMPLES", "WITHOUT_KERNEL", "f", "i", "p", "sample"]

F = mint.nn.functional
RANDOM = np.random.default_rng(5)


def f(*shape):
    """Random numbers, none near 0."""
    return (RANDOM.uniform(0.5, 2, shape) * RANDOM.choice([-1, 1], shape)).astype(np.float32)


def p(*shape):
    """Probabilities."""
    return RANDOM.uniform(0.1, 0.9, shape).astype(np.float32)


def i(high, *shape, dtype=np.int64):
    """Indices below `high`."""
    return RANDOM.integers(0, high, shape).astype(dtype)


ONCE = np.array([[0, 1], [1, 7], [2, 3], [3, 0], [3, 5], [0, 6]], np.int32)
OFTEN = np.concatenate([ONCE[:3], ONCE[:3]])
COLUMNS = RANDOM.permuted(np.tile(np.arange(8), (4, 1)), axis=1)[:, :6]
SEGMENTS = np.array([[0, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 1]] * 2, np.int32)
TIES = np.round(f(4, 6, 2) * 2)
LABELS, IGNORED = np.array([2, 7, 0, 5]), np.array([2, -100, 0, 5])
LENGTHS = Tensor([8, 8], ms.int32), Tensor([3, 2], ms.int32)


def at_coordinates(name):
    return lambda x, at, u: getattr(ops, name)()(x, at, u)


def segmented(name):
    return lambda x, ids: getattr(ops, name)(x, ids, 4)


_BY_DAY = {  # of each rule and algorithm one or two: name -> function, its tensors; floating ones have gradients
    "TensorScatterAdd": (at_coordinates("TensorScatterAdd"), [f(4, 8, 2), OFTEN, f(6, 2)]),
    "TensorScatterUpdate": (at_coordinates("TensorScatterUpdate"), [f(4, 8, 2), OFTEN, f(6, 2)]),
    "mint.scatter": (lambda x, at, u: mint.scatter(x, 1, at, u), [f(4, 8), COLUMNS, f(4, 6)]),
    "scatter add": (lambda x, at, u: x.scatter(1, at, u, reduce="add"), [f(4, 8), i(8, 4, 6), f(4, 6)]),
    "index_add": (lambda x, at, u: ops.tanh(x).index_add(1, at, u), [f(4, 8), i(8, 6, dtype=np.int32), f(4, 6)]),
    "index_put": (lambda x, a, b, u: x.index_put((a, b), u, True), [f(4, 8), i(4, 6), i(8, 6), f(6)]),
    "segment_sum": (segmented("unsorted_segment_sum"), [f(4, 6, 2), SEGMENTS]),
    "segment_max": (segmented("unsorted_segment_max"), [TIES, SEGMENTS]),
    "gather_nd": (ops.gather_nd, [f(4, 8, 2), OFTEN]),
    "x[:, i, j]": (lambda x, a, b: x[:, a, b], [f(2, 4, 8), i(4, 2, 1), i(8, 3) - 4]),
    "nll_loss": (lambda x, y, w: F.nll_loss(x, y, w, ignore_index=2), [f(4, 8), LABELS, p(8)]),
    "sparse": (lambda x, y: ops.SparseSoftmaxCrossEntropyWithLogits()(x, y), [f(4, 8), LABELS.astype(np.int32)]),
    "dense": (lambda x, y: ops.SoftmaxCrossEntropyWithLogits()(x, y)[0], [f(4, 8), p(4, 8)]),
    "with logits": (
        lambda x, y, w, q: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=q),
        [f(4, 8), p(4, 8), p(8), p(8)],
    ),
}
_BY_NIGHT = {
    **{
        name: (at_coordinates(name), [f(4, 8, 2), ONCE, f(6, 2)])
        for name in ("TensorScatterSub", "TensorScatterMax", "TensorScatterMin", "TensorScatterMul", "TensorScatterDiv")
    },
    "scatter a number": (lambda x, at: mint.scatter(x, 1, at, 2.5), [f(4, 8), i(8, 4, 6)]),
    "method": (lambda x, at, u: x.scatter(axis=1, index=at, src=u), [f(4, 8), COLUMNS, f(4, 6)]),
    "elements": (lambda x, at, u: ops.tensor_scatter_elements(x, at, u, 0, "add"), [f(4, 8), i(4, 6, 8), f(6, 8)]),
    "replaced": (lambda x, at, u: ops.tensor_scatter_elements(x, at, u, 1), [f(4, 8), COLUMNS, f(4, 6)]),
    "index_add twice": (
        lambda x, at, u: ops.tanh(x).index_add(0, at, u, alpha=2),
        [f(4, 8), i(4, 6, dtype=np.int32), f(6, 8)],
    ),
    "index_put once": (
        lambda x, a, b, u: x.index_put((a, b), u),
        [f(4, 8), ONCE[:, 0].astype(np.int64), ONCE[:, 1].astype(np.int64), f(6)],
    ),
    "scatter_nd": (lambda at, u: ops.scatter_nd(at, u, (4, 8, 2)), [OFTEN, f(6, 2)]),
    "segment_min": (segmented("unsorted_segment_min"), [TIES, SEGMENTS]),
    "segment_prod": (segmented("unsorted_segment_prod"), [f(4, 6, 2), SEGMENTS]),
    "histc": (lambda x: ops.histc(ops.stop_gradient(x), 4, -2.0, 2.0) + x[:4], [f(8)]),
    "histc of all": (lambda x: ops.histc(ops.stop_gradient(x), 4) + x[:4], [f(8)]),
    "index_fill": (lambda x, at: ops.index_fill(x, 1, at, 2.0), [f(4, 8), i(8, 4, dtype=np.int32)]),
    "masked_scatter": (lambda x, m, u: x.masked_scatter(m, u), [f(4, 8), RANDOM.random((4, 8)) > 0.4, f(32)]),
    "embedding_lookup": (
        lambda x, at: ops.EmbeddingLookup()(x, at, 1),
        [f(8, 4), i(9, 4, 2, dtype=np.int32)],  # as many indices as rows: a sparse gradient would have that shape
    ),
    "searchsorted": (lambda s, v: mint.searchsorted(s, v, right=True) + v, [np.sort(f(4, 8)), f(4, 2)]),
    "one sequence": (lambda s, v: mint.searchsorted(s, v) + v, [np.sort(f(8)), f(4, 2)]),
    "x[i, j]": (lambda x, a, b: x[a, b], [f(4, 8, 2), i(4, 6), i(8, 6) - 4]),
    "x[i, :, j]": (lambda x, a, b: x[a, :, b], [f(4, 2, 8), i(4, 6), i(8, 6)]),
    "x[0, :, i]": (lambda x, a: x[0, :, a], [f(4, 2, 8), i(8, 6)]),
    "summed": (lambda x, y: F.nll_loss(x, y, reduction="sum"), [f(4, 8), IGNORED]),
    "each": (lambda x, y, w: F.nll_loss(x, y, w, reduction="none"), [f(4, 8), LABELS, p(8)]),
    "sparse each": (nn.SoftmaxCrossEntropyWithLogits(True), [f(4, 8), LABELS.astype(np.int32)]),
    "with logits each": (lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), [f(4, 8), p(4, 8)]),
    "probabilities": (ops.binary_cross_entropy, [p(4, 8), p(4, 8), p(4, 8)]),
    "sum of probabilities": (lambda x, y: ops.binary_cross_entropy(x, y, reduction="sum"), [p(4, 8), p(4, 8)]),
    **{f"KLDivLoss {word}": (ops.KLDivLoss(word), [f(4, 8), p(4, 8)]) for word in ("none", "mean", "sum")},
    "kl_div": (lambda x, y: ops.kl_div(x, y, "batchmean"), [f(4, 8), p(4, 8)]),
    "smooth": (lambda x, y: ops.smooth_l1_loss(x, y, reduction="mean"), [f(4, 8), f(4, 8)]),
    "sigmoid": (ops.SigmoidCrossEntropyWithLogits(), [f(4, 8), p(4, 8)]),
    "margins": (lambda x, y, w: ops.multi_margin_loss(x, y, weight=w), [f(4, 8), i(8, 4), p(8)]),
    "margins each": (lambda x, y: ops.multi_margin_loss(x, y, reduction="none"), [f(4, 8), i(8, 4)]),
    "ctc_loss": (
        lambda x, y: ops.ctc_loss(ops.log_softmax(x), y, *LENGTHS)[0],
        [f(8, 2, 4), i(3, 2, 4, dtype=np.int32) + 1],
    ),
    "CTCLoss": (
        lambda x: ops.CTCLoss()(x, Tensor([[0, 0], [1, 0]], ms.int64), Tensor([1, 2], ms.int32), LENGTHS[0])[0],
        [f(8, 2, 4)],
    ),
    "gaussian": (ops.gaussian_nll_loss, [f(4, 8), f(4, 8), p(4, 8)]),
    "poisson": (nn.PoissonNLLLoss(), [f(4, 8), p(4, 8)]),
    "huber": (ops.huber_loss, [f(4, 8), f(4, 8)]),
    "hinge": (lambda x, y: ops.hinge_embedding_loss(x, ops.stop_gradient(y)), [f(4, 8), np.sign(f(4, 8))]),
    "ranking": (ops.margin_ranking_loss, [f(4, 8), f(4, 8), np.sign(f(4, 8))]),
    "cosine": (ops.cosine_embedding_loss, [f(4, 8), f(4, 8), np.array([1, -1, 1, 1], np.int32)]),
    "labels": (ops.multilabel_soft_margin_loss, [f(4, 8), p(4, 8)]),
    "mse": (ops.mse_loss, [f(4, 8), f(4, 8)]),
    "l1": (ops.l1_loss, [f(4, 8), f(4, 8)]),
}
_WITHOUT_KERNEL = {  # on CPU: name -> function, its tensors
    "grouped": (
        lambda x, w, ends: auto_generate.grouped_matmul_v4([x], [w], group_list=ends, split_item=3, group_type=0)[0],
        [f(8, 4), f(2, 4, 6), np.array([3, 8])],
    ),
    "permute": (lambda x, e: ops.moe_token_permute(x, e)[0], [f(4, 8), i(2, 4, 2)]),
    "unpermute": (auto_generate.inner_moe_token_unpermute, [f(8, 4), np.arange(8, dtype=np.int32), f(4, 2)]),
    "routing": (
        lambda x, e: auto_generate.gen_ops_prim.moe_init_routing_v2_op(x, e, 8, 0, 2, 0, 1, False)[0],
        [f(4, 8), i(2, 4, 2, dtype=np.int32)],
    ),
    "scatter_add": (lambda x, at, u: mint.scatter_add(x, 1, at, u), [f(4, 8), i(8, 4, 6), f(4, 6)]),
    "index_add": (lambda x, at, u: mint.index_add(x, 1, at, u), [f(4, 8), i(8, 6), f(4, 6)]),
    "histc": (lambda x: mint.histc(x, 4, 0, 1) + x[0, :4], [f(4, 8)]),
    "mse": (F.mse_loss, [f(4, 8), f(4, 8)]),
    "l1": (F.l1_loss, [f(4, 8), f(4, 8)]),
    "kl_div": (lambda x, y: F.kl_div(x, y, reduction="batchmean"), [f(4, 8), f(4, 8)]),
    "soft margin": (ops.soft_margin_loss, [f(4, 8), f(4, 8)]),
    "margins": (ops.multilabel_margin_loss, [f(4, 8), i(8, 4, 8, dtype=np.int32)]),
    "triplets": (ops.triplet_margin_loss, [f(4, 8), f(4, 8), f(4, 8)]),
    "images": (F.cross_entropy, [f(2, 8, 4, 2), i(8, 2, 4, 2)]),
    "SparseGatherV2": (lambda x, at: ops.SparseGatherV2()(x, at, 0), [f(4, 8), i(4, 6)]),
    "index_fill": (lambda x, at: auto_generate.index_fill_scalar(x, 1, at, 2.0), [f(4, 8), i(8, 4)]),
}


def _samples(calls):
    return [Sample(name, function, tuple(values), None, terms=False) for name, (function, values) in calls.items()]


SAMPLES, BY_NIGHT, WITHOUT_KERNEL = map(_samples, (_BY_DAY, _BY_NIGHT, _WITHOUT_KERNEL))


def sample(name, *cuts):
    """One of the samples, cut as `cuts` say."""
    return Sample(name, _BY_DAY[name][0], tuple(_BY_DAY[name][1]), terms=False, cuts=cuts)
