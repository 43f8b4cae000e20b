"""The code and the recipe of docs/recompute.md; what it shows is what the tools say today."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from support.launch import ROOT
from test_recipe import TINY

from mindformers_core.commands.dry_run import dry_run
from mindformers_core.communication import shutdown
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings

sys.path.insert(0, str(ROOT / "docs"))
from make_recompute import IMAGES, PAGE, blocks  # noqa: E402
from page_blocks import filled  # noqa: E402

TEXT = PAGE.read_text(encoding="utf-8")


def examples(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_page_and_its_picture_are_up_to_date(tmp_path):
    shutdown()
    assert filled(TEXT, blocks(tmp_path)) == TEXT, "run python docs/make_recompute.py"
    (picture,) = tmp_path.iterdir()
    assert f"(images/{picture.name})" in TEXT
    assert picture.read_bytes() == (IMAGES / picture.name).read_bytes(), "run python docs/make_recompute.py"


@pytest.mark.usefixtures("one_rank")
def test_the_code_of_the_page_runs(capsys):
    names = {}
    first, *_, of_swap = examples("python")
    for example in (first, of_swap):
        exec(compile(example, "docs/recompute.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "model.layers.0.self_attn.core_attention.weights" in printed
    assert (
        "  model.layers.0-2.self_attn.core_attention: query, key, value, MatMul[0], scores, Add, weights\n" in printed
    )
    assert "  model.layers.1-2.mlp: Mul\n" in printed
    assert re.search(r"= Softmax\(.*\[recomputed: 2.0 KiB not kept\]\n", printed)
    assert printed.endswith("\nTrue\n")  # of the example of swap()


def test_the_code_of_the_page_gives_the_same_again():
    found = []
    for _ in range(2):
        names = {}
        exec(compile(examples("python")[0], "docs/recompute.md", "exec"), names)
        found.append(names["loss"].asnumpy())
        shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [0, 1])
def test_the_recipes_of_the_page_are_some(tmp_path, place):
    """Each in the place of those sections of the tiny recipe, and as it is."""
    path, tiny = tmp_path / "recipe.yaml", yaml.safe_load(Path(TINY).read_text(encoding="utf-8"))
    given = yaml.safe_load(examples("yaml")[place])
    path.write_text(yaml.safe_dump(tiny | given), encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.recompute == RecomputeSettings(**given.get("recompute", {}))
    assert recipe.swap == SwapSettings(**given.get("swap", {}))
    shutdown()
    said = dry_run(recipe)
    assert ("run again; " in said) == ("recompute" in given) and ("wait on the host" in said) == ("swap" in given)
