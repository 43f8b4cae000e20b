"""Attention with random masks, orders, heads and numbers of ranks, by each algorithm, against dense attention."""

import numpy as np
import pytest
from mindspore import Tensor
from test_cut_attention import dense, masked, on_parts, staying

from mindformers_core.algorithms import attention_rows
from mindformers_core.batches import area_order, places_of, static_order
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.tensor_parallel import DTensor, distribute_tensor
from mindformers_core.tensor_parallel.attention import attention


def on_tensors(algorithm, ranks, given, scale, known, of_output, of_sums):
    """What models get: the operator on DTensors, all cut along the sequence, by its rule; results and gradients."""
    mesh = DeviceMesh((ranks,), ("cp",))

    def work(rank):
        def cut(array, dim=1):
            dims = [("cp",) if place == dim else () for place in range(array.ndim)]
            return distribute_tensor(Tensor(array), Layout.on(mesh, dims), mesh)

        tensors, (slope, *ranges), of_total = map(cut, given[:3]), map(cut, (of_output, *given[3:])), cut(of_sums, 2)
        inputs, tape, results = [(each.to_local(), each.layout) for each in tensors], ThreadTape(), []

        def attend(*parts):
            tensors = [DTensor.from_local(part, layout) for part, (_, layout) in zip(parts, inputs)]
            found = attention(*tensors, *ranges, scale, *known, algorithm)
            placed = [each.redistribute(like.layout) for each, like in zip(found, (slope, of_total))]
            results.extend(each.to_local() for each in placed)

        parts = [part for part, _ in inputs]
        tape.record(attend, parts)
        slopes, _ = tape.gradients(parts, results, [slope.to_local(), of_total.to_local()], ())
        return [each.asnumpy() for each in (*results, *slopes)]

    with custom_gradients():
        parts = zip(*SimulatedRanks(ranks).run(work))
    return [np.concatenate(each, dim) for each, dim in zip(parts, (1, 2, 1, 1, 1), strict=True)]


def drawn(random, algorithm, ranks):
    """Arguments of `dense` but for scale and dropout, those of `on_parts` that say what is known, and a text."""
    kind = random.choice(["causal", "full", "window", "prefix", "documents"])
    balance = random.choice(["contiguous", "zigzag", "area", "any"])
    chunks = ranks * int(random.choice([1, 2, 2]))
    length = chunks * int(random.integers(1, 4))
    rows = [masked(random, kind, length) for _ in range(2 if kind in ("prefix", "documents") else 1)]
    (_, _, reach, exact), *_ = rows
    areas = [(np.minimum(last, length) - first).reshape(chunks, -1).sum(1) for first, last, *_ in rows]
    order = tuple(map(int, random.permutation(chunks))) if balance == "any" else static_order(balance, ranks)
    if order and length % len(order):
        order = (0,)
    places = np.stack([places_of(order or area_order(area, ranks), length) for area in areas])
    ranges = [np.stack([row[number][own] for row, own in zip(rows, places)]) for number in (0, 1)]
    groups, copies, size, value_size = int(random.choice([1, 2, ranks])), *map(int, random.integers(1, 4, 3))
    if algorithm == "all_to_all" and groups % ranks:
        groups, copies = 1, ranks
    shapes = [(2, length, *each) for each in ((groups * copies, size), (groups, size), (groups, value_size))]
    tensors = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    results = (2, length, groups * copies, value_size), (2, groups * copies, length)
    slopes = [random.normal(size=shape).astype(np.float32) for shape in results]
    where = f"{algorithm}, {kind}, {balance}, {ranks} ranks, {length} tokens, {groups} x {copies} heads"
    return [*tensors, *(each.astype(np.int32) for each in (*ranges, places))], slopes, (order, reach, exact), where


@pytest.mark.long
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.nightly)])
def test_any_mask_in_any_order(count, monkeypatch):
    """Outputs, sums, and the gradients of both, by each algorithm: as models call it, or with some weights dropped.

    In three of four keys that data hide aren't computed, as in longer sequences.
    """
    random = np.random.default_rng(3)
    monkeypatch.setattr(attention_rows, "_PIECE", 2)
    for number in range(count):
        monkeypatch.setattr(attention_rows, "_FEW", 1 << 18 if number % 4 == 3 else 0)
        algorithm, ranks = ("ring", "gather", "all_to_all")[number % 3], int(random.integers(2, 9))
        given, slopes, known, where = drawn(random, algorithm, ranks)
        scale, drop = float(random.uniform(0.2, 1)), 0.25 * (algorithm != "all_to_all" and random.random() < 0.4)
        if drop:
            draws = random.integers(0, 1 << 24, (2, given[0].shape[2], 2)).astype(np.int32)
            dropped = drop, given[5], draws
            name = "seen" if algorithm == "gather" and known[0] and number % 2 else algorithm
            found, _ = on_parts(f"attention_{name}", ranks, given, scale, (*known, "auto"), *slopes, dropped)
        else:
            found = on_tensors(algorithm, ranks, given, scale, known, *slopes)
        floats = [each.astype(np.float64) for each in given[:3]]
        wanted = dense(*floats, *given[3:], scale, *slopes, staying(*dropped, given[5]) if drop else 1)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 2e-5, err_msg=f"{number}: {where}")
