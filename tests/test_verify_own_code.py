"""`verify()` of models that are compared with their own code: Cells with a `bprop`, `local_map`, evaluation."""

from dataclasses import replace

import pytest
from mindspore import Tensor, nn, ops
from support.small_cells import Doubled, cell_of
from support.small_zero import array

from mindformers_core import local_map, shard, verify
from mindformers_core.communication import AllReduce
from mindformers_core.communication.world import process_state, world
from mindformers_core.layout import Layout, layout
from mindformers_core.lowering import operator_source
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import registry

IN, WHOLE_RESULT = (layout("dp", "tp"), layout(None, "tp")), layout("dp", None)
MESH = DeviceMesh((2, 2), ("dp", "tp"))
SUMMED = Layout.on(MESH, (("dp",), ()), {"tp": "sum"})


class Clipped(nn.Cell):
    """Has a gradient of its own, which `slip` makes another one on every rank but the first."""

    def __init__(self, slip=0.0):
        super().__init__()
        self.slip = slip

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (ops.clamp(dout, -0.5, 0.5) * (1 + self.slip * world().rank if process_state().is_simulated else 1),)


def test_a_cell_with_a_gradient_of_its_own():
    def construct(self, x):
        return self.down(self.inner(self.up(x)))

    plan = {"": {"input": layout("dp")}, "up": {"weight": {"weight": layout("tp")}}}
    plan["down"] = {"weight": {"weight": layout(None, "tp")}}
    for slip in (0.0, 0.01):
        net = cell_of(construct, up=nn.Dense(8, 8), inner=Clipped(slip), down=nn.Dense(8, 4))
        check = verify(net, MESH, Tensor(array(4, 8)), plan=plan)
        assert "'inner' has its own bprop: results and gradients of weights were compared" in check.report()
        assert {fault.at[3] for fault in check.faults} == ({"up.weight", "up.bias"} if slip else set()), check.report()
    net.inner = nn.SequentialCell(Clipped(), nn.Dropout(p=0.5)).set_train()
    with pytest.raises(ValueError, match="its own code, which computes something else at its second call"):
        verify(net, MESH, Tensor(array(4, 8)), plan={})
    with pytest.raises(ValueError, match="has a bprop: verify.. takes the model itself, before shard"):
        verify(lambda: shard(cell_of(construct, up=Doubled(), inner=Doubled(), down=Doubled()), MESH), MESH, 1)


def partial_product(self, x):
    return ops.square(self.mapped(ops.relu(self.up(x)), self.down.weight)).mean()


def reduced(x, weight):
    return AllReduce(MESH, "tp")(ops.dense(x, weight))


@pytest.mark.parametrize(
    ("function", "result", "varying", "faults", "said"),
    [
        (ops.dense, SUMMED, None, set(), "'inner' and the Cells around run operator by operator: results and"),
        (ops.dense, SUMMED, ("tp",), {"inner.down.weight"}, "wrong on  4 of 4 ranks"),
        (reduced, WHOLE_RESULT, ("dp",), set(), "verified: 0 tensors"),
    ],
)
def test_local_map_against_its_function_on_whole_tensors(function, result, varying, faults, said):
    mapped = local_map(function, IN, result, varying=varying)
    inner = cell_of(partial_product, up=nn.Dense(8, 16), down=nn.Dense(16, 8, has_bias=False), mapped=mapped)
    net = cell_of(lambda self, x: self.inner(ops.tanh(self.first(x))), first=nn.Dense(8, 8), inner=inner)
    plan = {"": {"input": layout("dp")}, "inner.up": {"weight": {"weight": layout("tp")}}}
    check = verify(net, MESH, Tensor(array(4, 8)), plan=plan)
    assert {fault.at[3] for fault in check.faults} == faults and said in check.report(), check.report()


@pytest.mark.parametrize("function", [lambda x: x.sum(1), lambda x: AllReduce(MESH, "dp")(x.sum(1))])
def test_a_partial_result_of_local_map_that_is_declared_whole(function):
    def construct(self, x):
        return self.mapped(self.up(x)).mean()

    net = cell_of(construct, up=nn.Dense(8, 8), mapped=local_map(function, layout(None, "tp"), layout()))
    for _ in range(2):  # what was compared in one world is compared in the next one, too
        with pytest.raises(ValueError, match="result 0 of local_map.*the same along .*tp, but rank"):
            verify(net, MESH, Tensor(array(4, 8)))


class _Modes(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Dense(4, 4), nn.Dropout(p=0.5)

    def construct(self, x):
        return self.drop(self.inner(x)) if self.training else ops.silu(self.inner(x))


def test_evaluation_is_compared_where_it_differs(monkeypatch):
    monkeypatch.setitem(registry._FACTS, "SiLU", replace(registry._FACTS["SiLU"], source="ops.relu(input)"))
    operator_source._form.cache_clear()
    try:
        check = verify(_Modes().set_train(), DeviceMesh((2,), ("dp",)), Tensor(array(2, 4)))
    finally:
        operator_source._form.cache_clear()
    assert "a result by the model's own code" in check.report() and "in evaluation, after" in check.report()
