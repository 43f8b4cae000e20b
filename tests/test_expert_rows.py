"""Rows of experts: which go where, how many, and what is said of ids and rows that can't go anywhere."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.routed_layer import Config

from mindformers_core.algorithms import experts as parts
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.experts import RoutedExperts
from mindformers_core.operators import tensor_meta
from mindformers_core.tensor_parallel import prepare, shard

PLAN = {"": {"input": dict.fromkeys(("hidden_states", "ids", "weights"), layout("dp"))}}


def test_an_expert_that_is_chosen_twice():
    """An error, where a rank has room for different choices only."""
    owners = Tensor(np.array([2, 0, 1], np.int32))
    for called in (parts.places_of_choices, ms.jit(parts.places_of_choices)):
        with pytest.raises(ValueError, match=r"a token of ids \(3, 2\) has chosen an expert twice"):
            called(Tensor(np.array([[1, 1], [1, 0], [0, 1]], np.int32)), owners, 2, 1, 3, None)[0].asnumpy()
    counts = Tensor(np.array([[4], [2]], np.int32))
    with pytest.raises(ValueError, match="a token has chosen an expert twice"):
        parts.sizes_of_rows(counts, counts, 3, True)


def test_a_token_that_overflows():
    """A choice beyond a capacity, and of any id below 0, has nothing, not even a NaN of the last row that was sent."""
    x, weights = np.ones((2, 2, 4), np.float32), np.ones((2, 2, 1), np.float32)
    x[:, 0] = 1e30  # infinite in its expert
    for ids, capacity in ((1, (1, 2)), ([1, -1], None), ([1, -2], None)):
        ids = np.broadcast_to(np.reshape(ids, (1, -1, 1)), (2, 2, 1)).astype(np.int32)

        def work(rank, ids=ids, capacity=capacity):
            net = RoutedExperts(2, 4, 4, capacity=capacity)
            for parameter in net.get_parameters():
                parameter.set_data(ops.ones_like(parameter))
            given = [Tensor(each[rank]) for each in (x[:, None], ids[:, None], weights[:, None])]
            whole = net(*given).asnumpy()
            np.testing.assert_array_equal(whole[0, :, 0], [np.inf, 0])
            net = shard(net, DeviceMesh((2,), ("dp",)), Config(("dp",)), PLAN)
            np.testing.assert_array_equal(net(*given).to_local().asnumpy(), whole)

        SimulatedRanks(2, "CPU").run(work)


def test_an_id_that_no_expert_has():
    """Says which, on one card and where rows are numbered."""
    given = [Tensor(each) for each in (np.ones((3, 4), np.float32), np.full((3, 1), 2, np.int32))]
    says = r"ids \(3, 1\) have 2, but experts are 0 … 1, and -1 is none"
    with pytest.raises(ValueError, match=says):
        RoutedExperts(2, 4, 4)(*given, Tensor(np.ones((3, 1), np.float32)))
    owners = Tensor(np.array([2, 0, 1], np.int32))
    with pytest.raises(ValueError, match=says):
        parts.places_of_choices(given[1], owners, 2, 1, 3, None)
    given = [Tensor(each) for each in (np.ones((4, 4), np.float32), np.array([[3], [0], [1], [0]], np.int32))]
    with pytest.raises(ValueError, match=r"ids \(4, 1\) have 3, but"):
        RoutedExperts(2, 4, 4, capacity=(2, 4))(*given, Tensor(np.ones((4, 1), np.float32)))


def test_rows_are_numbered():
    """By shapes alone: more elements than int32 counts do no harm, since rows have numbers; more rows are an error."""

    def planned(rows, ranks=2):
        mesh = DeviceMesh((ranks,), ("dp",))
        net = shard(RoutedExperts(4 * ranks, 2**12, 4), mesh, Config(("dp",)), PLAN)
        shapes = {"float32": (1, rows, 2**12), "int32": (1, rows, 2)}
        return prepare(net, *(tensor_meta(shapes[each], each) for each in shapes), tensor_meta((1, rows, 2), "float32"))

    with rank_of(2, 0):
        assert "dispatch" in planned(2**20).source.text
        with pytest.raises(ValueError, match="room for 536870912 rows of each of 2 ranks is more than 16777216 rows"):
            planned(2**28)
    with (
        rank_of(128, 0),
        pytest.raises(ValueError, match="room for 1073741824 rows of all 128 ranks is more than 1073741823 rows"),
    ):
        planned(2**22, 128)


@pytest.mark.parametrize("capacity", [None, (3, 4)])
def test_places_of_choices(monkeypatch, capacity):
    """Operators, as on a device, the host and graphs on CPU give the same, of -1 and of ranks that get nothing, too."""
    random = np.random.default_rng(2)
    for count in range(1, 20):
        ranks, own, total = (int(random.integers(*ends)) for ends in ((1, 5), (1, 4), (2, 9)))
        owners = random.integers(0, ranks * own + 1, total + 1)
        owners[0] = ranks * own
        ids = random.integers(-1, total, (4 * count, 2)).astype(np.int32)
        given = Tensor(ids), Tensor(owners.astype(np.int32)), ranks, own, 8 * count, capacity
        by_host = parts.places_of_choices(*given)
        with monkeypatch.context() as patched:
            patched.setattr(parts, "on_cpu", lambda: False)
            by_operators = parts.places_of_choices(*given)
        in_graph = ms.jit(parts.places_of_choices)(*given) if count % 6 == 1 else by_host
        for found, *others in zip(by_host, by_operators, in_graph, strict=True):
            for wanted in others:
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found.asnumpy(), wanted.asnumpy())
        taken, back, sent = (each.asnumpy() for each in by_host)
        back, keys = back.reshape(-1), owners[ids.reshape(-1) + 1]
        kept = np.flatnonzero(back < len(taken))
        np.testing.assert_array_equal(taken[back[kept]], kept)
        np.testing.assert_array_equal(sent.reshape(-1), np.bincount(keys[kept], minlength=ranks * own))
        if capacity is None:  # in the order of ranks, of their experts, and of choices
            np.testing.assert_array_equal(kept, np.flatnonzero(keys < ranks * own))
            np.testing.assert_array_equal(taken, np.argsort(keys, kind="stable"))
        else:  # a rank's from its room's start
            np.testing.assert_array_equal(back[kept] // (8 * count), keys[kept] // own)
            ordered = kept[np.argsort(keys[kept], kind="stable")]
            filled = [np.arange(each) + 8 * count * rank for rank, each in enumerate(sent.sum(1))]
            np.testing.assert_array_equal(back[ordered], np.concatenate(filled))


def test_sizes_of_rows(monkeypatch):
    """Operators, the host and graphs on CPU give the same: how many rows go and come, and each one's expert."""
    random = np.random.default_rng(3)
    for ranks, own, most in ((1, 1, 3), (2, 3, 7), (4, 2, 9), (3, 4, 5)):
        sent, received = (random.integers(0, 3, (ranks, own)) * (most >= 2 * own) for _ in range(2))
        given = *(Tensor(each.astype(np.int32)) for each in (sent, received)), most
        with monkeypatch.context() as patched:
            patched.setattr(parts, "has_values", lambda _: False)
            by_operators = parts.sizes_of_rows(*given, True)
        in_graph = ms.jit(parts.sizes_of_rows)(*given, True)
        for found, *others in zip(by_operators, in_graph, parts.sizes_of_rows(*given, False), strict=True):
            for wanted in others:
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found.asnumpy(), wanted.asnumpy())
        there, home, ids = (each.asnumpy() for each in by_operators)
        np.testing.assert_array_equal(there, (sent.sum(1), received.sum(1)))
        np.testing.assert_array_equal(home, there[::-1])
        of_ranks = [np.repeat(np.arange(own), each) for each in received]
        rows = [[*each, *[-1] * (most - len(each))] for each in of_ranks]
        np.testing.assert_array_equal(ids.reshape(ranks, most), rows)
        exact = parts.sizes_of_rows(*given, True)[2].asnumpy().reshape(-1)
        np.testing.assert_array_equal(exact, np.concatenate(of_ranks) if received.any() else [-1])
