"""Optimizers by name and import path: against NumPy, on parts against the whole, in groups, and in recipes."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore import Tensor, nn, ops
from support.launch import ROOT
from support.nightly import daily
from support.small_zero import both_modes
from test_training_loop import ONE_RANK, SMALL

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.commands.dry_run import dry_run
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.communication import world
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import OPTIMIZERS, AdamWSettings, ParameterGroup, Placed, placed_lines
from mindformers_core.recipe.learning_rate import learning_rate
from mindformers_core.recipe.loader import load_recipe, recipe_from_dict, recipe_to_yaml
from mindformers_core.tensor_parallel import jit

STEPS = 3
pytestmark = pytest.mark.usefixtures("examples")
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


class Plain:
    """No Cell."""

    def __init__(self, parameters):
        self.parameters = parameters


def halved(step, steps, first=1.0, low: float = 0.0):
    """A user's schedule."""
    return max(low, first * 0.5 ** (step / steps))


@dataclasses.dataclass(frozen=True)
class Steps:
    """A user's schedule with a state of settings."""

    rates: tuple[float, ...] = (0.1, 0.2)

    def __call__(self, step):
        return self.rates[min(step, len(self.rates)) - 1]


@pytest.fixture
def examples(monkeypatch):
    """`own_optimizer` can be imported."""
    monkeypatch.syspath_prepend(ROOT / "examples")


def drawn(seed=0):
    """Weights, and the gradients of every step."""
    draw = np.random.default_rng(seed)
    return [{name: draw.normal(size=s).astype(np.float32) for name, s in SHAPES.items()} for _ in range(1 + STEPS)]


def made(values, layouts=None):
    """This rank's parts as Parameters."""
    parameters = []
    for name, value in values.items():
        mine = value if layouts is None else value[layouts[name].local_slices(value.shape, world().rank)]
        parameters.append(ms.Parameter(Tensor(np.ascontiguousarray(mine)), name=name))
        if layouts is not None:
            parameters[-1].layout, parameters[-1].global_shape = layouts[name], value.shape
    return parameters


def trained(settings, layouts=None, compiled=False):
    """The parameters after all steps, by name."""
    values, *gradients = drawn()
    optimizer = GroupedOptimizer(made(values, layouts), settings)
    run = jit(optimizer.construct) if compiled else optimizer
    for number, each in enumerate(gradients, 1):
        mine = tuple(Tensor(parameter) for parameter in made(each, layouts))
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
            step, rate = rate * 0.01 * norms[0] / (norms[1] + decay * norms[0]) * step, 1.0
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


@both_modes
@pytest.mark.parametrize("kind", BY_MOMENTUM)
def test_steps_are_the_papers(kind, compiled):
    """Of two groups with rates and decays of their own; Momentum of MindSpore's is SGD."""
    given = BY_MOMENTUM[kind]
    found = trained(settings(kind.strip(), weight_decay=0.1, **given), compiled=compiled)
    for name, value in found.items():
        expected = reference(kind, name, nesterov=given.get("nesterov", False))
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=name)


@both_modes
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
    f"{{type: 'own_optimizer:Lion', betas: [0.8, 0.99], groups: [{FIRST}]}}": "pp 2",
}
NIGHTLY = {
    "{type: Muon, groups: [{parameters: '*.q_proj.*', learning_rate_factor: 0.5}]}": "dp 2, tp 2, level 3",
    "{type: LARS, trust: 0.1}": "dp 2, tp 2, level 3",
}


@pytest.mark.parametrize("optimizer", daily(JOBS, JOBS | NIGHTLY))
def test_a_job_on_a_mesh_is_that_of_one_card(optimizer):
    """Its losses, norms and weights; with frozen layers, which stay as they were, also all of a stage's."""
    given = f"optimizer={optimizer}", "model.num_hidden_layers=2"
    numbers, wholes = finished(*given)
    found, weights = finished(*given, *MESHES[(JOBS | NIGHTLY)[optimizer]])
    np.testing.assert_allclose(found, numbers, rtol=1e-5)
    assert len(found[0]) == 2 + len(KINDS) and found[0][-1]
    _, begun = finished(*given, steps=0)
    section = load_recipe(ONE_RANK, given[:1]).optimizer
    for name, whole in wholes.items():
        np.testing.assert_allclose(weights[name], whole, rtol=1e-4, atol=1e-5, err_msg=name)
        assert np.array_equal(whole, begun[name]) == section.placed(name, whole.ndim).frozen, name


def test_what_decays():
    """Tensors of two dims; what later groups say comes before, key by key."""
    section = AdamWSettings()
    assert section.placed("w", 2) == Placed(1.0, 0.01) and section.placed("ln1.gamma", 1) == Placed()
    assert dataclasses.replace(section, weight_decay_vectors=True).placed("ln1.gamma", 1).decay == 0.01
    groups = ParameterGroup(("a.*",), 0.5, 0.2), ParameterGroup(("*.w",), frozen=True), ParameterGroup(("*.1.w",), 2.0)
    section = dataclasses.replace(section, groups=groups)
    names = "a.0.w", "a.1.w", "a.2.norm", "b"
    placed = {name: section.placed(name, 2) for name in names}
    assert placed["a.1.w"] == Placed(2.0, 0.2, True)
    assert placed_lines(placed, section) == [
        "decay 0.01  1 weights: b", "no decay    0 weights: ", "frozen      2 weights: a.*.w",
        "decay 0.2   1 weights, rate x 0.5: a.*.norm",
    ]  # fmt: skip


def test_settings_of_a_users_class():
    """Keywords of the constructor, or a dataclass with ranges and a check of its own; they come back from YAML."""
    lion = settings("own_optimizer:Lion", betas=[0.5, 0.6], weight_decay=0.1)
    assert (lion.betas, lion.placed("x", 2).decay, lion.placed("x", 1).decay) == ((0.5, 0.6), 0.1, 0.0)
    assert not hasattr(settings("test_optimizers:Sign"), "weight_decay")
    recipe = load_recipe(ONE_RANK, ["optimizer={type: 'test_optimizers:Sign', inner: true}"])
    assert recipe_from_dict(yaml.safe_load(recipe_to_yaml(recipe))).optimizer.inner is True
    for given, error in (
        ({"limit": 3.0}, "optimizer.limit: 3.0 should be greater than 0.0 and at most 2.0"),
        ({"limit": 2.0, "inner": True}, "optimizer.inner: true needs a limit below 2"),
        ({"limits": 2.0}, r"optimizer.limits: unknown key \(did you mean 'limit'\?\); .*: docs/optimizers.md"),
    ):
        with pytest.raises(ValueError, match=error):
            settings("test_optimizers:Sign", **given)
    for kind, error in (
        ("test_optimizers:Plain", "optimizer.type: test_optimizers:Plain: .* is no class of Cells"),
        ("mindspore.experimental.optim:Adam", "keep their rates on the host: name one of mindspore.nn"),
    ):
        with pytest.raises(TypeError, match=error):
            GroupedOptimizer(made(drawn()[0]), settings(kind))
    with pytest.raises(ValueError, match=r"groups\[0\].weight_decay: test_optimizers:Plain takes no weight_decay"):
        load_recipe(ONE_RANK, ["optimizer={type: 'test_optimizers:Plain', groups: [{parameters: a, weight_decay: 1}]}"])


def rates(schedule, *steps):
    recipe = load_recipe(ONE_RANK, [f"lr_scheduler={schedule}", "training.steps=100"])
    return [learning_rate(recipe, step) for step in steps]


def test_learning_rates():
    stable = "{type: WarmUpStableDecayLR, learning_rate: 1.0, lr_end: 0.2, warmup_steps: 10, decay_start_ratio: 0.8}"
    assert rates(stable, 5, 10, 80, 90, 100) == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2])
    root = "{type: InverseSquareRootLR, learning_rate: 1.0, lr_end: 0.4, warmup_steps: 16}"
    assert rates(root, 8, 16, 64, 100) == pytest.approx([0.5, 1.0, 0.5, 0.4])
    assert rates("{type: InverseSquareRootLR, learning_rate: 1.0}", 1, 4) == pytest.approx([1.0, 0.5])
    assert rates("{type: 'test_optimizers:halved', first: 3}", 100) == [1.5]
    assert rates("{type: 'test_optimizers:Steps', rates: [1, 2, 3]}", 1, 9) == [1.0, 3.0]
    with pytest.raises(ValueError, match=r"lr_scheduler.low: unknown key|lr_scheduler.lower: unknown key .*'low'"):
        rates("{type: 'test_optimizers:halved', lower: 3}", 1)
    with pytest.raises(ValueError, match=r"lr_scheduler.low: 'x' \(str\) should be a number"):
        rates("{type: 'test_optimizers:halved', low: x}", 1)
    with pytest.raises(ValueError, match="test_optimizers:halved gave -1.5 at step 100: it should be from 0 up"):
        rates("{type: 'test_optimizers:halved', first: -3, low: -9}", 100)


def test_a_pattern_that_matches_nothing():
    for key, given in (
        (
            r"optimizer.groups\[0\].parameters\[1\]",
            "optimizer.groups=[{parameters: ['*norm*', '*.mpl.*'], frozen: true}]",
        ),
        (r"monitor.gradient_norms\[0\]", "monitor.gradient_norms='*.mpl.*'"),
    ):
        with pytest.raises(ValueError, match=rf"{key}: '\*.mpl.\*' matches no parameter"):
            dry_run(load_recipe(ONE_RANK, [given]))


@pytest.mark.parametrize(
    "kind", daily(["test_optimizers:Normed"], ["Muon", "own_optimizer:Lion", "test_optimizers:Normed"])
)
def test_verify_compares_updates_with_those_of_one_card(kind):
    given = "parallelism.tensor_parallel=2", f"optimizer={{type: '{kind}', groups: [{FIRST}]}}"
    check = verify_recipe(load_recipe(ONE_RANK, [*SMALL, *given, "model.num_hidden_layers=2"]), full=True)
    assert bool(check.faults) == ("Normed" in kind), check.report()
    if check.faults:
        assert "update by test_optimizers:Normed of 'model.layers.1." in check.report()
