"""The parts of `verify()`: the thread's tape, comparison of tensors, kinds of faults, notes."""

import re
import threading
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from models import EXAMPLES, axes_of
from support.launch import ROOT
from support.nightly import daily
from support.random_steps import Tower
from support.small_cells import Doubled, cell_of
from support.small_zero import array
from verify_faults import SUBJECTS

from mindformers_core import recompute, shard, verify
from mindformers_core.algorithms.shard_context import ShardContext
from mindformers_core.commands.command_line import main
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.layout import Layout, layout
from mindformers_core.lowering import operator_source
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import registry
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.verification.comparison import close, gradient_layout, gradient_terms, largest, summed
from mindformers_core.verification.observing import RankObserver
from mindformers_core.verification.report import kind_of_fault
from mindformers_core.zero import MixedPrecision, hsdp
from mindformers_core.zero.storage import storage_of

pytestmark = pytest.mark.long

MESH = DeviceMesh((2, 3), ("dp", "tp"))


def test_gradients_of_a_thread():
    weight = ms.Parameter(Tensor(array(4, 4)), name="weight")
    unused = ms.Parameter(Tensor(array(2)), name="unused")
    found, expected = [], ms.grad(lambda x: ops.tanh(ops.matmul(x, weight) * 2), 0, weight)(Tensor(array(2, 4, seed=1)))

    def work():
        tape, x, outputs = ThreadTape(), Tensor(array(2, 4, seed=1)), []
        tape.record(lambda x: outputs.append(ops.tanh(Doubled()(ops.matmul(x, weight)))), (x,))
        aside = Tensor(array(3))  # depends on nothing that is differentiated
        found.extend(tape.gradients((x,), (outputs[0], aside), (ops.ones_like(outputs[0]), aside), (weight, unused)))

    with custom_gradients():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    (of_x,), (of_weight, of_unused) = found
    np.testing.assert_allclose(of_x.asnumpy(), expected[0].asnumpy(), rtol=1e-6)
    np.testing.assert_allclose(of_weight.asnumpy(), expected[1].asnumpy(), rtol=1e-6)
    assert not of_unused.asnumpy().any()


def test_arrays_that_agree():
    one = np.array([1.0, -2.0, 1e-9])
    assert close(one, one + 1e-8, 1e-8) and not close(one, one + 3e-8, 1e-8)
    assert close(one * 0, one * 1e-9, 1e-8, rounding=1e-8) and not close(one * 0, one * 1e-9, 1e-8)
    assert not close(one[:2], one, 1.0)
    assert close(np.int32([1, 2]), np.int32([1, 2]), 1.0) and not close(np.int32([1, 2]), np.int32([1, 3]), 1.0)
    masked = np.array([-1e9, 0.5, np.inf])
    assert close(masked, masked, 1e-6)
    assert not close(masked + [0, 1e-5, 0], masked, 1e-6), "a mask is no measure of other elements"
    assert not close(np.array([-1e9, 0.5, 7.0]), masked, 1e-6)
    assert largest([np.array([-1e9, 3.0]), np.array([-4.0]), np.int32([7])]) == 4.0 and largest([]) == 0.0


def test_layouts_of_gradients():
    layout = Layout.on(MESH, [(), ()], {"dp": "avg"}, ("tp",))
    assert gradient_layout(layout) == Layout.on(MESH, [(), ()], {"tp": "sum"}) and gradient_terms(layout) == 2
    assert gradient_layout(Layout.on(MESH, [()], {"dp": "max"})) is None


def test_terms_are_summed_when_all_are_there():
    layout, waiting = Layout.on(MESH, [()], {"tp": "sum"}), {}
    terms = [array(4, seed=rank) for rank in MESH.rank_list]
    found = [summed(waiting, "x", layout, rank, term) for rank, term in enumerate(terms)]
    assert [one is None for one in found] == [True, True, False] * 2
    np.testing.assert_allclose(found[2], sum(terms[:3]), rtol=1e-6)
    np.testing.assert_allclose(found[5], sum(terms[3:]), rtol=1e-6)


VALUE = np.random.default_rng(0).standard_normal((6, 6))
TERMS = [np.random.default_rng(seed).standard_normal((6, 6)) for seed in range(2)]
TERMS.append(VALUE - sum(TERMS))
WHOLE, ROWS = Layout.on(MESH, [(), ()]), Layout.on(MESH, [("tp",), ()])
KINDS = {
    "a reduction over tp is missing": (WHOLE, [*TERMS, *TERMS]),
    "6 times too large, the size of dp x tp": (WHOLE, [VALUE * 6] * 6),
    "2 times too small, the size of dp": (WHOLE, [VALUE / 2] * 6),
    "it is 5 times the right value": (WHOLE, [VALUE * 5] * 6),
    "it is the part of rank 1": (ROWS, [VALUE[2:4]] * 6),
    "dims 0 and 1 are swapped": (WHOLE, [VALUE.T] * 6),
    "all elements are zero": (WHOLE, [VALUE * 0] * 6),
    "some elements are not finite": (WHOLE, [VALUE / 0.0] * 6),
    "the shape is [3, 6], not [6, 6]": (WHOLE, [VALUE[:3]] * 6),
    "": (WHOLE, [TERMS[0] ** 2] * 6),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_faults(kind):
    layout, found = KINDS[kind]
    faults = [
        SimpleNamespace(
            rank=rank, found=one, expected=VALUE[layout.local_slices((6, 6), rank)], value=VALUE, layout=layout
        )
        for rank, one in enumerate(found)
    ]
    said = kind_of_fault(faults[0], faults[1:], MESH)
    assert kind in said and bool(kind) == bool(said)


def test_a_report_without_faults():
    check, mesh = SUBJECTS["net"]()
    verified = f"verified: {check.compared} tensors on 4 ranks (dp=2, tp=2) compared with one card, no difference"
    first, *_, last = check.report().splitlines()
    assert first == verified and last.startswith("outside of verify: loss scales, ")


def test_a_kernel_without_float64_is_told():
    example, mesh = EXAMPLES["experts"], DeviceMesh((2,), ("tp",))
    check = verify(example.make(), mesh, *example.inputs(0)[0], plan=example.plan(axes_of(mesh)))
    assert not check.faults and check.precision.dtype == "float32"
    assert "in float32, to 0.0001: For primitive[OneHot]" in check.report()


def small(**settings):
    """The `Check` of a `Tower` whose ranks compute losses of their own, and its storage's text."""
    mesh, seen = DeviceMesh((2,), ("dp",)), []

    def build():
        net = hsdp(Tower(np.random.default_rng(0), 2), mesh=mesh, **settings)
        seen.append(net)
        return net

    ids, keep = np.arange(16, dtype=np.int32).reshape(4, 4), array(4, 4, 8) < 0.6
    return verify(build, mesh, Tensor(ids), Tensor(keep)), seen


def test_parameters_are_cut_and_bucketed_by_the_bytes_of_the_model():
    """8 x 8 floats of 4 bytes are 0.25 KB, the threshold; in 8 bytes they would be cut. Buckets have 300 bytes."""
    check, seen = small(shard_size=2, threshold=0.25, optimizer_level="level2", comm_fusion=300 / 2**20)
    assert not check.faults
    plans = {(path, plan.dim) for net in seen for path, plan in stored_plans(net)}
    assert {path for path, dim in plans if dim is not None} == {"words.embedding_table"}
    assert len({bucket_members(net) for net in seen}) == 1, "the same buckets with and without float64"


def stored_plans(net):
    return [(stored.plan.path, stored.plan) for stored in storage_of(net).parameters]


def bucket_members(net):
    return tuple(bucket.members for bucket in storage_of(net).reduces)


def test_what_mixed_precision_leaves_unverified_is_told():
    check, _ = small(shard_size=2, threshold=0, mixed_precision=MixedPrecision(compute="float16"))
    assert not check.faults and check.precision.dtype == "float64"
    assert check.notes == ("not verified: tensors inside in the dtypes of mixed_precision",)


def test_ranks_whose_terms_are_wrong_together_are_named_together(monkeypatch):
    """Rank 2 alone looks words up in a wrong place, and rank 1 comes last."""
    monkeypatch.setattr(
        ShardContext, "start", lambda self, size, dtype: Tensor((self.number - (self.number == 2)) * size, dtype)
    )
    net = cell_of(lambda self, ids: ops.tanh(self.words(ids)), words=nn.Embedding(12, 4))
    plan = {"words": {"weight": {"embedding_table": layout("tp", None)}}}
    ids = Tensor(np.arange(12, dtype=np.int32))
    report = verify(net, DeviceMesh((3,), ("tp",)), ids, plan=plan).report()
    assert "the first is on ranks 0, 1, 2, in what their terms make together: the tensor 'gather" in report
    assert "wrong on  3 of 3 ranks: 0, 1, 2" in report


def test_a_cell_without_gradients_is_refused():
    numbers = Tensor(np.arange(8, dtype=np.int32).reshape(4, 2))
    with pytest.raises(ValueError, match="compares gradients, too, and .* has none"):
        verify(cell_of(lambda self, x: x.sum(1)), DeviceMesh((2,), ("dp",)), numbers)


class Together(nn.Cell):
    """Structures in and out, None, several calls of one Cell with other shapes, a result that isn't differentiated."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 4)

    def construct(self, pair, table, nothing=None, *, scale=1.0):
        x, y = pair
        z = self.dense(x) * scale + self.dense(y.reshape(-1, 4)).reshape(x.shape)
        return {"sum": z + table["bias"], "largest": ops.argmax(z, -1)}, (x > y, [y])


def test_structures_of_arguments_and_results():
    mesh, x, y = DeviceMesh((2, 2), ("dp", "tp")), Tensor(array(4, 4)), Tensor(array(4, 4, seed=1))
    check = verify(Together(), mesh, (x, y), {"bias": Tensor(array(4)), "name": "table"}, scale=2.0)
    assert not check.faults, check.report()
    assert check.compared > 60


@pytest.mark.parametrize("recomputed", daily([True], [False, True]))
def test_dropout_draws_the_same_on_all_ranks(recomputed):
    def construct(self, x):
        return ops.mean(ops.square(ops.tanh(ops.dropout(self.drop(self.dense(x)), 0.3, self.training))))

    def build():
        net = cell_of(construct, dense=nn.Dense(8, 8), drop=nn.Dropout(p=0.5)).set_train()
        shard(net, mesh, plan={"": {"input": {"x": layout("dp")}}, "dense": {"weight": {"weight": layout("tp", None)}}})
        net = recompute(net, select=["drop"]) if recomputed else net
        return hsdp(net, shard_size=2, threshold=0, accumulate_grad_step=2)

    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    check = verify(build, mesh, Tensor(array(8, 8)))
    assert not check.faults, check.report()
    labels = list(check.truth.outputs)
    assert len({check.truth.outputs[label][0].item() for label in labels}) == len(labels) == 2


def random_state():
    generators = np.random.get_state()[1].tolist(), ms.get_rng_state().asnumpy().tolist()
    return ms.get_seed(), ms.dataset.config.get_seed(), generators


@pytest.mark.parametrize("seed", [None, 3])
def test_random_states_stay_as_they_are(monkeypatch, seed):
    monkeypatch.setattr(import_module("mindspore.common.seed"), "_GLOBAL_SEED", seed)
    net = cell_of(lambda self, x: self.inner(x) * ops.randn_like(x), inner=nn.Dense(4, 4))
    before = random_state()
    assert not verify(net, DeviceMesh((2,), ("tp",)), Tensor(array(2, 4))).faults
    assert random_state() == before


def test_an_operator_that_computes_something_else_than_its_source(monkeypatch):
    monkeypatch.setitem(registry._FACTS, "SiLU", replace(registry._FACTS["SiLU"], source="ops.relu(input)"))
    operator_source._form.cache_clear()
    net = cell_of(lambda self, x: ops.silu(self.inner(x)), inner=nn.Dense(4, 4))
    try:
        check = verify(net, DeviceMesh((2,), ("dp",)), Tensor(array(2, 4)))
    finally:
        operator_source._form.cache_clear()
    assert "a result by the model's own code; one card's is the captured program's" in check.report()


def test_what_verify_takes():
    net, mesh = cell_of(lambda self, x: self.inner(x), inner=nn.Dense(4, 4)), DeviceMesh((2,), ("dp",))
    for given, plan, text in ((4, None, "not 4"), (DeviceMesh((2,), ("dp",), (4, 5)), None, "from 0 on")):
        with pytest.raises(ValueError, match=text):
            verify(net, given, Tensor(array(2, 4)), plan=plan)
    with pytest.raises(ValueError, match="not for a function that shards it"):
        verify(lambda: net, mesh, Tensor(array(2, 4)), plan={})


RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.nightly  # daily the command below, and recipes of other tests
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_at_its_least_sizes(name):
    packing = "documents" if name == "llama_tiny_pp" else "none"
    check = verify_recipe(load_recipe(str(ROOT / "configs" / f"{name}.yaml"), [f"train_dataset.packing={packing}"]))
    assert not check.faults and check.compared > 400, check.report()


def test_the_command_compares_the_models_own_code_with_the_captured_program(capsys, monkeypatch):
    """An operator whose source is wrong computes alike on one card and on all ranks."""
    monkeypatch.setitem(registry._FACTS, "SiLU", replace(registry._FACTS["SiLU"], source="ops.relu(input)"))
    operator_source._form.cache_clear()
    command = ["verify", "--config", str(ROOT / "configs" / "llama_tiny_cpu_1p.yaml"), "model.num_hidden_layers=1"]
    try:
        assert main(command) == 1
    finally:
        operator_source._form.cache_clear()
    report = capsys.readouterr().out
    assert report.startswith("a fault: "), report
    assert "by the model's own code; one card's is the captured program's', micro-batch 0, run 0" in report, report
    assert main([*command, "model.hidden_size=7"]) == 2


class _Around(nn.Cell):
    """Hands all on, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Dense(6, 6), nn.Dense(6, 6)

    def construct(self, *given, **named):
        return self.last(self.first(given[0]) * given[1] + named["shift"])


def test_arguments_of_any_number():
    x = [Tensor(array(4, 6, seed=seed)) for seed in range(3)]
    check = verify(
        _Around(), DeviceMesh((2,), ("tp",)), *x[:2], shift=x[2], plan={"first": {"weight": {"bias": layout("tp")}}}
    )
    assert not check.faults and check.compared > 30, check.report()


class _Scaled(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(6, np.float32)))

    def construct(self, x):
        return ops.tanh(x * self.weight)


class _Looked(nn.Cell):
    """Its two last Cells share a program, so that the path of one of them is in none."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(array(8, 6)))
        self.one, self.two = _Scaled(), _Scaled()

    def construct(self, ids):
        return self.two(self.one(ops.gather(self.weight, ids, 0)))


def test_what_uses_a_weight_is_named(monkeypatch):
    seen = RankObserver.weight_gradient
    wrong = {"two.weight"}

    def changed(observer, parameter, gradient):
        seen(observer, parameter, gradient * (2 if observer.paths[id(parameter)] in wrong else 1))

    monkeypatch.setattr(RankObserver, "weight_gradient", changed)
    ids = Tensor(np.arange(4, dtype=np.int32))
    said = verify(_Looked(), DeviceMesh((2,), ("dp",)), ids, plan={"": {"input": layout("dp")}}).report()
    assert "weight gradient of 'two.weight'" in said and re.search(r"used by   (redistribution .*; )?Mul, ", said), said
    assert "Gather" not in said
