"""Simulated ranks: their collectives, messages, errors, and the state of each."""

import sys
import threading

import numpy as np
import pytest
from mindspore import Tensor

from mindformers_core.communication import Permute, Shift
from mindformers_core.communication.groups import make_group
from mindformers_core.communication.simulated import SimulatedCollective, SimulatedRanks, SimulatedTransport
from mindformers_core.communication.world import rank_of, world
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

MESH = DeviceMesh((2, 3), ("dp", "tp"))


def collected(kind, axes, *arguments, shape=(6, 6), dtype=np.float64):
    """What all ranks of `MESH` give to a collective, and what they get."""
    given = [np.random.default_rng(rank).integers(-9, 9, shape).astype(dtype) for rank in MESH.rank_list]

    def work(rank):
        group = make_group(MESH, axes)
        return SimulatedCollective(group, kind, *arguments)(Tensor(given[rank])).asnumpy()

    return given, SimulatedRanks(MESH.size).run(work)


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_collectives_of_simulated_ranks(axes, dtype):
    for rank in MESH.rank_list:
        members = MESH.group(rank, axes)
        place, count = members.index(rank), len(members)
        for kind, arguments, expected in (
            ("all_reduce", ("sum",), lambda x: sum(x)),
            ("all_reduce", ("max",), lambda x: np.maximum.reduce(x)),
            ("all_gather", (1,), lambda x: np.concatenate(x, 1)),
            ("reduce_scatter", (0, "sum"), lambda x, n=count, k=place: np.split(sum(x), n, 0)[k]),
            ("all_to_all", (0, 1), lambda x, n=count, k=place: np.concatenate([np.split(p, n, 1)[k] for p in x], 0)),
        ):
            given, found = collected(kind, axes, *arguments, dtype=dtype)
            np.testing.assert_array_equal(found[rank], expected([given[member] for member in members]))
            assert found[rank].dtype == dtype


def test_a_permute_of_simulated_ranks():
    """Every rank gives its array to the next one of its group."""
    x = np.arange(12.0).reshape(6, 2)
    source, target = (Layout.on(MESH, [axes, ()]) for axes in (("dp", "tp"), ("tp", "dp")))

    def work(rank):
        return Permute(MESH, ("dp", "tp"), source, target)(Tensor(x[[rank]])).asnumpy()

    rows = [2 * (rank % 3) + rank // 3 for rank in range(6)]
    found = SimulatedRanks(MESH.size).run(work)
    np.testing.assert_array_equal(np.concatenate(found), x[rows])


@pytest.mark.parametrize(("axes", "distance"), [(("tp",), 1), (("tp",), -5), (("dp",), 1), (("tp", "dp"), 4)])
def test_a_shift_of_simulated_ranks(axes, distance):
    """Every rank gives its tensor to the one so many places further in its ring; gradients go back."""
    given, weights = np.random.default_rng(3).normal(size=(2, 6, 4))

    def work(rank):
        shift = Shift(MESH, axes, distance)
        return shift(Tensor(given[rank])).asnumpy(), shift.bprop(None, None, Tensor(weights[rank]))[0].asnumpy()

    for rank, (value, gradient) in enumerate(SimulatedRanks(6).run(work)):
        ring = MESH.group(rank, axes)
        before, behind = (ring[(ring.index(rank) + by) % len(ring)] for by in (-distance, distance))
        np.testing.assert_array_equal(value, given[before])
        np.testing.assert_array_equal(gradient, weights[behind])


def test_shifts_by_other_distances_are_named():
    def work(rank):
        Shift(MESH, "tp", 1 + rank % 2)(Tensor(np.ones(3)))

    with pytest.raises(RuntimeError, match=r"collective 1 over .* ranks 0, 2: permute .*; ranks 1: permute"):
        SimulatedRanks(6).run(work)


def test_ranks_that_wait_for_each_other_are_named():
    def work(rank):
        SimulatedTransport(world()).receive((rank + 1) % 2)

    with pytest.raises(RuntimeError, match="rank 0 in a message from rank 1; rank 1 in a message from rank 0"):
        SimulatedRanks(2).run(work)


def test_a_rank_that_ends_early_is_waited_for():
    def work(rank):
        if rank < 5:
            SimulatedCollective(make_group(MESH, ("tp",)), "all_reduce", "sum")(Tensor(np.ones(3)))

    waits = r"rank 3 in all_reduce over tp of float64 \[3\] \('sum',\), number 1 over tp \(ranks 3, 4, 5\); rank 4 in"
    with pytest.raises(RuntimeError, match=waits):
        SimulatedRanks(6).run(work)


def test_collectives_that_differ_are_named():
    def work(rank):
        kind, arguments = ("all_gather", (0,)) if rank == 4 else ("all_reduce", ("sum",))
        SimulatedCollective(make_group(MESH, ("tp",)), kind, *arguments)(Tensor(np.ones(3)))

    with pytest.raises(RuntimeError, match=r"collective 1 over .* ranks 3, 5: all_reduce .*; ranks 4: all_gather"):
        SimulatedRanks(6).run(work)


def test_the_first_error_wins_and_all_threads_end():
    before, begun = threading.active_count(), []

    def work(rank):
        begun.append(rank)
        if rank == 2:
            raise KeyError("this one")
        SimulatedCollective(make_group(MESH, ("tp",)), "all_reduce", "sum")(Tensor(np.ones(3)))
        raise ValueError("never")

    with pytest.raises(KeyError, match="rank 2: 'this one'"):
        SimulatedRanks(6).run(work)
    assert begun == [0, 1, 2] and threading.active_count() == before


def test_a_rank_that_exits_ends_all():
    def work(rank):
        if rank == 1:
            sys.exit(3)
        SimulatedTransport(world()).receive(1)

    with pytest.raises(SystemExit, match="rank 1: 3"):
        SimulatedRanks(2).run(work)


def test_a_rank_has_a_world_of_its_own():
    seen = SimulatedRanks(3).run(lambda rank: (world().rank, world().size, world().backend))
    assert seen == [(rank, 3, "simulated") for rank in range(3)]
    with rank_of(8, 5):
        assert (world().rank, world().backend) == (5, "fake")
