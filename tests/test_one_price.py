"""Prices come from one place, and every step of a plan from the device model that the plan carries."""

import re

import pytest
from mindspore import Tensor, nn, ops
from support.launch import ROOT
from support.small_cells import cell_of
from support.verified_calls import numbers

from mindformers_core.algorithms import redistribute
from mindformers_core.capture import algorithm_graph
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
