"""Optimizers by name and import path: against NumPy, on parts against the whole, in groups, and in recipes."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.launch import ROOT
from support.nightly import daily
from test_training_loop import ONE_RANK, SMALL

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.communication import world
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import OPTIMIZERS
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.tensor_parallel import jit
from mindformers_core.trainer.trainer import Trainer

STEPS = 3
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("examples")]
SHAPES = {"embed_tokens": (8, 4), "tall": (8, 4), "wide": (4, 8), "norm": (4,), "cube": (2, 4, 4)}


@dataclasses.dataclass(frozen=True)
class SignSettings:
    """Of `Sign`."""

    limit: float = dataclasses.field(default=1.0, metadata={"above": 0.0, "at_most": 2.0})
    inner: bool = False

    def __post_init__(self):
        if self.inner and self.limit == 2.0:
            raise ValueError("inner: true needs a limit below 2")


class Sign(nn.Cell):
    """A user's optimizer without `scalars`, a dataclass of settings, and a list of states."""

    settings_class = SignSettings

    def __init__(self, parameters, limit, inner):
        super().__init__()
        self.weights, self.limit = ms.ParameterTuple(parameters), limit
        self.seen = [ms.Parameter(ops.zeros(p.shape, ms.float32), name=f"seen.{p.name}") for p in parameters]

    def construct(self, gradients, rate):
        for index, gradient in enumerate(gradients):
            ops.assign_add(self.seen[index], gradient)
            ops.assign(self.weights[index], self.weights[index] - rate * self.limit * ops.sign(gradient))


class Normed(nn.Cell):
    """Steps of length one: of parts, which is wrong."""

    def __init__(self, parameters):
        super().__init__()
        self.weights = ms.ParameterTuple(parameters)

    def construct(self, gradients, rate):
        for weight, gradient in zip(self.weights, gradients):
            ops.assign(weight, weight - rate * gradient / ops.norm(gradient))


@pytest.fixture
def examples(monkeypatch):
    """`own_optimizer` can be imported."""
    monkeypatch.syspath_prepend(ROOT / "examples")


def drawn(seed=0):
    """Weights, and the gradients of every step."""
    draw = np.random.default_rng(seed)
    return [{name: draw.normal(size=s).astype(np.float32) for name, s in SHAPES.items()} for _ in range(1 + STEPS)]


def made(values, layouts=None, dtype=np.float32):
    """This rank's parts as Parameters."""
    parameters = []
    for name, value in values.items():
        mine = value if layouts is None else value[layouts[name].local_slices(value.shape, world().rank)]
        parameters.append(ms.Parameter(Tensor(np.ascontiguousarray(mine, dtype)), name=name))
        if layouts is not None:
            parameters[-1].layout, parameters[-1].global_shape = layouts[name], value.shape
    return parameters


def trained(settings, layouts=None, compiled=False, dtype=np.float32):
    """The parameters after all steps, by name."""
    values, *gradients = drawn()
    optimizer = GroupedOptimizer(made(values, layouts, dtype), settings)
    run = jit(optimizer.construct) if compiled else optimizer
    for number, each in enumerate(gradients, 1):
        mine = tuple(Tensor(parameter) for parameter in made(each, layouts, dtype))
        run(mine, *optimizer.scalars(number, 0.1 / number))
    return {parameter.name: parameter.asnumpy() for parameter in optimizer.parameters}


def settings(kind, **keywords):
    """The settings of a name or an import path, as a recipe gives them."""
    groups = [{"parameters": ["tall", "*norm"], "learning_rate_factor": 0.5}]
    groups[0] |= {"weight_decay": 0.3} if "weight_decay" in keywords else {}
    section = {"type": kind, "groups": groups, **keywords}
    return load_recipe(ONE_RANK, [f"optimizer={section}".replace("True", "true")]).optimizer


def reference(kind, name, momentum=0.9, nesterov=False):
    """A parameter after all steps, in float64; weight decay 0.1, none for vectors, and 0.3 with half the rate."""
    weight, *gradients = (each[name].astype(np.float64) for each in drawn())
    moment, of_group = 0.0, name in ("tall", "norm")
    decay = 0.3 if of_group else 0.1
    for number, gradient in enumerate(gradients, 1):
        rate = 0.1 / number * (0.5 if of_group else 1.0)
        step = gradient + decay * weight
        if kind == "LARS":
            norms = np.linalg.norm(weight), np.linalg.norm(gradient)
            step = 0.01 * norms[0] / (norms[1] + decay * norms[0]) * step
        moment = momentum * moment + step
        weight = weight - rate * (step + momentum * moment if nesterov else moment)
    return weight


def of_muon(name):
    """A matrix after all steps of Muon with Nesterov's momentum 0.95, in float64."""
    weight, *gradients = (each[name].astype(np.float64) for each in drawn())
    moment, (half, decay) = 0.0, (0.5, 0.3) if name == "tall" else (1.0, 0.1)
    for number, gradient in enumerate(gradients, 1):
        moment = 0.95 * moment + gradient
        x = gradient + 0.95 * moment
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x.T @ x  # of the other side: the same polynomial of the singular values
            x = 3.4445 * x + x @ (2.0315 * gram @ gram - 4.7750 * gram)
        weight = weight - 0.1 / number * half * (0.3 * np.sqrt(8) * x + decay * weight)
    return weight


BY_MOMENTUM = {
    "SGD": {"momentum": 0.9}, "SGD ": {"momentum": 0.9, "nesterov": True}, "LARS": {"trust": 0.01},
    "mindspore.nn:Momentum": {"momentum": 0.9},
}  # fmt: skip


# compiled LARS and Muon run at night on ranks: tests/ranks/case_zero_training.py
RARE = ("LARS", True), ("SGD", True), ("mindspore.nn:Momentum", True)
BOTH_MODES = [(kind, compiled) for kind in BY_MOMENTUM for compiled in (False, True)]


@pytest.mark.parametrize(("kind", "compiled"), daily([each for each in BOTH_MODES if each not in RARE], BOTH_MODES))
def test_steps_are_the_papers(kind, compiled):
    """Of two groups with rates and decays of their own; Momentum of MindSpore's is SGD."""
    given = BY_MOMENTUM[kind]
    found = trained(settings(kind.strip(), weight_decay=0.1, **given), compiled=compiled)
    for name, value in found.items():
        expected = reference(kind, name, nesterov=given.get("nesterov", False))
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("compiled", daily([False], [False, True]))
def test_muon_is_the_papers(compiled):
    """Of matrices; others are AdamW's, whose mean square is about that of Muon's."""
    found = trained(settings("Muon", weight_decay=0.1, rms=0.3), compiled=compiled)
    for name, value in trained(settings("AdamW", weight_decay=0.1)).items():
        expected = of_muon(name) if name in ("tall", "wide") else value
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


AXES = {  # of the cut dims
    "embed_tokens": (("dp",), ("tp",)), "tall": (("tp", "dp"), ()), "wide": (("dp",), ("tp",)), "norm": ((),),
    "cube": ((), ("tp",), ("dp",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "test_optimizers:Sign"])
def test_parts_are_updated_as_the_whole(kind):
    section = settings(kind, weight_decay=0.1) if kind in OPTIMIZERS else settings(kind, limit=0.5)
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    layouts = {name: Layout.on(mesh, dims) for name, dims in AXES.items()}
    whole = trained(section)
    for rank, parts in enumerate(SimulatedRanks(4).run(lambda _: trained(section, layouts))):
        for name, part in parts.items():
            mine = whole[name][layouts[name].local_slices(SHAPES[name], rank)]
            np.testing.assert_allclose(part, mine, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "own_optimizer:Lion"])
def test_weights_in_half_precision_stay_so(kind):
    section = settings(kind, weight_decay=0.1)
    found, expected = trained(section, dtype=np.float16), trained(section)
    for name, value in found.items():
        assert value.dtype == np.float16
        np.testing.assert_allclose(value, expected[name], atol=5e-3, err_msg=name)


def finished(*overrides, steps=STEPS):
    """The losses and norms of gradients, and the whole weights, after some steps on simulated ranks."""
    jobs = []
    given = *SMALL, "lr_scheduler={type: ConstantWarmUpLR, learning_rate: 0.01}", f"monitor.gradient_norms={KINDS}"
    recipe = load_recipe(ONE_RANK, [*given, *overrides])
    rows = run_simulated(recipe, steps, jobs.append)
    wholes = {}
    for job in jobs:
        for parameter in (each for net in job.cells.values() for _, each in net.parameters_and_names()):
            whole = wholes.setdefault(parameter.name, np.full(parameter.global_shape, np.nan))
            whole[parameter.layout.local_slices(whole.shape, job.rank)] = parameter.asnumpy()
    return [[value for name, value in row.items() if name == "loss" or "norm" in name] for row in rows[0]], wholes


KINDS = ["*embed*", "*norm*", "*.layers.1.*", "*_proj.weight"]
MESHES = {
    "pp 2": ("parallelism.pipeline_parallel=2", "parallelism.pipeline_parallel_microbatch_size=2"),
    "dp 2, tp 2, level 3": (
        "parallelism.data_parallel_shard=2", "parallelism.tensor_parallel=2", "parallelism.zero_level=3",
        "parallelism.zero_threshold_kb=0", "training.local_batch_size=2",
    ),
}  # fmt: skip
FROZEN = "{parameters: ['*.mlp.*', '*.layers.0.*'], frozen: true}, {parameters: '*.o_proj.*', frozen: false}"
FIRST = "{parameters: ['*.layers.0.*', '*embed*'], frozen: true}"  # all of the first stage
JOBS = {
    f"{{type: Muon, groups: [{FROZEN}]}}": "pp 2",
}
NIGHTLY = {
    f"{{type: 'own_optimizer:Lion', betas: [0.8, 0.99], groups: [{FIRST}]}}": "pp 2",
    "{type: Muon, groups: [{parameters: '*.q_proj.*', learning_rate_factor: 0.5}]}": "dp 2, tp 2, level 3",
    "{type: LARS, trust: 0.1}": "dp 2, tp 2, level 3",
}


@pytest.mark.parametrize("optimizer", daily(JOBS, JOBS | NIGHTLY))
def test_a_job_on_a_mesh_is_that_of_one_card(optimizer):
    """Its losses, norms and weights; with frozen layers, which stay as they were, also all of a stage's."""
    given = f"optimizer={optimizer}", "model.num_hidden_layers=2", "model.tie_word_embeddings=true"
    numbers, wholes = finished(*given)
    found, weights = finished(*given, *MESHES[(JOBS | NIGHTLY)[optimizer]])
    np.testing.assert_allclose(found, numbers, rtol=1e-5)
    assert len(found[0]) == 2 + len(KINDS) and found[0][-1]
    _, begun = finished(*given, steps=0)
    section = load_recipe(ONE_RANK, given[:1]).optimizer
    for name, whole in wholes.items():
        np.testing.assert_allclose(weights[name], whole, rtol=1e-4, atol=1e-5, err_msg=name)
        assert np.array_equal(whole, begun[name]) == bool(section.placed(name, whole.ndim).frozen), name


@pytest.mark.parametrize(
    "kind", daily(["test_optimizers:Normed"], ["Muon", "own_optimizer:Lion", "test_optimizers:Normed"])
)
def test_verify_compares_updates_with_those_of_one_card(kind):
    given = "parallelism.tensor_parallel=2", f"optimizer={{type: '{kind}', groups: [{FIRST}]}}"
    check = verify_recipe(load_recipe(ONE_RANK, [*SMALL, *given, "model.num_hidden_layers=2"]), full=True)
    assert bool(check.faults) == ("Normed" in kind), check.report()
    if check.faults:
        assert "update by test_optimizers:Normed of 'model.layers.1." in check.report()


STATES = ["'own_optimizer:Lion'", "'mindspore.nn:Momentum', momentum: 0.9", "Muon", "Lamb, weight_decay: 0.1"]


@pytest.mark.parametrize("kind", daily(STATES[1:2], STATES))
def test_a_state_goes_on_where_it_was(kind, tmp_path):
    """On two stages, of which the first is frozen: those of one card have its state, also the number of steps."""
    saving = f"checkpoint.enable_save=true\ncheckpoint.save_interleaved_steps=2\ntraining.output_dir={tmp_path}".split()
    given = [
        *SMALL,
        f"optimizer={{type: {kind}, groups: [{FIRST}]}}",
        "model.num_hidden_layers=2",
        *MESHES["pp 2"],
        "training.steps=4",
    ]
    one = [*given, "parallelism.pipeline_parallel=1"]
    rows = list(Trainer(load_recipe(ONE_RANK, [*one, *saving])).steps())
    resumed = load_recipe(ONE_RANK, [*given, f"checkpoint.load_path={tmp_path}/checkpoint/step_2"])
    for row, expected in zip(run_simulated(resumed, 2)[0], rows[2:], strict=True):
        for key in ("loss", "gradient_norm"):
            np.testing.assert_allclose(row[key], expected[key], rtol=1e-5)
