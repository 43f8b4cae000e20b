"""Attention over a cut sequence: each algorithm, chosen or declared, against one card."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support.algorithm_prices import eager_price, program_price
from support.nightly import daily
from support.verified_calls import MESH, MESH_OF_4, Sample, check_of, eager, numbers

from mindformers_core.algorithms.attention_dropout import drawn_halves
from mindformers_core.algorithms.attention_parts import sides
from mindformers_core.algorithms.shard_context import ShardContext
from mindformers_core.communication import count_collectives
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta
from mindformers_core.operators.registry import algorithm_named
from mindformers_core.operators.rules.attention import ranged_attention
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.tensor_parallel.attention import attention

PLACES = np.arange(4, dtype=np.int32)[None]
ROWS, HEADS, WHOLE = (Layout.on(MESH, dims).dims for dims in (((), "a", (), ()), ((), (), "a", ()), ((),) * 4))


def causal(algorithm, dropout=0.0):
    """Attention to keys up to one's own, by an algorithm; with dropout, to sinks as well."""

    def attend(query, key, value, places):
        own, order = (places, (0,)) if query.shape[1] > 1 else (places[:, -1:], None)
        sinks = query[0, 0, :, 0] if dropout else None
        known = order, (None, 0), True, algorithm, dropout, own, sinks
        return attention(query, key, value, own * 0, own + 1, places, 0.5, *known)

    return attend


def in_bfloat16(attend):
    """The same with query, key and value rounded, and so the result."""

    def rounded(*given):
        output, sums = attend(*(each.astype(ms.bfloat16) for each in given[:3]), given[3])
        return output.astype(ms.float32), sums

    return rounded


def attentions(check):
    """The `OperatorPlan`s of all attentions of a rank's program."""
    entries = [entry for _, plan in check.plans.values() for found in plan.walk() for entry in found[1].instructions]
    return [each for each in entries if isinstance(each, OperatorPlan) and each.node.operator == "Attention"]


WAYS = [  # algorithm, the dims of query and key that are cut, what is found, dropout
    (*way, dropout)
    for dropout in (0.0, 0.5)
    for way in (
        ("gather", (1, 1), ("attention_seen", ROWS, ROWS)),
        ("ring", (1, 1), ("attention_ring", ROWS, ROWS)),
        ("all_to_all", (1, 1), (None, HEADS, HEADS)),
        ("auto", (2, 1), (None, HEADS, HEADS)),
        ("auto", (None, 1), ("attention_merge", WHOLE, ROWS)),
    )
]


# what is drawn goes by places: dropped, one way with parts of all and one with whole queries tell it
@pytest.mark.parametrize("algorithm, cut, found, dropout", daily([*WAYS[:5], WAYS[6], WAYS[9]], WAYS))
def test_each_algorithm(algorithm, cut, found, dropout):
    """Forward and all gradients, both engines; all dims have one size, so that a wrong one would fit."""
    length, groups = (4, 4) if cut[0] else (1, 1)
    given = numbers(4, length, 4, 4, low=-1), *(numbers(4, 4, groups, 4, low=-1) for _ in range(2)), PLACES
    declared = [layout(*["a" if dim == each else None for dim in range(4)]) for each in (cut[0], cut[1], cut[1])]
    sample = Sample(
        "", causal(algorithm, dropout), given, cuts=([*declared, layout(None, "a" if cut[0] == 1 else None)],)
    )
    (plan,) = attentions(check_of(sample))
    assert (plan.algorithm, *(each.dims for each in plan.inputs[:2])) == found
    if plan.algorithm:
        with rank_of(MESH.size, 0):
            assert eager_price(plan) == program_price(plan)
    if not dropout:  # here all ranks have one generator
        eager(sample)
        sample.function = in_bfloat16(sample.function)
        eager(sample, rtol=2**-7, atol=2**-8)  # values are below 2, and each part's result is rounded


_HYBRID, _ALONE = (8, 2, 512, ((), "a", "b", ())), (2, 8, 256, ((), ("a", "b"), (), ()))


@pytest.mark.long
@pytest.mark.parametrize(("batch", "heads", "size", "dims"), daily([_HYBRID], [_HYBRID, _ALONE]))
def test_two_axes_of_a_sequence(batch, heads, size, dims):
    """By price, one goes on as a ring and one cuts heads in its place, or both are a ring; forward, all gradients.

    Heads are exchanged where bytes weigh more than launches, and queries have few heads for each of the keys.
    """
    given = [numbers(batch, 64, each, size, low=-0.1, high=0.1) for each in (heads, 2, 2)]
    cuts = [layout(None, ("a", "b"))] * 4
    sample = Sample("", causal("auto"), (*given, np.arange(64, dtype=np.int32)[None]), cuts=(cuts,))
    (plan,) = attentions(check_of(sample, MESH_OF_4))
    assert (plan.algorithm, plan.inputs[0].dims) == ("attention_seen", Layout.on(MESH_OF_4, dims).dims)
    eager(sample, MESH_OF_4)


def dense(query, key, value, first, last, places, scale, of_output, of_sums, stays=1):
    """Output, sums, and the gradients of query, key and value where those of output and sums are given, by NumPy.

    `stays`: factors of weights (batch, heads, length, key_length).
    """
    groups, copies = key.shape[2], query.shape[2] // key.shape[2]
    whole_key, whole_value = (np.repeat(each, copies, 2) for each in (key, value))
    scores = np.einsum("bshd,bthd->bhst", query, whole_key) * scale
    seen = ((places[:, None] >= first[..., None]) & (places[:, None] < last[..., None]))[:, None]
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total, total, 1)
    output, sums = np.einsum("bhst,bthd->bshd", weights * stays, whole_value), np.log(np.where(total, total, 1))[..., 0]
    delta = np.einsum("bshd,bshd->bhs", output, of_output) - of_sums
    slopes = weights * (stays * np.einsum("bshd,bthd->bhst", of_output, whole_value) - delta[..., None])
    wide = np.einsum("bhst,bshd->bthd", slopes, query) * scale, np.einsum("bhst,bshd->bthd", weights * stays, of_output)
    grouped = [each.reshape(*each.shape[:2], groups, copies, -1).sum(3) for each in wide]
    return output, sums, np.einsum("bhst,bthd->bshd", slopes, whole_key) * scale, *grouped


def on_parts(algorithm, ranks, given, scale, known, of_output, of_sums, dropped=None, dtype=ms.float32):
    """What an algorithm and its gradient give, of all ranks together; and the bytes that all ranks have sent.

    Query, key and value are of a dtype, and so are their gradients.
    """
    mesh, whole = DeviceMesh((ranks,), ("cp",)), algorithm == "attention_gather"
    found = algorithm_named(algorithm)

    def cut(array, rank, dim=1):
        return Tensor(np.split(array, ranks, dim)[rank])

    def work(rank):
        context = ShardContext(mesh, ("cp",), (), (), rank)
        keys = [Tensor(array) if whole else cut(array, rank) for array in (given[1], given[2], given[5])]
        floats = [each.astype(dtype) for each in (cut(given[0], rank), *keys[:2])]
        args = *floats, cut(given[3], rank), cut(given[4], rank), keys[2], scale, *known
        if dropped:
            args = *args, dropped[0], cut(dropped[1], rank), Tensor(dropped[2])
        gradients, tape, results = (cut(of_output, rank).astype(dtype), cut(of_sums, rank, 2)), ThreadTape(), []
        with count_collectives() as forward:
            tape.record(lambda *given: results.extend(found.function(None, (*given, *args[3:]), context)), floats)
        with count_collectives() as backward:
            if found.gradient is None:
                slopes, _ = tape.gradients(floats, results, gradients, ())
            else:
                slopes = found.gradient(args, results, gradients, context)
        sent = [sum(nbytes for _, nbytes in counts.values()) for counts in (forward, backward)]
        assert [each.dtype for each in (results[0], *slopes)] == [dtype] * 4
        return [each.astype(ms.float32).asnumpy() for each in (*results, *slopes)], sent

    with custom_gradients():
        parts, sent = zip(*SimulatedRanks(ranks).run(work))
    output, sums, of_query, of_key, of_value = zip(*parts)
    join = [np.concatenate(output, 1), np.concatenate(sums, 2), np.concatenate(of_query, 1)]
    keys = [sum(each) if whole else np.concatenate(each, 1) for each in (of_key, of_value)]
    return [*join, *keys], np.sum(sent, 0)


def staying(drop, own, draws, places):
    """Factors of weights (batch, heads, length, key_length)."""
    queries, keys = ([each.asnumpy() for each in both] for both in drawn_halves(*map(Tensor, (own, draws, places))))
    low, high = (one[..., None] + other[:, None, None] for one, other in zip(queries, keys))
    return (low * high < (1 - drop) * 2**32 - 2**31) / (1 - drop)


def test_dropped_weights_are_independent():
    """Their share of each head, and what neighbouring queries, keys, heads and samples have in common."""
    places, draws = np.arange(128)[None], np.random.default_rng(0).integers(0, 1 << 24, (2, 3, 2))
    stays = staying(0.25, places, draws, places) > 0
    assert np.abs(stays.mean((2, 3)) - 0.75).max() < 0.02 and np.abs(stays.mean((0, 1)) - 0.75).mean() < 0.2
    for dim in range(4):
        both = stays & np.roll(stays, 1, dim)
        assert abs(both.mean() - 0.75**2) < 0.01, dim


def masked(random, kind, length):
    """First and last places of each query's keys, reach, and whether it is exact: by place."""
    own = np.arange(length, dtype=np.int32)
    if kind == "full":
        return own * 0, own * 0 + length, (None, None), True
    if kind == "window":
        width = int(random.integers(1, length))
        return np.maximum(own + 1 - width, 0), own + 1, (width - 1, 0), True
    if kind == "prefix":
        return own * 0, np.maximum(own + 1, random.integers(0, length)).astype(np.int32), (None, None), False
    starts = np.flatnonzero(random.random(length) < 0.3)
    first = np.array([max([0, *starts[starts <= place]]) for place in own], np.int32)
    return (first if kind == "documents" else own * 0), own + 1, (None, 0), kind == "causal"


def test_places_that_float32_does_not_tell_apart():
    query, key = (1, 8, 2, 4), (1, 2**24 + 1, 2, 4)
    row = tensor_meta((1, 8), "int32"), tensor_meta((1, 8), "int32"), tensor_meta((1, 2**24 + 1), "int32")
    tensors = tensor_meta(query, "float32"), tensor_meta(key, "float32"), tensor_meta(key, "float32"), *row
    with pytest.raises(ValueError, match=r"key \(1, 16777217, 2, 4\) has 16,777,217 places: masks tell 16,777,216"):
        ranged_attention(*tensors, 0.5)


@pytest.mark.parametrize(
    "algorithm", daily(["attention_ring"], ["attention_ring", "attention_gather", "attention_seen"])
)
def test_halves_against_one_card(algorithm):
    """In bfloat16: sums over 8 ranks are of float32, so that errors don't grow with the number of ranks."""
    length, own, draw = 16, np.arange(16, dtype=np.int32)[None], np.random.default_rng(0)
    shapes = [(1, length, heads, 4) for heads in (4, 2, 2, 4)]
    *given, of_output = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    ranges, of_sums = (own * 0, own + 1, own), np.ones((1, 4, length), np.float32)
    known = (0,), (None, 0), True, "auto"

    def loss(*halves):
        output, sums = attention(*halves, *map(Tensor, ranges), 0.5, *known)
        return (output.astype(ms.float32) * Tensor(of_output)).sum() + (sums * Tensor(of_sums)).sum(), output, sums

    halves = [Tensor(each).astype(ms.bfloat16) for each in given]
    (_, *results), slopes = ms.value_and_grad(loss, (0, 1, 2), has_aux=True)(*halves)
    found, _ = on_parts(algorithm, 8, [*given, *ranges], 0.5, known, of_output, of_sums, dtype=ms.bfloat16)
    for one, other in zip(found, (*results, *slopes), strict=True):
        other = other.astype(ms.float32).asnumpy()
        np.testing.assert_allclose(one, other, 2**-7, 2**-8 * np.abs(other).max())


@pytest.mark.parametrize(("size", "wide"), [(4, 8), (6, 10), (3, 4)])
def test_keys_and_values_are_parted(size, wide):
    """As by slices, in PyNative and in a graph."""
    both = np.random.default_rng(0).normal(size=(2, 3, 5, 2, wide)).astype(np.float32)

    def parted(x):
        return sides(x, size)

    for part in (parted, ms.jit(parted)):
        first, second = part(Tensor(both))
        np.testing.assert_array_equal(first.asnumpy(), both[..., :size])
        np.testing.assert_array_equal(second.asnumpy(), both[..., size:])
