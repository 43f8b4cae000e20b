"""Faults planted into a running mesh: `diff` names the operator, or the redistribution before it."""

import mindspore as ms
import numpy as np
import pytest
from support.diff_runs import DP, PP, TP, ZERO3, Planted, at_one_place, coarse, recorded, rolled, scaled, stale
from support.nightly import daily

from mindformers_core.communication import world
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.diff.parting import part
from mindformers_core.diff.report import report
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.program.observer import Instrumentation
from mindformers_core.zero.gradient_reducer import GradientReducer

LAYER = "model.layers.1"
MLP, ATTENTION, NORM = f"{LAYER}.mlp", f"{LAYER}.self_attn", f"{LAYER}.input_layernorm"
CORE = f"{ATTENTION}.core_attention"


def _changed_weight(name, change, ranks=None):
    """Change a parameter before the first step."""

    def prepare(job):
        for parameter in job.optimizer.parameters:
            if parameter.name == name and (ranks is None or job.rank in ranks):
                ms.ops.assign(parameter, change(parameter))

    return prepare


def _other_data(change, ranks=None):
    """Change what the dataset gives a rank."""

    class Changed:
        def __init__(self, dataset):
            self.dataset = dataset

        def batch(self, first, count):
            return change(self.dataset, first, count)

    def prepare(job):
        if ranks is None or job.rank in ranks:
            job.dataset = Changed(job.dataset)

    return prepare


def _swapped_micro_batches(dataset, first, count):
    return dataset.batch(first ^ 4, count)


def _shifted_labels(dataset, first, count):
    ids, labels = dataset.batch(first, count)
    return ids, np.roll(labels, 1, 1)


def _other_decay(monkeypatch):
    """The update takes another decay of the second moment than its scalars."""
    construct = AdamW.construct

    def changed(optimizer, *arguments):
        betas, optimizer.betas = optimizer.betas, (optimizer.betas[0], 0.96)
        construct(optimizer, *arguments)
        optimizer.betas = betas

    monkeypatch.setattr(AdamW, "construct", changed)


def _no_decay(job):
    for member in job.optimizer.members:
        member.weight_decay = 0.0


def _reduced(change):
    """Change the reduced gradients of a rank."""

    def enter(monkeypatch):
        finish = GradientReducer.finish
        monkeypatch.setattr(GradientReducer, "finish", lambda reducer, scale: change(finish(reducer, scale)))

    return enter


def _dropped_micro_step(monkeypatch):
    """The gradients of every second micro-step are lost."""
    take, calls = GradientReducer.take, []

    def lossy(reducer, gradients):
        calls.append(None)
        return take(reducer, [each * (len(calls) % 2) for each in gradients])

    monkeypatch.setattr(GradientReducer, "take", lossy)


def _stuck_parameter(monkeypatch):
    """The update of the first parameter is lost."""
    construct = AdamW.construct

    def lossy(optimizer, gradients, *scalars):
        before = optimizer.parameters[0].asnumpy().copy()
        construct(optimizer, gradients, *scalars)
        ms.ops.assign(optimizer.parameters[0], ms.Tensor(before))

    monkeypatch.setattr(AdamW, "construct", lossy)


def _garbled_message(monkeypatch):
    """The first message between stages comes with a dim in the wrong order."""
    receive = SimulatedRanks.receive

    def garbled(ranks, rank, from_rank):
        head, arrays = receive(ranks, rank, from_rank)
        return head, [np.roll(array, 1, 0) if array.ndim == 3 and rank == 1 else array for array in arrays]

    monkeypatch.setattr(SimulatedRanks, "receive", garbled)


def _wrong_norm(job):
    job.run_step = _with_step(job.run_step)


def _with_step(run_step):
    return lambda arrays, scalars, *others: run_step(arrays, tuple(each * 1.01 for each in scalars), *others)


def _stale_constant(monkeypatch):
    """One rank has the rotary table of other positions."""
    loaded = Instrumentation.loaded

    def changed(given, module, source):
        loaded(given, module, source)
        if world().rank == 1:
            module.constant_1 = rolled(0)(module.constant_1)

    monkeypatch.setattr(Instrumentation, "loaded", changed)


# name -> (overrides of the mesh, the fault, what differs first: kind, Cell or parameter, operator)
FAULTS = {
    "a kernel with a wrong factor": (TP, Planted(MLP, "silu", scaled(1.001)), ("value", MLP, "SiLU")),
    "one element wrong on one rank": (TP, Planted(MLP, "silu", at_one_place(1e-3), (1,)), ("value", MLP, "SiLU")),
    "a kernel in half precision": (TP, Planted(MLP, "silu", coarse, (0,)), ("value", MLP, "SiLU")),
    "heads in the wrong order": (TP, Planted(CORE, "attention", rolled(1), (1,)), ("value", CORE, "Attention")),
    "a turned sign": (TP, Planted(ATTENTION, "rotary", scaled(-1.0)), ("value", ATTENTION, "Rotary")),
    "a dropped residual": (
        TP, Planted(LAYER, "add = add_op(hidden_states_2, mlp)", source="mlp"), ("value", LAYER, "Add"),
    ),
    "a stale buffer": (TP, Planted(NORM, "rms_norm_2", stale()), ("value", NORM, "RMSNorm")),
    "a stale rotary table": (TP, _stale_constant, ("value", "model.layers.0.self_attn", "Rotary")),
    "a value that is not a number": (TP, Planted(MLP, "mul", at_one_place(np.nan), (1,)), ("value", MLP, "Mul")),
    "a missing all-reduce": (
        TP, Planted(f"{MLP}.down_proj", "y_sum", source="y"), ("moved", f"{MLP}.down_proj", "Dense"),
    ),
    "an all-reduce wrong on one rank": (
        TP, Planted(f"{ATTENTION}.o_proj", "y_sum", rolled(0), (1,)), ("moved", f"{ATTENTION}.o_proj", "Dense"),
    ),
    "an all-reduce summed twice": (
        TP, Planted("model.embed_tokens", "gather_11_sum", scaled(2.0)), ("moved", "model.embed_tokens", "Gather"),
    ),
    "a wrong term of a loss": (TP, Planted("loss", "sum_", at_one_place(0.1), (0,)), ("value", "loss", "SumExt")),
    "a backward kernel with a wrong factor": (
        TP, Planted(MLP, "silu", scaled(1.001), backward=True), ("gradient", f"{MLP}.gate_proj", "Dense"),
    ),
    "a gradient lost on one rank": (
        TP, Planted(CORE, "attention", scaled(0.0), (1,), backward=True), ("gradient", ATTENTION, "Rotary"),
    ),
    "a missing reduction of a gradient": (
        TP, Planted(LAYER, "normed_marked", source="normed"), ("gradient", NORM, "RMSNorm"),
    ),
    "a gradient reduced twice": (
        TP, Planted(LAYER, "normed_2_marked", scaled(2.0), backward=True),
        ("gradient", f"{LAYER}.post_attention_layernorm", "RMSNorm"),
    ),
    "one rank's copy of a weight": (
        DP, _changed_weight("model.norm.weight", scaled(1.0001), (1,)), ("value", "model.norm.weight", "parameter"),
    ),
    "one rank's shard of a weight": (
        TP, _changed_weight(f"{ATTENTION}.q_proj.weight", at_one_place(1e-4), (1,)),
        ("value", f"{ATTENTION}.q_proj.weight", "parameter"),
    ),
    "a shard before it is gathered": (
        ZERO3, _changed_weight(f"{MLP}.up_proj.weight", rolled(0), (1,)),
        ("value", f"{MLP}.up_proj.weight", "parameter"),
    ),
    "a weight drawn from another seed": (
        DP, _changed_weight("lm_head.weight", lambda weight: weight[::-1].copy()),
        ("value", "lm_head.weight", "parameter"),
    ),
    "micro-batches swapped on one rank": (
        DP, _other_data(_swapped_micro_batches, (1,)), ("value", "input input_ids.0", "input"),
    ),
    "shifted labels": (DP, _other_data(_shifted_labels), ("value", "input labels.0", "input")),
    "gradients that aren't averaged": (
        DP, _reduced(lambda gradients: tuple(each * 2 for each in gradients)),
        ("reduced gradient", "model.embed_tokens.weight", "parameter"),
    ),
    "gradients of a lost micro-step": (
        DP, _dropped_micro_step, ("reduced gradient", "model.embed_tokens.weight", "parameter"),
    ),
    "another decay of the second moment": (
        ZERO3, _other_decay, ("moment 2", "model.embed_tokens.weight", "parameter"),
    ),
    "no weight decay": (ZERO3, _no_decay, ("scalar 2 at decay 0.1, rate",) * 3),
    "a lost update": (TP, _stuck_parameter, ("parameter", "model.embed_tokens.weight", "parameter")),
    "another learning rate": (DP, _wrong_norm, ("rate", "rate", "rate")),
    "a message between stages": (PP, _garbled_message, ("value", NORM, "RMSNorm")),
}  # fmt: skip


@pytest.fixture(scope="module")
def one_card(tmp_path_factory):
    """One card's run, and the same perturbed."""
    folder = tmp_path_factory.mktemp("one_card")
    return recorded(folder / "a"), recorded(folder / "perturbed", ["monitor.perturb=1"])


def _found(parting):
    key = parting.first.key
    about = parting.facts[key[2]]
    name = about["cell"] if "#" in key[2] else key[2].removeprefix("parameter ")
    return "moved" if parting.first.copy.moved else key[0], name, about["operator"]


@pytest.mark.parametrize("planted", daily(list(FAULTS)[::16], FAULTS))
def test_planted_fault(planted, one_card, tmp_path, monkeypatch):
    overrides, fault, expected = FAULTS[planted]
    run, perturbed = one_card
    prepare = fault if getattr(fault, "__name__", "") in ("prepare", "_no_decay", "_wrong_norm") else None
    if prepare is None:
        getattr(fault, "enter", fault)(monkeypatch)
    other = recorded(tmp_path, overrides, prepare=prepare)
    for noise in ((run, perturbed), None):
        found = part(run, other, noise)
        assert found.first is not None, report(found)
        kind, name, operator = _found(found)
        assert kind == expected[0] and operator in expected[2].split(" | "), report(found)
        assert name == expected[1], report(found)
        assert len(report(found).splitlines()) <= 20


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_planted_fault_in_a_pipeline_with_tensor_parallel_and_zero(dtype, tmp_path, monkeypatch):
    dtype = f"model.dtype={dtype}"
    mesh = (*PP[:1], *ZERO3, *TP, "parallelism.pipeline_parallel_microbatch_size=2", dtype)
    run = recorded(tmp_path / "a", [dtype])
    perturbed = recorded(tmp_path / "perturbed", ["monitor.perturb=1", dtype])
    assert part(run, recorded(tmp_path / "clean", mesh), (run, perturbed)).first is None
    Planted(MLP, "silu", scaled(1.1), (7,)).enter(monkeypatch)
    found = part(run, recorded(tmp_path / "b", mesh), (run, perturbed))
    assert _found(found) == ("value", MLP, "SiLU"), report(found)
    assert set(found.first.copy.terms) == {4, 5, 6, 7}  # the second stage, whose ranks hold the tensor together
