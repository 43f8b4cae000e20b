"""Attention of queries to keys in ranges of places, against dense attention, and cut along every dim."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.utils import MsDispatchMode
from support.verified_calls import numbers

from mindformers_core.algorithms import attention_rows
from mindformers_core.batches import places_of
from mindformers_core.models.positions import static_ranges
from mindformers_core.operators.rules.attention import ranged_attention
from mindformers_core.operators.visible_blocks import place_runs, visible_blocks
from mindformers_core.program.structure import tree_leaves
from mindformers_core.tensor_parallel.attention import attention

QUERY, KEY, VALUE = numbers(2, 8, 4, 4, low=-1), numbers(2, 8, 2, 4, low=-1), numbers(2, 8, 2, 6, low=-1)
PLACES = np.arange(8, dtype=np.int32)[None]


def dense(query, key, value, first, last, places, scale):
    """What NumPy gives."""
    copies = query.shape[2] // key.shape[2]
    key, value = (np.repeat(each, copies, 2) for each in (key, value))
    scores = np.einsum("bshd,bthd->bhst", query, key) * scale
    seen = (places[:, None] >= first[..., None]) & (places[:, None] < last[..., None])
    weights = np.where(seen[:, None], np.exp(scores), 0)
    total = weights.sum(-1)
    return np.einsum("bhst,bthd->bshd", weights / np.where(total, total, 1)[..., None], value), total


def test_ranges_of_places():
    """A causal mask, and rows that see nothing."""
    first, last = np.zeros((1, 8), np.int32), PLACES + 1
    last = last * (PLACES != 3)
    given = QUERY, KEY, VALUE, first, last, PLACES
    output, sums = attention(*map(Tensor, given), 0.5)
    wanted, total = dense(*given, 0.5)
    np.testing.assert_allclose(output.asnumpy(), wanted, rtol=1e-5, atol=1e-6)
    seen = np.broadcast_to(total > 0, sums.shape)
    np.testing.assert_allclose(sums.asnumpy()[seen], np.log(total[total > 0]), rtol=1e-5, atol=1e-6)
    assert not output.asnumpy()[:, 3].any() and (sums.asnumpy()[~seen] < -1e38).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": QUERY[:, -1:]}, r"first \(1, 8\) of attention should be \(1, 1\) or \(2, 1\)"),
        ({"places": PLACES[0]}, r"places \(8,\) of attention should be \(1, 8\) or \(2, 8\)"),
        ({"own": PLACES[:, 1:]}, r"own \(1, 7\) of attention"),
        ({"value": VALUE[:, 1:]}, r"value \(2, 7, 2, 6\) should have rows, length and heads of key \(2, 8, 2, 4\)"),
        ({"query": QUERY[:, :, :3]}, r"3 heads of query \(2, 8, 3, 4\) don't divide by the 2 of key"),
        ({"algorithm": "rng"}, r"did you mean 'ring'"),
        ({"order": [0, 2]}, r"order \(0, 2\) of attention should have each of 0 … 1 once"),
    ],
)
def test_arguments_that_do_not_fit(changed, message):
    given = {"query": QUERY, "key": KEY, "value": VALUE, "first": PLACES * 0, "last": PLACES + 1, "places": PLACES}
    given = {name: Tensor(x) if isinstance(x, np.ndarray) else x for name, x in (given | changed).items()}
    with pytest.raises(ValueError, match=message):
        attention(**given, scale=0.5)


def test_keys_that_data_hide_are_not_taken(monkeypatch):
    """In any order: each key that a query of a block sees is, once."""
    monkeypatch.setattr(attention_rows, "_PIECE", 2)
    random, left = np.random.default_rng(8), 0
    for _ in range(120):
        length, keys = map(int, random.integers(1, 60, 2))
        first, places = random.integers(0, keys + 1, length), random.permutation(keys)
        last = first + random.integers(-2, 4, length)
        blocks = visible_blocks(*(place_runs((0,), each) for each in (length, keys)), (None, None), False, 5)
        found = attention_rows.seen_blocks(blocks, first, last, places)
        assert [each[:2] for each in found] == [each[:2] for each in blocks]
        for start, stop, ranges in found:
            columns = np.concatenate([np.arange(*each[:2]) for each in ranges])
            assert len({*columns}) == columns.size and columns.max() < keys
            low, high = (each[start:stop, None] for each in (first, last))
            assert {*np.flatnonzero(((low <= places) & (places < high)).any(0))} <= {*columns}
            left += keys - columns.size
    assert left > 5000


def test_documents_of_a_long_text(monkeypatch):
    """Results and gradients are those of all keys, of which most aren't computed."""
    draw, places = np.random.default_rng(4), np.arange(1024)
    query, key, value, slope = (Tensor(draw.normal(size=(2, 1024, 2, 4)).astype(np.float32)) for _ in range(4))
    starts = np.stack([places // size * size for size in (90, 200)])
    ranges = [Tensor(each.astype(np.int32)) for each in (starts, places[None] + 1, places[None])]

    def attend(*parts):
        return attention(*parts, *ranges, 0.5, order=(0,), reach=(None, 0))

    found, counted = [], []
    pairs = attention_rows._pairs
    monkeypatch.setattr(attention_rows, "_pairs", lambda blocks: counted.append(pairs(blocks)) or counted[-1])
    for few in (1 << 18, 1 << 30):
        monkeypatch.setattr(attention_rows, "_FEW", few)
        gradients = ms.grad(lambda *parts: (attend(*parts)[0] * slope).sum(), (0, 1, 2))(query, key, value)
        found.append([each.asnumpy() for each in (*attend(query, key, value), *gradients)])
    assert counted[1] < 0.5 * counted[0]
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_masks_of_devices_that_round_products_of_matrices(monkeypatch):
    """Documents, whose borders are places, by products of numbers; lists as recipes have them."""
    given = *map(Tensor, (QUERY, KEY, VALUE, PLACES // 3 * 3, PLACES + 1, PLACES)), 0.5
    wanted = attention(*given, order=[0], reach=[None, 0])[0].asnumpy()
    monkeypatch.setattr("mindformers_core.algorithms.attention.on_cpu", lambda: False)
    np.testing.assert_allclose(attention(*given)[0].asnumpy(), wanted, 1e-5, 1e-6)


def test_sinks():
    """An entry of softmax's sum without a value, and its gradient; a row that sees nothing else gives zeros."""
    given = *map(Tensor, (QUERY, KEY, VALUE, PLACES * 0, (PLACES + 1) * (PLACES != 3), PLACES)), 0.5
    sinks = np.float32([-1, 0, 2, 80])
    output, sums = (each.asnumpy() for each in attention(*given))
    found, totals = (each.asnumpy() for each in attention(*given, sinks=Tensor(sinks)))
    wanted = np.logaddexp(sums, sinks[:, None])
    np.testing.assert_allclose(totals, wanted, rtol=1e-6)
    np.testing.assert_allclose(found, output * np.exp(sums - wanted).transpose(0, 2, 1)[..., None], 1e-5, 1e-6)

    def loss(sinks):
        mixed, total = attention(*given, sinks=sinks)
        return (mixed * mixed).sum() + total.sum()

    share = np.exp(sums - wanted)
    squares = (output**2).sum(3).transpose(0, 2, 1)
    slopes = ((1 - share) * (1 - 2 * share**2 * squares)).sum((0, 2))
    np.testing.assert_allclose(ms.grad(loss)(Tensor(sinks)).asnumpy(), slopes, 1e-4, 1e-4)


@pytest.mark.parametrize("call", [attention, ranged_attention, lambda *args: static_ranges(8, args[7])])
def test_chunks_that_do_not_divide_a_sequence(call):
    given = QUERY, KEY, VALUE, PLACES * 0, PLACES + 1, PLACES
    message = r"a sequence of 8 tokens can't be cut into the 6 equal .* a length that 6 divides, 6 or 12, or another"
    with pytest.raises(ValueError, match=message):
        call(*map(Tensor, given), 0.5, (0, 5, 1, 4, 2, 3))


class Largest(MsDispatchMode):
    """The most elements of a tensor that an operator takes."""

    count = 0

    def __ms_dispatch__(self, func, args=(), kwargs=None):
        self.count = max(self.count, *(each.size for each in tree_leaves(args, Tensor)), 0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("order", "before", "documents"), [((0,), None, 1), ((0,), 70, 1), ((0, 3, 1, 2), None, 7), (None, None, 600)]
)
def test_blocks(order, before, documents):
    """Blocks of 600 tokens with their gradients, against one that is seen whole; none has all scores."""
    own = places_of(order or (0,), 600)[None]
    first = own // documents * documents if documents > 1 else np.maximum(own - (600 if before is None else before), 0)
    draw, shapes = np.random.default_rng(0), [(1, 600, heads, 4) for heads in (4, 2, 2, 4)]
    *given, slope, of_sums = (draw.normal(size=shape).astype(np.float32) for shape in (*shapes, (1, 4, 600)))
    ranges = [each.astype(np.int32) for each in (first, own + 1, own)]

    def loss(*tensors):
        results = attention(*tensors, *map(Tensor, ranges), 0.5, order, (before, 0), documents == 1)
        return sum((result * Tensor(slope)).sum() for result, slope in zip(results, (slope, of_sums)))

    with Largest() as largest:
        gradients = ms.value_and_grad(loss, (0, 1, 2))(*map(Tensor, given))[1]
    assert 4 * 100 * 100 < largest.count <= 4 * 600 * 128
    for gradient, wanted in zip(gradients, dense_gradients(*given, *ranges, 0.5, slope, of_sums)):
        np.testing.assert_allclose(gradient.asnumpy(), wanted, atol=2e-5 * np.abs(wanted).max())


def dense_gradients(query, key, value, first, last, places, scale, slope, of_sums):
    """What NumPy gives for the gradients of query, key and value, in float64."""
    copies = query.shape[2] // key.shape[2]
    query, key, value = (np.repeat(each, 4 // each.shape[2], 2).astype(np.float64) for each in (query, key, value))
    seen = (places[:, None] >= first[..., None]) & (places[:, None] < last[..., None])
    weights = np.where(seen[:, None], np.exp(np.einsum("bshd,bthd->bhst", query, key) * scale), 0)
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bshd,bthd->bhst", slope, value)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True) + of_sums[..., None])
    of_key = np.einsum("bhst,bshd->bthd", of_scores, query) * scale, np.einsum("bhst,bshd->bthd", weights, slope)
    grouped = [each.reshape(*each.shape[:2], -1, copies, each.shape[3]).sum(3) for each in of_key]
    return np.einsum("bhst,bthd->bshd", of_scores, key) * scale, *grouped
