"""Prices come from one place, and every step of a plan from the device model that the plan carries."""

import re
from itertools import product

import numpy as np
import pytest
from mindspore import DeviceCtx, Tensor, nn, ops
from support.launch import ROOT
from support.small_cells import cell_of
from support.verified_calls import numbers

from mindformers_core.algorithms import redistribute
from mindformers_core.capture import algorithm_graph
from mindformers_core.communication import count_collectives
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.propagation import insertion
from mindformers_core.redistribution import DeviceModel, Link, plan_redistribution, price
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.tensor_parallel import shard

MESH = DeviceMesh((2,), ("tp",))
OWN = DeviceModel("own", 1e12, 1e-6, Link(1e-6, 1e10))
PRICED = {
    "redistribution/device_model.py",
    "redistribution/planner.py",
    "redistribution/price.py",
    "redistribution/bounds.py",
}


def test_nothing_else_asks_for_the_seconds_of_a_collective():
    """Resolve, insertion, look-ahead and stored parameters ask `redistribution_price`, algorithms `steps_price`."""
    package = ROOT / "mindformers_core"
    asking = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\.seconds\(|step_rates|_rates\(", path.read_text(encoding="utf-8"))
    }
    assert asking == PRICED


def model():
    """A product of cut columns, a softmax over them, and a product that adds terms."""

    def construct(self, x):
        return self.second(ops.softmax(self.first(x), -1)).sum()

    first, second = (nn.Dense(*sizes, weight_init="ones", bias_init="zeros") for sizes in ((8, 1024), (1024, 8)))
    return cell_of(construct, first=first, second=second)


PLAN = {
    "first": {"weight": {"weight": layout("tp", None), "bias": layout("tp")}},
    "second": {"weight": {"weight": layout(None, "tp"), "bias": layout(None)}},
}


@pytest.fixture
def asked(monkeypatch):
    """The device models by which redistributions are planned."""
    found = []

    def recorded(source, target, shape, dtype, device_model):
        found.append(device_model)
        return plan_redistribution(source, target, shape, dtype, device_model)

    for module in (algorithm_graph, insertion, price, redistribute):
        monkeypatch.setattr(module, "plan_redistribution", recorded)
    price.redistribution_price.cache_clear()
    return found


def test_a_plan_has_one_device_model(asked):
    with rank_of(2, 0):
        net = shard(model().set_train(), MESH, plan=PLAN, device_model=OWN)
        plan = prepare(net, tensor_meta((64, 8), "float32")).plan
    plans = [found for _, found in plan.walk()]
    operators = [each for found in plans for each in found.instructions if isinstance(each, OperatorPlan)]
    assert "softmax" in {each.algorithm for each in operators}
    assert {each.device_model for each in (*plans, *operators)} == set(asked) == {OWN}


def test_the_eager_engine_asks_the_device_model_of_the_cell(asked):
    def work(rank):
        net = shard(model(), MESH, plan=PLAN, mode="eager", device_model=OWN)
        return net(Tensor(numbers(4, 8)))

    SimulatedRanks(2).run(work)
    assert set(asked) == {OWN}


# functions of a tensor whose dim 1 is cut
CUT = {
    "softmax": lambda x: ops.softmax(x, 1),
    "log_softmax": lambda x: ops.log_softmax(x, 1),
    "amax": lambda x: ops.amax(x, 1),
    "argmax": lambda x: ops.argmax(x, 1),
    "topk": lambda x: ops.topk(x, 3)[0],
    "cumsum": lambda x: ops.cumsum(x, 1),
    "cummax": lambda x: ops.cummax(ops.stop_gradient(x), 1)[0],
    "norm": lambda x: ops.norm(x, 2, dim=1),
    "std": lambda x: ops.std(x, 1),
    "prod": lambda x: ops.prod(x, 1),
    "slice": lambda x: x[:, 1:6],
}
SHAPES = (4, 8), (512, 512)


def sent(mode, function, shape):
    """The collectives of one call, the first one."""
    cell = cell_of(lambda self, x: (function(x), self.dense(x)), dense=nn.Dense(2 * shape[1], 2))
    declared = {"": {"input": [layout(None, "tp")]}, "dense": {"weight": {"weight": layout(None, "tp")}}}
    cell = shard(cell, MESH, plan=declared, mode=mode)  # over an axis that cuts both, the price decides
    with count_collectives() as counts:
        cell(Tensor(np.ones(shape, np.float32)))
    return dict(counts)


def test_eager_calls_choose_what_programs_choose_without_the_meta_device(monkeypatch):
    """By the steps of an algorithm, which cost more than a gather for small tensors, and less for large ones.

    Tensors that other threads make while the process is on the meta device have no values either.
    """
    cases, devices, enter = list(product(CUT.values(), SHAPES)), [], DeviceCtx.__enter__

    def recorded(self):
        devices.append(self.name)
        return enter(self)

    with rank_of(2, 0):
        programs = [sent("generated", *case) for case in cases]
        monkeypatch.setattr(DeviceCtx, "__enter__", recorded)
        eager = [sent("eager", *case) for case in cases]
    with DeviceCtx("meta"):
        assert devices == ["meta"]  # this one
    assert dict(zip(product(CUT, SHAPES), eager)) == dict(zip(product(CUT, SHAPES), programs))
    assert [("all_gather", ("tp",)) in each for each in programs[:2]] == [True, False]
