"""An axis that cuts two factors jointly, by a ring of shifts, and one that cuts what an operator offers."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from support.joint_operators import few, many, pair_sum, register
from support.verified_calls import MESH, MESH_OF_4, Sample, eager, numbers, verified

from mindformers_core import verify
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import OperatorCall, registry, resolve, signature_of, tensor_meta
from mindformers_core.operators.resolve import alternatives
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.propagation.algorithms import algorithm_steps
from mindformers_core.redistribution import CPU
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.tensor_parallel import shard

ROWS, MORE = numbers(8, 4, low=-1), numbers(12, 4, low=-1)
RING = DeviceMesh((4,), ("cp",))


@pytest.fixture(autouse=True)
def operators(monkeypatch):
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    register()


class Scaled(nn.Cell):
    """An operator of weighted rows: gradients flow back through it, to weights and inputs."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, Parameter(Tensor(np.ones(4, np.float32)), name="weight")

    def construct(self, *inputs):
        return self.function(*(each * self.weight for each in inputs)).sum()


def test_every_cut_of_the_operators():
    """Both engines, forward and backward, against one card; of two lists cut alike none is gathered."""
    for function, inputs in ((pair_sum, (ROWS, MORE)), (few, (ROWS,)), (many, (ROWS,))):
        sample = Sample("", function, inputs)
        assert not [name for name in verified(sample) if name.startswith("cut_0_0")]
        eager(sample)


@pytest.mark.parametrize("mesh, cut", [(RING, "cp"), (MESH_OF_4, ("b", "a"))])
def test_a_ring_sends_each_part_round_once(mesh, cut):
    """Forward n - 1 parts of y leave a rank; backward n - 1 of its gradient, and the weights' gradients."""
    plan = {"": {"input": {"inputs": layout(cut)}}}
    net, tensors = Scaled(pair_sum), (Tensor(ROWS), Tensor(MORE))
    check = verify(net, mesh, *tensors, plan=plan)
    assert not check.faults, check.report()
    with rank_of(4, 0):
        net = shard(net.set_train(), mesh, plan=plan)
        made = prepare(net, tensor_meta((2, 4), "float32"), tensor_meta((3, 4), "float32")).plan
    (pairs,) = [
        each for each in made.instructions if isinstance(each, OperatorPlan) and each.node.operator == "PairSum"
    ]
    assert (pairs.algorithm, pairs.cut_axes) == ("pair_ring", (cut,) if isinstance(cut, str) else cut)
    part = 3 * 4 * 4  # bytes of a rank's rows of y
    ring = [entry for entry in algorithm_steps(pairs, algorithm_of)]
    assert [(step.kind, step.forward[1], step.backward[1], gradient) for step, gradient in ring] == [
        ("shift", part, part, True)
    ] * 3


def test_a_joint_cut_has_its_axes_in_one_order():
    """What a rank has of both lists is the same part: an order that differs is redistributed."""
    x, y = (Layout.on(MESH_OF_4, (axes, ())) for axes in (("a", "b"), ("b", "a")))
    metas = tensor_meta((8, 4), "float32", x), tensor_meta((8, 4), "float32", y)
    found = resolve(
        OperatorCall("PairSum", signature_of("PairSum", metas), metas, MESH_OF_4, CPU, kept=({"a", "b"},) * 2)
    )
    assert found.algorithm[0] == "pair_ring" and found.inputs[0].dims == found.inputs[1].dims == x.dims


def test_an_offered_cut_wins_by_its_price():
    """A million operations an element are worth the gather of a gradient; a few aren't."""
    for function, cut in ((few, ()), (many, ("a",))):
        with rank_of(2, 0):
            plan = prepare(shard(Scaled(function).set_train(), MESH), tensor_meta((8, 4), "float32")).plan
        (called,) = [
            each
            for each in plan.instructions
            if isinstance(each, OperatorPlan) and each.node.operator in ("Few", "Many")
        ]
        assert called.inputs[0].axes[0] == cut
        check = verify(Scaled(function), MESH, Tensor(ROWS))
        assert not check.faults, check.report()


def test_axes_of_size_1_are_offered_nothing():
    """Each would double the choices, whose algorithms are run to be priced."""
    found = []
    for mesh in (RING, DeviceMesh((1, 4, 1), ("pp", "cp", "tp"))):
        metas = (tensor_meta((8, 4), "float32", Layout.on(mesh, ((), ()))),)
        ways = alternatives(OperatorCall("Many", signature_of("Many", metas), metas, mesh, CPU))
        found.append([way.choice for way in ways])
    assert found[0] == found[1] and len(found[0]) > 1
