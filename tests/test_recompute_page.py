"""The code and the recipe of docs/recompute.md."""

import re
from pathlib import Path

import pytest
import yaml
from test_recipe import TINY

from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.trainer.recipe_loader import load_recipe

pytestmark = pytest.mark.usefixtures("one_rank")
TEXT = (Path(__file__).parents[1] / "docs" / "recompute.md").read_text(encoding="utf-8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[1]


def test_the_code_of_the_page_runs(capsys):
    exec(compile(block("python"), "docs/recompute.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "model.layers.0.self_attn.weights" in printed
    assert "computed again: model.layers.0-2.self_attn.weights" in printed
    assert "computed again: model.layers.1-2.mlp.Mul" in printed


def test_the_recipes_of_the_page_are_some(tmp_path):
    path = tmp_path / "recipe.yaml"
    sections = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    path.write_text("\n".join([Path(TINY).read_text(encoding="utf-8"), *sections]), encoding="utf-8")
    recipe = load_recipe(path, ["parallelism.zero_level=3", "recompute.full=null"])
    given = yaml.safe_load("".join(sections))
    assert recipe.recompute == RecomputeSettings(**{**given["recompute"], "full": None})
    assert recipe.swap == SwapSettings(**given["swap"]) and recipe.swap.is_on
