"""Backends without their libraries: ranks are threads, MindSpore's operators stand-ins that count the bytes they send.

Each collective gives what its definition says, and sends what its backend declares.
"""

from collections import Counter
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.mint import distributed
from support.routed_rows import routed_rows

from mindformers_core.communication import backend_cpu, point_to_point_native
from mindformers_core.communication.backend_cpu import CpuCollective
from mindformers_core.communication.backend_native import NativeCollective
from mindformers_core.communication.groups import Group
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of, world
from mindformers_core.redistribution import DeviceModel, Link
from mindformers_core.redistribution.arrays import exchange
from mindformers_core.redistribution.steps import CARRIED, COLLECTIVES, ring

ORDERS = ((0, 1), (0, 1, 2), (2, 0, 1, 3), (4, 3, 2, 1, 0))  # of the ranks of a group; process groups count upwards
RING = {  # operator -> n-ths of its input's bytes that a rank sends, by a ring algorithm
    "AllReduce": lambda n: 2 * (n - 1), "AllGather": lambda n: n * (n - 1), "ReduceScatter": lambda n: n - 1,
    "AlltoAll": lambda n: n - 1,
}  # fmt: skip
ROUTINGS = {"dispatch", "combine"}
NAMED = dict(zip(RING, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")))


class Operators:
    """Stand-ins for the operators of MindSpore between ranks, of the group of all."""

    def __init__(self, monkeypatch, buffered):
        self.sent, self.buffered = Counter(), buffered
        for name in RING:
            monkeypatch.setattr(ops, name, lambda *given, name=name: lambda x: self.joined(name, given[:-1], x))
        monkeypatch.setattr(ops, "NeighborExchange", lambda *given: lambda parts: self.neighbours(*given, parts))
        monkeypatch.setattr(distributed, "all_to_all_single", self.all_to_all_single)
        for module in (backend_cpu, point_to_point_native):
            monkeypatch.setattr(module, "dist_comm_isend_op", self.isend)
            monkeypatch.setattr(module, "dist_comm_irecv_op", self.irecv)

    def joined(self, name, given, x):
        here, n = world(), world().size
        self.sent[here.rank] += RING[name](n) * x.nbytes // n
        everyone = Group(("tp",), tuple(range(n)), here.rank, None)
        arguments = {"AllGather": (0,), "ReduceScatter": (0, *given), "AlltoAll": given[:0:-1]}.get(name, given)
        return Tensor(here.ranks.meet(here.rank, everyone, NAMED[name], arguments, x.asnumpy()))

    def neighbours(self, to, origins, received, sent, dtype, group, parts):
        here = world()
        assert all((x.shape, x.dtype) == (shape, dtype) for x, shape in zip(parts, sent, strict=True))
        for rank, x in zip(to, parts, strict=True):
            self.sent[here.rank] += x.nbytes * (rank != here.rank)
            here.ranks.send(here.rank, rank, x)
        return tuple(here.ranks.receive(here.rank, rank) for rank in origins)

    def all_to_all_single(self, output, x, output_sizes, sizes, group):
        here = world()
        assert len(x) and len(output), "a tensor without rows may have no memory"
        parts = np.split(x.asnumpy(), np.cumsum(sizes))[: here.size]
        for rank, part in enumerate(parts):
            self.sent[here.rank] += part.nbytes * (rank != here.rank)
            here.ranks.send(here.rank, rank, part)
        parts = [here.ranks.receive(here.rank, rank) for rank in range(here.size)]
        assert [*map(len, parts)] == output_sizes
        output.copy_(Tensor(np.concatenate([*parts, output.asnumpy()[sum(output_sizes) :]])))

    def isend(self, x, rank, group, tag):
        here = world()
        self.sent[here.rank] += x.nbytes
        here.ranks.send(here.rank, rank, x)
        if not self.buffered:
            assert here.ranks.receive(here.rank, rank) == "received", "both ranks send first"
        return x, self

    def irecv(self, buffer, tag, rank, group):
        here = world()
        found = here.ranks.receive(here.rank, rank)
        assert (found.shape, found.dtype) == (buffer.shape, buffer.dtype)
        if not self.buffered:
            here.ranks.send(here.rank, rank, "received")
        return found, self

    def wait(self):
        """A handle's."""


def arguments_of(n):
    """Name of a collective -> the arguments of its method, of which several may be tried."""
    mixed = (1, 0, *range(3, n), *range(2, n)[:1])  # two cycles; of three places, one keeps its own
    tables = [ring(n, distance) for distance in {1, -1, n - 2} - {0}]
    return {
        "all_reduce": [("sum",)], "all_gather": [(0,), (1,)], "reduce_scatter": [(1, "sum")],
        "all_to_all": [(0, 1), (1, 0)],
        "permute": [*tables, (mixed, tuple(map(mixed.index, range(n))))],
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["eager", "construct"])
@pytest.mark.parametrize(("backend", "device"), [("native", "GPU"), ("native", "Ascend"), ("cpu", "CPU")])
def test_a_backend_carries_what_it_declares(monkeypatch, backend, device, mode):
    operators = Operators(monkeypatch, buffered=backend == "cpu")
    monkeypatch.setattr(backend_cpu, "shared_group", lambda group: None)  # as on several hosts
    make = NativeCollective if backend == "native" else CpuCollective
    declared = CARRIED[f"{backend} graph" if mode == "construct" else backend]
    for order, name in product(ORDERS, sorted(COLLECTIVES.keys() - ROUTINGS)):
        n = len(order)
        for arguments in arguments_of(n)[name]:
            xs = [np.random.default_rng(rank).integers(-9, 9, (2 * n, 3 * n)).astype(np.float32) for rank in range(n)]
            operators.sent.clear()

            def work(rank, order=order, name=name, arguments=arguments, xs=xs):
                group = Group(("tp",), order, order.index(rank), "a_group")
                return getattr(make(group, name, *arguments), mode)(Tensor(xs[rank])).asnumpy()

            found = SimulatedRanks(n, device).run(work)
            truth = exchange(name, [xs[rank] for rank in order], *arguments)
            for place, rank in enumerate(order):
                np.testing.assert_array_equal(found[rank], truth[place], f"{name} {arguments} of {order}")
            whole = xs[0].nbytes * (n if name == "all_gather" else 1)
            most = max(operators.sent.values())
            assert most == declared[name][1](n) * whole // n, f"{name} {arguments} of {order}"


@pytest.mark.parametrize("mode", ["eager", "construct"])
@pytest.mark.parametrize(("backend", "device"), [("native", "GPU"), ("native", "Ascend"), ("cpu", "CPU")])
def test_rows_go_to_ranks_and_back(monkeypatch, backend, device, mode):
    """In PyNative no more than there are; in graphs room for all, as the backend declares."""
    operators, compiled = Operators(monkeypatch, buffered=backend == "cpu"), mode == "construct"
    monkeypatch.setattr(backend_cpu, "shared_group", lambda group: None)
    make = NativeCollective if backend == "native" else CpuCollective
    declared = CARRIED[f"{backend} graph" if compiled else backend]
    for order, name, (seed, limit) in product(ORDERS, sorted(ROUTINGS), ((0, 5), (1, 3), (2, 1))):
        n, total = len(order), 5 * len(order)
        most, counts = total, np.random.default_rng(seed).integers(0, limit, (n, n))  # the last ones: nothing at all
        operators.sent.clear()

        def work(rank, n=n, order=order, name=name, counts=counts, total=total, most=most):
            place = order.index(rank)
            x, y, there, back, rows_of = routed_rows(place, counts, (3,), total, most if compiled else None)
            sizes = np.stack((counts[place], counts[:, place]))[:: 1 if name == "dispatch" else -1]
            rows, to_rows = (total, n * most)[:: 1 if name == "dispatch" else -1]
            cell = make(Group(("tp",), order, place, "a_group"), name, rows, to_rows)
            sizes = Tensor(sizes.astype(np.float32)) if compiled else sizes.tolist()
            found = getattr(cell, mode)(Tensor(x if name == "dispatch" else y), sizes).asnumpy()
            if name == "combine":
                return np.testing.assert_array_equal(found, back)
            assert len(found) == (n * most if compiled else max(1, sum(map(len, there))))
            for part, truth in zip(rows_of(found), there, strict=True):
                np.testing.assert_array_equal(part, truth)
            assert compiled or any(map(len, there)) or not found.any()

        SimulatedRanks(n, device).run(work)
        where = f"{name} {counts} of {order}"
        if compiled:
            assert max(operators.sent.values()) == declared[name][1](n) * total * 12 // n, where
        else:
            outgoing = counts if name == "dispatch" else counts.T
            for place, rank in enumerate(order):
                assert operators.sent[rank] == 12 * (outgoing[place].sum() - outgoing[place, place]), where


@pytest.mark.parametrize(
    ("name", "rows", "sizes"),
    [
        ("dispatch", (4, 8), [[5, 0], [0, 0]]),  # more than go to a rank
        ("dispatch", (4, 8), [[1, 1], [5, 0]]),
        ("dispatch", (4, 8), [[3, 2], [0, 0]]),  # more than there are
        ("combine", (8, 4), [[0, 0], [3, 2]]),  # more than there is room for
    ],
)
def test_rows_without_room_are_an_error(name, rows, sizes):
    with rank_of(2, 0, SimulatedRanks(2, "CPU"), "CPU"):
        cell = CpuCollective(Group(("tp",), (0, 1), 0, "a_group"), name, *rows)
        with pytest.raises(
            ValueError, match=rf"{name} over .* of 4 rows into {rows[1]}, at most 4 between two ranks, has"
        ):
            cell(Tensor(np.ones((4, 3), np.float32)), sizes)


def test_rows_without_sizes_are_an_error():
    with rank_of(2, 0, SimulatedRanks(2, "CPU"), "CPU"):
        group = Group(("tp",), (0, 1), 0, "a_group")
        cell = CpuCollective(group, "dispatch", 4, 8)
        for called in (cell, ms.jit(cell)):
            with pytest.raises(TypeError, match="dispatch over tp .* also takes sizes: how many rows"):
                called(Tensor(np.ones((4, 3), np.float32)))
        with pytest.raises(ValueError, match="room for 7 rows isn't as many for each rank"):
            CpuCollective(group, "combine", 7, 4)


@pytest.mark.parametrize(("kind", "arguments"), [("permute", ring(2, 1)), ("all_to_all", (0, 1))])
def test_a_graph_of_devices_has_an_operator_that_all_ranks_share(kind, arguments):
    """MindSpore compiles it up to the choice of a kernel, of which CPU has none."""
    with rank_of(2, 1, device_target="GPU"):
        collective = NativeCollective(Group(("tp",), (0, 1), 1, "a_group"), kind, *arguments)
        with pytest.raises(RuntimeError, match=r"Unsupported op \[NeighborExchange\] on CPU"):
            ms.jit(collective)(Tensor(np.ones((2, 4), np.float32)))


def test_the_price_is_of_what_the_backend_declares():
    model = DeviceModel("any", 1e9, 10.0, Link(1.0, 100.0))
    graph = DeviceModel("any", 1e9, 10.0, Link(1.0, 100.0), backend="cpu graph")
    assert model.seconds("permute", ("tp",), 4, 400) == pytest.approx(10 + 1 + 4)
    assert graph.seconds("permute", ("tp",), 4, 400) == pytest.approx(10 + 6 + 24)
    assert graph.seconds("all_gather", ("tp",), 4, 400) == graph.seconds("all_reduce", ("tp",), 4, 400)
    with pytest.raises(ValueError, match="'any': backend 'cpu grahp' is none of native, native graph, cpu, cpu graph"):
        DeviceModel("any", 1e9, 10.0, Link(1.0, 100.0), backend="cpu grahp")
