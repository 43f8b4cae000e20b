"""The code and the recipe of docs/recompute.md; what it shows is what the tools say today."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from launch import ROOT
from test_recipe import TINY

from mindformers_core.communication import shutdown
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.trainer.recipe_loader import load_recipe

sys.path.insert(0, str(ROOT / "docs"))
from make_recompute import IMAGES, PAGE, blocks  # noqa: E402
from page_blocks import filled  # noqa: E402

TEXT = PAGE.read_text(encoding="utf-8")


def block(language):
    return re.search(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)[1]


def test_the_page_and_its_picture_are_up_to_date(tmp_path):
    shutdown()
    assert filled(TEXT, blocks(tmp_path)) == TEXT, "run python docs/make_recompute.py"
    (picture,) = tmp_path.iterdir()
    assert f"(images/{picture.name})" in TEXT
    assert picture.read_bytes() == (IMAGES / picture.name).read_bytes(), "run python docs/make_recompute.py"


@pytest.mark.usefixtures("one_rank")
def test_the_code_of_the_page_runs(capsys):
    exec(compile(block("python"), "docs/recompute.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "model.layers.0.self_attn.weights" in printed
    assert "  model.layers.0-2.self_attn: weights\n" in printed
    assert "  model.layers.1-2.mlp: Mul\n" in printed
    assert re.search(r"= Softmax\(.*\[recomputed: 2.0 KiB not kept\]\n", printed)


def test_the_recipes_of_the_page_are_some(tmp_path):
    path = tmp_path / "recipe.yaml"
    sections = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    path.write_text("\n".join([Path(TINY).read_text(encoding="utf-8"), *sections]), encoding="utf-8")
    recipe = load_recipe(path, ["parallelism.zero_level=3", "recompute.full=null"])
    given = yaml.safe_load("".join(sections))
    assert recipe.recompute == RecomputeSettings(**{**given["recompute"], "full": None})
    assert recipe.swap == SwapSettings(**given["swap"]) and recipe.swap.is_on
