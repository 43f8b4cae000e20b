"""A user's own operator, as docs/tensor_parallel.md registers one: both engines, compiled, and what is known of it."""

import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.documents import code_blocks
from support.launch import ROOT
from support.small_cells import cell_of
from support.verified_calls import MESH, Sample, eager, verified

from mindformers_core import verify
from mindformers_core.algorithms.distributed_operators import ALGORITHMS as FUNCTIONS
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.lowering.corrected import OWN_FUNCTIONS
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import (
    Algorithm,
    elementwise,
    facts_of,
    register_operator,
    registry,
    tensor_meta,
)
from mindformers_core.operators.algorithms import ALGORITHMS
from mindformers_core.recompute import list_operators, recompute
from mindformers_core.tensor_parallel import custom_operator, explain, jit, programs, shard

X = Tensor(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The page's `my_package`, imported."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    (block,) = [text for text in code_blocks(ROOT / "docs" / "tensor_parallel.md", "python") if "MyGate" in text]
    (tmp_path / "my_package.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("my_package")
    del sys.modules["my_package"]


class Gated(nn.Cell):
    """A product with a weight that is cut, and the operator."""

    def __init__(self, gate):
        super().__init__()
        self.weight = Parameter(Tensor(np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)))
        self.gate = gate

    def shard(self, config):
        return {"x": layout("tp", None)}, None, None

    def construct(self, x):
        return self.gate(ms.ops.matmul(x, self.weight), 2.0).sum()


@pytest.mark.usefixtures("one_rank")
def test_a_function_named_as_its_operator(tmp_path, monkeypatch):
    """Generated code calls the function, and no variable takes its name."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    code = ["def turn(x):", "    return x * 2.0", "", "", "turned = custom_operator('Turn', turn)"]
    head = "from mindformers_core.tensor_parallel import custom_operator"
    (tmp_path / "turning.py").write_text("\n".join([head, *code]))
    monkeypatch.syspath_prepend(tmp_path)
    turned = __import__("turning").turned
    register_operator("Turn", source="turning.turn")(elementwise)
    net = shard(Gated(lambda x, _: turned(turned(x))), init_device_mesh((1,), ("tp",)))
    assert abs(float(net(X).asnumpy()) / float((4 * ms.ops.matmul(X, net.weight.value())).sum().asnumpy()) - 1) < 1e-5


@pytest.mark.usefixtures("one_rank")
def test_a_custom_operator_in_both_engines_and_compiled(package):
    mesh = init_device_mesh((1,), ("tp",))
    alone = Gated(package.my_gate)
    expected, expected_gradient = ms.value_and_grad(alone, None, alone.trainable_params())(X)
    for mode, compiled in (("generated", False), ("generated", True), ("eager", False)):
        net = shard(Gated(package.my_gate), mesh, mode=mode)
        gradient_of = ms.value_and_grad(net, None, net.trainable_params())
        loss, (gradient,) = (jit(gradient_of) if compiled else gradient_of)(X)
        np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), rtol=1e-6, err_msg=mode)
        np.testing.assert_allclose(gradient.asnumpy(), expected_gradient[0].asnumpy(), rtol=1e-5, err_msg=mode)
        if mode == "generated":
            assert "from my_package import gate" in programs(net)[-1].source.text


@pytest.mark.usefixtures("one_rank")
def test_what_is_known_of_a_custom_operator(package):
    """`explain` shows it, and of what it keeps, its result, recompute knows."""
    net = shard(Gated(package.my_gate).set_train(), init_device_mesh((1,), ("tp",)))
    assert "MyGate(" in explain(net, X)
    (listed,) = [entry for entry in list_operators(net, X) if entry.operator == "MyGate"]
    assert listed.saved_bytes == 4 * 8 * 4
    loss = net(X)
    again = recompute(shard(Gated(package.my_gate).set_train(), init_device_mesh((1,), ("tp",))), select="*.MyGate")
    assert again(X).asnumpy() == loss.asnumpy()
    assert "recomputed(" in programs(again)[-1].source.text


def test_an_operator_is_added_in_ten_lines(monkeypatch):
    """CONTRIBUTING's example: its rule is that of the package, and `verify` finds nothing, but needs the rule."""
    monkeypatch.setattr(registry, "_FACTS", {name: each for name, each in registry._FACTS.items() if name != "Padding"})
    rule, test = [text for text in code_blocks(ROOT / "CONTRIBUTING.md", "python") if "padd" in text]
    with pytest.raises(ValueError, match="'Padding' has no rule"):
        exec(test, {"__name__": "adding"})
    assert len(rule.split("\n\n\n")[1].splitlines()) <= 10
    exec(rule, {})
    exec(test, found := {"__name__": "adding"})
    assert found["check"].report().partition("\n")[0] in test and not found["check"].faults


class _Centred(nn.Cell):
    def __init__(self, centred_rows):
        super().__init__()
        self.centred_rows = centred_rows

    def shard(self, config):
        return {"x": layout("tp", None)}, None, None

    def construct(self, x):
        return ops.tanh(self.centred_rows(x))


def test_an_algorithm_is_added_by_its_page(monkeypatch, tmp_path):
    """CONTRIBUTING's example: `verify` runs it, and a rule that asks for another name, or hides one, is refused."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    (block,) = [text for text in code_blocks(ROOT / "CONTRIBUTING.md", "python") if "Centred" in text]
    (tmp_path / "my_norms.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    net, mesh = _Centred(__import__("my_norms").centred_rows), init_device_mesh((2,), ("tp",))
    check = verify(net, mesh, X)
    assert not check.faults and "verified: 19 tensors" in check.report()
    with rank_of(2, 0):
        told = explain(shard(net, mesh), tensor_meta((2, 8), "float32"))
    assert "by the distributed algorithm 'centred' over tp: the sum of all parts' rows, then differences" in told
    with pytest.raises(
        ValueError, match=r"of operator 'Off' asks .* algorithm 'centered' \(did you mean 'centred'\?\)"
    ):
        register_operator("Off", algorithms=("centered",))(elementwise)
    with pytest.raises(ValueError, match="a new name and a function, not Algorithm.name='mean'"):
        registry.register_algorithm(Algorithm("mean", "again", function=print))
    register_operator("Hides")(lambda x: elementwise(x, run="centred"))
    with pytest.raises(ValueError, match=r"Hides\(.*its rule asks for \['centred'\]"):
        registry.signature_of("Hides", [tensor_meta((4,), "float32")])


def test_every_algorithm_has_a_record_a_function_and_a_rule():
    operators = registry.registered_operators("algorithms")
    declared = {name for operator in operators for name in facts_of(operator).algorithms}
    assert set(ALGORITHMS) == set(FUNCTIONS) <= declared
    assert all(registry.algorithm_named(name).function for name in declared - set(ALGORITHMS))  # of other tests
    own = [name for name in OWN_FUNCTIONS if facts_of(name).source or not facts_of(name).rule]
    assert own == ["RandomState"]  # of a capture, not of a user


RAGGED = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)


def _sorted_rows(x):
    return ops.sort(x, 0)[0] * ops.cumsum(x, 0)


@pytest.mark.parametrize("facts", [{"gather": True}, {"decomposition": _sorted_rows}], ids=["gather", "decomposition"])
def test_an_operator_without_a_rule(facts, monkeypatch):
    """Its error offers both ways by a call that works, in both engines, with gradients."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    sample = Sample("sorted", custom_operator("SortedRows", _sorted_rows), (RAGGED,))
    with pytest.raises(ValueError, match=f"'SortedRows' has no rule.*SortedRows', {next(iter(facts))}="):
        verified(sample)
    register_operator("SortedRows", source=f"{__name__}._sorted_rows", **facts)
    assert ("cut_0_0" in verified(sample)) and ("cut_0_1" in verified(sample)) == ("gather" in facts)
    eager(sample)
    plan = {"": {"input": {"x": layout("a", None)}}}
    with rank_of(2, 0):
        net = shard(cell_of(lambda self, x: sample.function(x)), MESH, plan=plan)
        told = explain(net, tensor_meta((2, 8), "float32"))
    assert ("every rank computes it of whole inputs: gather=True" in told) == ("gather" in facts)
    assert ("SortedRows" in told) == ("gather" in facts) and "gather" in told


def test_an_unknown_fact():
    with pytest.raises(TypeError, match=r"register_operator: unknown fact 'save' \(did you mean 'saves'\?\)"):
        registry.register_operator("Whatever", save=None)
