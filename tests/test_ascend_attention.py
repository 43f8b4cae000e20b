"""Attention by Ascend's kernels, simulated as MindSpore documents them: their arguments, and results of every mask."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from test_cut_attention import dense, masked, on_parts
from test_random_masks import on_tensors

from mindformers_core.algorithms import attention, fused_attention
from mindformers_core.operators.visible_blocks import visible_band


class Kernel:
    """What both kernels have in common; `calls` are their modes."""

    calls = ()

    def __init__(self, head_num, scale_value, pre_tokens, next_tokens, input_layout, sparse_mode):
        assert input_layout == "BSND" and sparse_mode in (0, 2, 4) and min(pre_tokens, next_tokens) >= 0
        self.heads, self.scale, self.mode = head_num, scale_value, sparse_mode
        self.before, self.after = pre_tokens, next_tokens

    def weights_of(self, query, key, value, mask):
        """Scores, in which what isn't seen is lowest; and key and value for each head."""
        assert query.dtype in (ms.float16, ms.bfloat16) and query.shape[3] % 16 == 0 and key.shape == value.shape
        assert query.dtype == key.dtype == value.dtype and query.shape[2] == self.heads
        length = query.shape[1]
        near = np.arange(length) - np.arange(length)[:, None]
        if self.mode == 0:
            assert mask is None
            near = near * 0
        else:
            assert key.shape[1] == length and np.array_equal(mask.asnumpy(), np.triu(np.ones((2048, 2048)), 1))
        before, after = (self.before, self.after) if self.mode == 4 else (length, 0)
        query, key, value = (each.asnumpy().astype(np.float32) for each in (query, key, value))
        wide = [np.repeat(each, self.heads // each.shape[2], 2) for each in (key, value)]
        scores = np.einsum("bshd,bthd->bhst", query, wide[0]) * self.scale
        Kernel.calls += (self.mode,)
        return np.where((near <= after) & (near >= -before), scores, -np.inf), query, *wide


class Forward(Kernel):
    def __call__(self, query, key, value, shift, drop_mask, padding, mask):
        assert shift is drop_mask is padding is None
        scores, _, _, wide = self.weights_of(query, key, value, mask)
        top = scores.max(-1, keepdims=True)
        total = np.exp(scores - top).sum(-1, keepdims=True)
        output = np.einsum("bhst,bthd->bshd", np.exp(scores - top) / total, wide)
        found = [Tensor(np.repeat(each, 8, 3)) for each in (top, total)]
        return *found, None, ops.cast(Tensor(output), query.dtype)


class Backward(Kernel):
    def __call__(self, query, key, value, slope, shift, drop_mask, padding, mask, top, total, softmax, output):
        assert shift is drop_mask is padding is softmax is None and top.shape[3] == total.shape[3] == 8
        assert slope.dtype == output.dtype == query.dtype and slope.shape == output.shape == query.shape
        scores, query, wide_key, wide_value = self.weights_of(query, key, value, mask)
        weights = np.exp(scores - top.asnumpy()[..., :1]) / total.asnumpy()[..., :1]
        slope, output = (each.asnumpy().astype(np.float32) for each in (slope, output))
        of_weights = np.einsum("bshd,bthd->bhst", slope, wide_value)
        of_scores = weights * (of_weights - (slope * output).sum(3).transpose(0, 2, 1)[..., None])
        wide = np.einsum("bhst,bshd->bthd", of_scores, query) * self.scale, np.einsum("bhst,bshd->bthd", weights, slope)
        grouped = [each.reshape(*key.shape[:3], -1, each.shape[3]).sum(3) for each in wide]
        of_query = np.einsum("bhst,bthd->bshd", of_scores, wide_key) * self.scale
        return *[ops.cast(Tensor(each.astype(np.float32)), ms.float16) for each in (of_query, *grouped)], None


@pytest.fixture
def ascend(monkeypatch):
    """The device's kernels, by simulated ones."""
    known = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend" if key == "device_target" else known(key))
    monkeypatch.setattr(fused_attention, "FlashAttentionScore", Forward)
    monkeypatch.setattr(fused_attention, "FlashAttentionScoreGrad", Backward)
    monkeypatch.setattr(Kernel, "calls", ())
    attention._blocks.cache_clear()
    yield
    attention._blocks.cache_clear()


def test_bands_are_what_queries_see():
    for length, gap, before, after in np.ndindex(5, 5, 9, 9):
        length, gap, reach = length + 1, gap - 2, tuple(None if each == 8 else each for each in (before, after))
        band = visible_band(length, gap, reach, True)
        near = np.arange(length) - np.arange(length)[:, None]
        low, high = (99 if each is None else each for each in reach)
        seen = (near - gap * length >= -low) & (near - gap * length <= high)
        if band is None:
            assert not seen.diagonal().all()
            continue
        low, high = (length if each is None else each for each in band)
        np.testing.assert_array_equal(seen, (near >= -low) & (near <= high))
        known, has_mask = fused_attention.kernel_arguments(band, length)
        assert has_mask == (not seen.all()) and known["sparse_mode"] in (0, 2, 4)
    assert visible_band(8, 0, (None, 0), False) is None


CASES = {  # mask, order of chunks, ranks -> modes of the kernel
    ("causal", (0, 3, 1, 2), 2): {0, 2}, ("full", (0, 1), 2): {0}, ("window", (0, 1, 2), 3): {2, 4},
    ("documents", (0, 1), 2): set(), ("causal", (0,), 1): {2}, ("window", (0,), 1): {4},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_by_kernels(case, ascend):
    """Outputs, sums, and the gradients of both, by the ring, and of one rank, are those of dense attention."""
    (kind, order, ranks), random = case, np.random.default_rng(6)
    length = 24
    first, last, reach, exact = masked(random, kind, length)
    places = np.arange(length, dtype=np.int32).reshape(len(order), -1)[list(order)].reshape(-1)
    given = [random.normal(size=(2, length, heads, 16)).astype(np.float16) for heads in (4, 2, 2)]
    given += [each[places][None].astype(np.int32) for each in (first, last)] + [places[None]]
    slopes = [random.normal(size=size).astype(np.float16) for size in ((2, length, 4, 16), (2, 4, length))]
    slopes[1] = slopes[1].astype(np.float32)
    wide = [each.astype(np.float32) for each in given[:3]]
    wanted = dense(*wide, *given[3:], 0.25, *(each.astype(np.float32) for each in slopes))
    if ranks > 1:
        found, _ = on_parts(
            "attention_ring", ranks, given, 0.25, (order, reach, exact, "auto"), *slopes, dtype=ms.float16
        )
    else:
        tensors, known = [*map(Tensor, given)], (0.25, order, reach, exact)
        found = [each.asnumpy() for each in attention.attend(*tensors, *known)]

        def loss(*tensors):
            results = attention.attend(*tensors, *map(Tensor, given[3:]), *known)
            return sum((ops.cast(each, ms.float32) * Tensor(slope)).sum() for each, slope in zip(results, slopes))

        found += [each.asnumpy() for each in ms.grad(loss, (0, 1, 2))(*tensors[:3])]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 2e-2, 4e-3)
    assert set(Kernel.calls) == CASES[case], Kernel.calls


@pytest.mark.parametrize(("order", "modes"), [((0,), {2}), ((0, 3, 1, 2), set())])
def test_heads_in_the_place_of_a_sequence(order, modes, ascend):
    """By `all_to_all` a rank has all tokens: in their order a kernel's band, in zigzag blocks."""
    random, length = np.random.default_rng(7), 16
    places = np.arange(length, dtype=np.int32).reshape(len(order), -1)[list(order)].reshape(1, -1)
    shapes = [(2, length, heads, 16) for heads in (4, 2, 2, 4)]
    *given, slope = (random.normal(size=shape).astype(np.float16) for shape in shapes)
    slopes, ranges = (slope, np.ones((2, 4, length), np.float32)), (places * 0, places + 1, places)
    found = on_tensors("all_to_all", 2, [*given, *ranges], 0.25, (order, (None, 0), True), *slopes)
    wanted = dense(*(each.astype(np.float32) for each in given), *ranges, 0.25, *slopes)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, 2e-2, 4e-3)
    assert set(Kernel.calls) == modes, Kernel.calls
