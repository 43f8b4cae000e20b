"""Products of matrices, norms, softmax and attention."""

import numpy as np

from operator_calls.call import Call, Draw, X, Y, f, one, shaped


def group_norm(x, groups, weight, bias, eps):
    """`ops.group_norm`, and the mean and reciprocal standard deviation of every group."""
    parts = x.reshape(len(x), groups, -1)
    mean, scale = parts.mean(-1), 1 / np.sqrt(parts.var(-1) + eps)
    normed = ((parts - mean[..., None]) * scale[..., None]).reshape(x.shape)
    return normed * weight[:, None, None] + bias[:, None, None], mean, scale


def _softmax(x, dim=-1, **named):
    dim = one((named.get("axis", dim),))
    e = np.exp(x - x.max(dim, keepdims=True))
    return e / e.sum(dim, keepdims=True)


def _layer_norm(x, gamma, beta, start=-1, *_):
    dims = tuple(range(start % x.ndim, x.ndim))
    mean, var = x.mean(dims, keepdims=True), x.var(dims, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * gamma + beta, mean, var


def _layer_norm_shape(x, shape, weight, bias, eps):
    return _layer_norm(x, weight, bias, -len(shape))


def _rms_norm(x, gamma, epsilon=1e-6):
    dims = tuple(range(x.ndim - gamma.ndim, x.ndim))
    scale = 1 / np.sqrt((x**2).mean(dims, keepdims=True) + epsilon)
    return x * scale * gamma, scale


def _attention(query, *_):
    return np.zeros((2, 4, 4, 8)), np.zeros((2, 4, 4, 8)), np.zeros(1), np.zeros_like(query)


QKV = [f(2, 4, 64), f(2, 4, 32), f(2, 4, 32)]
LISTS = [f(2, 1, 64), [QKV[1]], [QKV[2]]]
_STATISTICS = [
    Draw((2, 4, 4, 8), lambda random, _: random.uniform(0.5, 2, (2, 4, 4, 1)).repeat(8, -1))
] * 2  # (B, N, S, 8)


def _attention_of_both(one, top, total, other, other_top, other_total, *_):
    """The attention over both parts of the keys, and softmax's maxima and sums."""
    best = np.maximum(top, other_top)
    weight, other_weight = total * np.exp(top - best), other_total * np.exp(other_top - best)
    both = weight + other_weight

    def scaled(part, weight):
        share = (weight / both)[..., 0].transpose(2, 0, 1)[..., None]
        return (part.reshape(*part.shape[:2], share.shape[2], -1) * share).reshape(part.shape)

    return scaled(one, weight) + scaled(other, other_weight), best, both


CALLS = [
    Call("MatMul", [X, f(8, 4), False, False], lambda a, b, *_: a @ b),
    Call("MatMul", [X, f(4, 8), False, True], lambda a, b, *_: a @ b.T),
    Call("MatMul", [X, f(4, 8), True, False], lambda a, b, *_: a.T @ b),
    Call("DeprecatedMatmul", [X], lambda x, tensor2: x @ tensor2, {"tensor2": f(8, 4)}),
    Call("BatchMatMul", [Y, f(2, 8, 4)], np.matmul),
    Call("MatMulExt", [Y, f(8, 4)], np.matmul),
    Call("MatMulExt", [Y, f(8)], np.matmul),
    Call("Dense", [Y, f(4, 8)], lambda x, w: x @ w.T),
    Call("Dense", [Y, f(4, 8), f(4)], lambda x, w, b: x @ w.T + b),
    Call("BiasAdd", [X, f(8), 0], lambda x, b, _: x + b),
    Call("Addmm", [f(4), X, f(8, 4)], lambda x, a, b: x + a @ b),
    Call("Baddbmm", [f(2, 4, 1), Y, f(2, 8, 4), 2, 3], lambda x, a, b, beta, alpha: beta * x + alpha * a @ b),
    Call("Outer", [f(4), f(8)], np.outer),
    Call("Softmax", [Y, (-1,)], _softmax),
    Call("Softmax", [Y, (0, 1)], _softmax, broken="several dims have no kernel on CPU"),
    Call("LogSoftmax", [X, 0], lambda x, dim: np.log(_softmax(x, dim))),
    Call("Triu", [Y, 1], np.triu),
    Call("Tril", [Y], np.tril),
    Call("LayerNorm", [Y, f(8), f(8), -1, -1, 1e-5], _layer_norm),
    Call("LayerNorm", [Y, f(8), f(8), 1, 2, 1e-5], _layer_norm),
    Call("LayerNormExt", [Y, (4, 8), f(4, 8), f(4, 8), 1e-5], _layer_norm_shape, runs="meta"),
    Call("RmsNorm", [Y, f(8), 1e-6], _rms_norm, runs="meta"),
    Call(
        "RingAttentionUpdate",
        [f(4, 2, 8), *_STATISTICS, f(4, 2, 8), *_STATISTICS, None, "SBH"],
        _attention_of_both,
        runs="meta",
    ),
]
OTHERS = [
    Call("BatchMatMulExt", [Y, f(2, 8, 4)], np.matmul),
    Call("TensorDot", [Y, f(8, 4), 1], lambda x, y, axes: np.tensordot(x, y, axes)),
    Call("Mm", [X, f(8, 4)], np.matmul),
    Call("Mv", [X, f(8)], np.matmul),
    Call("Vdot", [f(8), f(8)], np.matmul),
    Call("LogSoftmaxExt", [X, -1, None], lambda x, *_: x, runs="meta"),
    Call("DiagExt", [f(8), 1], np.diag, runs="meta"),
    Call("DiagExt", [X, 2], np.diag, runs="meta"),
    Call("FlashAttentionScore", [*QKV, *[None] * 7, 4, 1.0, 0.25], _attention, runs="meta"),
    Call(
        "PromptFlashAttention",
        [*QKV, *[None] * 9, 4, 1.0, 2**31 - 1, 0, 0, 2, 0, 1],
        lambda query, *_: np.zeros_like(query),
        runs="",
    ),
    Call(
        "IncreFlashAttention",
        [*LISTS, *[None] * 12, 4, 0, 1.0, 2, 0, 1],
        lambda query, *_: np.zeros_like(query),
        runs="",
    ),
    Call(
        "FusedInferAttentionScore",
        [*LISTS, *[None] * 21, 4, 1.0, 2**31 - 1, 2**31 - 1, 0, 2, 0, 1, 0, 0, False, 0, 0],
        lambda query, *_: (np.zeros_like(query), np.zeros(1)),
        runs="",
    ),
    Call(
        "SpeedFusionAttention",
        [*QKV, 4, 0, np.int64(1), np.int64(1), None, None, None, 1.0, 1.0],
        lambda query, *_: (np.zeros_like(query), *_attention(query)[:2], np.zeros(0), *[np.int64(0)] * 3),
        runs="meta",
    ),
    Call("GroupNorm", [f(4, 8, 2, 2), 4, f(8), f(8), 1e-5], group_norm),
    Call("AddRmsNorm", [f(2, 8), f(2, 8), f(8), 1e-6], shaped((2, 8), (2, 1), (2, 8)), runs="meta"),
    Call(
        "AddLayerNormV2",
        [f(2, 8), f(2, 8), f(8), f(8), 1e-5, True],
        shaped((2, 8), (2, 1), (2, 1), (2, 8)),
        runs="meta",
    ),
]
