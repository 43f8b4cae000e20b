"""Settings of optimizers, groups of parameters and learning rates, by name and import path."""

import dataclasses

import pytest
import yaml
from test_optimizers import drawn, examples, made, settings
from test_training_loop import ONE_RANK

from mindformers_core.commands.dry_run import dry_run
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import AdamWSettings, ParameterGroup, Placed, placed_lines
from mindformers_core.recipe.learning_rate import learning_rate
from mindformers_core.recipe.loader import load_recipe, recipe_from_dict, recipe_to_yaml

__all__ = ["examples"]
pytestmark = pytest.mark.usefixtures("examples")


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
        ("test_optimizer_settings:Plain", "optimizer.type: test_optimizer_settings:Plain: .* is no class of Cells"),
        ("mindspore.experimental.optim:Adam", "keep their rates on the host: name one of mindspore.nn"),
    ):
        with pytest.raises(TypeError, match=error):
            GroupedOptimizer(made(drawn()[0]), settings(kind))
    with pytest.raises(
        ValueError, match=r"groups\[0\].weight_decay: test_optimizer_settings:Plain takes no weight_decay"
    ):
        load_recipe(
            ONE_RANK, ["optimizer={type: 'test_optimizer_settings:Plain', groups: [{parameters: a, weight_decay: 1}]}"]
        )


def rates(schedule, *steps):
    recipe = load_recipe(ONE_RANK, [f"lr_scheduler={schedule}", "training.steps=100"])
    return [learning_rate(recipe, step, samples=8) for step in steps]


def by_tokens(step, tokens, warmup_tokens: int = 1):
    return min(1.0, step * tokens / warmup_tokens)


def test_learning_rates():
    stable = "{type: WarmUpStableDecayLR, learning_rate: 1.0, lr_end: 0.2, warmup_steps: 10, decay_start_ratio: 0.8}"
    assert rates(stable, 5, 10, 80, 90, 100, 150) == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert rates("{type: LinearWithWarmUpLR, learning_rate: 1.0}", 50, 100, 101) == pytest.approx([0.5, 0.0, 0.0])
    root = "{type: InverseSquareRootLR, learning_rate: 1.0, lr_end: 0.4, warmup_steps: 16}"
    assert rates(root, 8, 16, 64, 100) == pytest.approx([0.5, 1.0, 0.5, 0.4])
    assert rates("{type: InverseSquareRootLR, learning_rate: 1.0}", 1, 4) == pytest.approx([1.0, 0.5])
    assert rates("{type: 'test_optimizer_settings:halved', first: 3}", 100) == [1.5]
    assert rates("{type: 'test_optimizer_settings:by_tokens', warmup_tokens: 5120}", 2, 9) == [0.4, 1.0]
    assert rates("{type: 'test_optimizer_settings:Steps', rates: [1, 2, 3]}", 1, 9) == [1.0, 3.0]
    with pytest.raises(ValueError, match=r"lr_scheduler.low: unknown key|lr_scheduler.lower: unknown key .*'low'"):
        rates("{type: 'test_optimizer_settings:halved', lower: 3}", 1)
    with pytest.raises(ValueError, match=r"lr_scheduler.low: 'x' \(str\) should be a number"):
        rates("{type: 'test_optimizer_settings:halved', low: x}", 1)
    with pytest.raises(ValueError, match="halved gave -1.5 at step 100: it should be from 0 up"):
        rates("{type: 'test_optimizer_settings:halved', first: -3, low: -9}", 100)


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
