"""A kind of step that a test adds: a row of `STEP_KINDS`, and the arguments of its operation. All else reads these."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.dtype_programs import summed
from support.verified_calls import numbers

from mindformers_core import verify
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import collectives, count_collectives
from mindformers_core.communication.world import rank_of
from mindformers_core.explaining.report import make_report
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import Algorithm, register_algorithm, register_operator, registry, tensor_meta
from mindformers_core.operators.rules.dims import unary
from mindformers_core.redistribution.steps import STEP_KINDS, Step, StepKind
from mindformers_core.tensor_parallel import custom_operator, explain, prepare, shard

MESH = DeviceMesh((4,), ("cp",))
PLAN = {"": {"input": {"x": layout("cp")}}}


def mirrored(x):
    """The rows in the opposite order."""
    return ops.flip(x, (0,))


def mirror_step(shape):
    """Each rank gives a local tensor of this shape to the one that is as far from the other end of the group."""
    at = Layout.on(MESH, [()] * len(shape), varying=("cp",))
    return Step("mirror", ("cp",), None, None, None, at, at, tuple(shape), 4)


def mirrored_parts(operator, args, context):
    return operator(context.run_step(args[0], mirror_step(args[0].shape)))


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    """The kind, by `redistribution/steps.py` and `communication/collectives.py`; and an algorithm that asks for it."""

    def places(mesh, group):
        return (tuple(reversed(range(group.size))),) * 2  # where each gives to, and where it gets from

    monkeypatch.setitem(STEP_KINDS, "mirror", StepKind("", "", "permute", "permute", hint="mirrored"))
    monkeypatch.setitem(collectives.ARGUMENTS, "mirror", places)
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    register_algorithm(Algorithm("mirror", "parts of the other end, each in the opposite order", False, mirrored_parts))
    rule = register_operator("Mirrored", source="test_step_kinds.mirrored", algorithms=("mirror",))
    rule(lambda x: unary(x, distributed={"d0": "mirror"}))


class Mirror(nn.Cell):
    """Gradients flow back through the operator, to a weight and the input."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.arange(4, dtype=np.float32)), name="weight")

    def construct(self, x):
        turned = custom_operator("Mirrored", mirrored)(x * self.weight)
        return (turned * x).sum()


def test_ranks_compute_what_one_card_does():
    """Planned, generated and run on simulated ranks; forward, backward, all tensors."""
    check = verify(Mirror(), MESH, Tensor(numbers(8, 4, low=-1)), plan=PLAN)
    assert not check.faults, check.report()


def test_it_is_counted_named_and_explained():
    with rank_of(4, 0):
        net, x = shard(Mirror().set_train(), MESH, plan=PLAN), Tensor(numbers(2, 4))
        made = prepare(net, tensor_meta((2, 4), "float32"))
        traffic = make_report(made.plan, algorithm_of).traffic
        with count_collectives() as counts:
            ms.value_and_grad(net, None, net.trainable_params())(x)
        assert counts == summed(((name, axes), each) for (axes, _, name), each in traffic.items())
        assert counts["permute", ("cp",)][0] == 2
        assert 'mirror_cp = collectives.make("mirror", axes=("cp",))' in made.source.text
        assert "mul_mirrored = mirror_cp(mul)" in made.source.text
        assert "permute over cp, 32 B; backward: permute, 32 B" in explain(net)
