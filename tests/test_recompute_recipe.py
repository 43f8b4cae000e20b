"""Settings of recompute and swap, in Python and in recipes: every form that is taken; docs/recompute.md."""

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.launch import ROOT
from support.recomputed_models import INPUTS, llama, sharded
from test_recipe import CONFIGS, TINY

from mindformers_core.commands.dry_run import dry_run
from mindformers_core.communication import shutdown
from mindformers_core.mesh import DeviceMesh
from mindformers_core.recipe.loader import load_recipe, recipe_to_yaml
from mindformers_core.recipe.sections import MESH_AXES
from mindformers_core.recompute import recompute
from mindformers_core.recompute.settings import (
    DEFAULT_OP_SWAP,
    LayerSwap,
    OperatorSwap,
    RecomputeSettings,
    SwapSettings,
)
from mindformers_core.tensor_parallel import prepare
from mindformers_core.trainer.records import report_activations

sys.path.insert(0, str(ROOT / "docs"))
from make_recompute import IMAGES, PAGE, blocks  # noqa: E402
from page_blocks import filled  # noqa: E402


def swap_settings(recipe):
    return recipe.swap if recipe.swap.is_on else None


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_without_the_sections_recomputes_and_swaps_nothing(path):
    recipe = load_recipe(str(path))
    sections = yaml.safe_load(path.read_text())
    if "recompute" not in sections:
        assert recipe.recompute == RecomputeSettings() and not recipe.recompute.is_on
    if "swap" not in sections:
        assert recipe.swap == SwapSettings() and swap_settings(recipe) is None


def recipe_of(text, tmp_path, overrides=()):
    """The recipe of the tiny model with the sections of `text`."""
    path = tmp_path / "recipe.yaml"
    path.write_text((CONFIGS / "llama_tiny_cpu.yaml").read_text() + "\n" + text)
    return load_recipe(str(path), overrides)


RECOMPUTE = [  # YAML, and what it means
    ("recompute: true", RecomputeSettings(full=True)),
    ("recompute: false", None),
    ("recompute:", None),
    ("recompute: {}", None),
    ("recompute: {full: false, mp_comm_recompute: false}", None),
    ("recompute: {full: 0-2}", RecomputeSettings(full=(0, 1, 2))),
    ("recompute: {full: [0-1, 3]}", RecomputeSettings(full=(0, 1, 3))),
    ("recompute: {budget: 0.5}", RecomputeSettings(budget=0.5)),
    ("recompute: {budget: 1, exclude: ['*.cast']}", RecomputeSettings(budget=1.0, exclude=("*.cast",))),
    (
        "recompute:\n  full: [0]\n  select: [layers.1-3.mlp, 'layers.*.self_attn.softmax']\n"
        "  exclude: ['*.MatMul[1]']\n  mp_comm_recompute: false\n",
        RecomputeSettings((0,), ("layers.1-3.mlp", "layers.*.self_attn.softmax"), ("*.MatMul[1]",), False),
    ),
]
SWAP = [
    ("swap: true", SwapSettings(op_swap=[{"op_name": DEFAULT_OP_SWAP}])),
    ("swap: false", None),
    ("swap:", None),
    ("swap: {swap: true, default_prefetch: 10}",
        SwapSettings(True, 10, (), (OperatorSwap(DEFAULT_OP_SWAP, True, 10),))),
    ("swap: {swap: false, default_prefetch: 10, layer_swap: [{layers: [0]}]}", None),
    ("swap:\n  swap: true\n  layer_swap:\n    - backward_prefetch: 20\n      layers: [0,3]\n",
        SwapSettings(True, 1, (LayerSwap((0, 3), 20),))),
    (
        "swap:\n  op_swap:\n    - op_name: attention\n      backward_prefetch: 20\n      layers: [0,1,2]\n"
        "    - {op_name: attention, backward_prefetch: 10, layers: ['3']}\n",
        SwapSettings(True, 1, (), (OperatorSwap("attention", (0, 1, 2), 20), OperatorSwap("attention", (3,), 10))),
    ),
    (
        "swap:\n  default_prefetch: 2\n  op_swap:\n    '*.cast': true\n    mlp: {layers: 0-1}\n"
        "  layer_swap: [{layers: 2-3}]\n",
        SwapSettings(
            True, 2, (LayerSwap((2, 3), 2),), (OperatorSwap("*.cast", True, 2), OperatorSwap("mlp", (0, 1), 2))
        ),
    ),
]  # fmt: skip
OVERRIDES = [  # the file's section, overrides, and what they make of it together
    ("", ["recompute=true"], RecomputeSettings(full=True)),
    ("", ["recompute.full=0-1"], RecomputeSettings(full=(0, 1))),
    ("", ["recompute.full=0,3"], RecomputeSettings(full=(0, 3))),
    ("", ["recompute.select=[layers.*.mlp, '*.cast']"], RecomputeSettings(select=("layers.*.mlp", "*.cast"))),
    ("", ["recompute=true", "recompute.mp_comm_recompute=false"], RecomputeSettings(True, mp_comm_recompute=False)),
    ("recompute: true", ["recompute.full=[0]"], RecomputeSettings(full=(0,))),
    ("recompute: true", ["recompute.full=false", "recompute.budget=0.5"], RecomputeSettings(budget=0.5)),
    ("recompute: false", ["recompute.budget=0.5"], RecomputeSettings(budget=0.5)),
    ("recompute: {budget: 0.5}", ["recompute=false"], None),
]
SECTIONS = [*((text, (), meant) for text, meant in (*RECOMPUTE, *SWAP)), *OVERRIDES]


@pytest.mark.parametrize(("text", "overrides", "meant"), SECTIONS, ids=[" ".join((s[0], *s[1])) for s in SECTIONS])
def test_sections(text, overrides, meant, tmp_path):
    """Read, and read again after they were written."""
    recipe = recipe_of(text, tmp_path, overrides)
    sections = recipe.recompute, recipe.swap
    assert [section for section in sections if section.is_on] == ([] if meant is None else [meant])
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe and hash(sections)


def test_overrides_of_swap(tmp_path):
    assert swap_settings(load_recipe(TINY, ["swap=true", "swap.default_prefetch=3"])).op_swap[0].backward_prefetch == 3
    assert swap_settings(recipe_of("swap: {layer_swap: [{layers: true}]}", tmp_path, ["swap.swap=false"])) is None
    named = ["swap.op_swap={layers.*.mlp: {layers: [1]}}"]
    assert swap_settings(load_recipe(TINY, named)).op_swap == (OperatorSwap("layers.*.mlp", (1,), 1),)


@pytest.mark.parametrize("override", ["swap.op_swap.mlp=true", "swap.op_swap.mlp.layers=0-1"])
def test_a_pattern_of_one_name_can_be_a_key(override):
    assert [entry.op_name for entry in load_recipe(TINY, [override]).swap.op_swap] == ["mlp"]


@pytest.mark.parametrize(
    ("text", "better"),
    [
        ("recompute:\n  select:\n    - *.mlp", "- '*.mlp'"),
        ("recompute: {select: *.mlp}", "recompute: {select: '*.mlp'}"),
    ],
)
def test_a_bare_star_in_a_file(text, better, tmp_path):
    """The line, with the quotes that it lacks."""
    number = (CONFIGS / "llama_tiny_cpu.yaml").read_text().count("\n") + 2 + text.count("\n")
    with pytest.raises(ValueError) as caught:
        recipe_of(text, tmp_path)
    where = f"{tmp_path / 'recipe.yaml'}, line {number}"
    assert str(caught.value) == f"{where}: a text that begins with * needs quotes: write {better}"


LEVEL_3 = ["parallelism.zero_level=3"]


def test_what_can_stand_together():
    flag = "recompute.parallel_optimizer_comm_recompute=false"
    for level in ([], LEVEL_3):
        assert load_recipe(TINY, ["recompute=true", flag, *level]).recompute.is_on
    apart = load_recipe(TINY, ["recompute.full=0-1", "swap.layer_swap=[{layers: 2-3}]"])
    assert apart.recompute.is_on and swap_settings(apart) is not None
    off = load_recipe(TINY, ["recompute=true", "swap={swap: false, layer_swap: [{layers: true}]}"])
    assert swap_settings(off) is None
    for compiled in ("recompute=true", "recompute.select=layers.*.mlp", "swap={swap: false, op_swap: {a: true}}"):
        load_recipe(TINY, [compiled, "context.mode=0"])
    load_recipe(TINY, ["recompute=false", "swap=false", "context.engine=eager"])


def test_switched_off_whatever_the_flags_say():
    gathers = [{"parallel_optimizer_comm_recompute": again} for again in (True, False)]
    for flags in ({"exclude": ["a"]}, {"mp_comm_recompute": False}, *gathers):
        off = RecomputeSettings(full=False, **flags)
        assert not off.is_on and dataclasses.replace(off, select=None) == off


def test_one_form_of_recompute_settings():
    given = RecomputeSettings(full="0-2", select="layers.*.mlp", exclude=["*.cast", "x"], mp_comm_recompute=False)
    assert given == RecomputeSettings((0, 1, 2), ("layers.*.mlp",), ("*.cast", "x"), False)
    assert dataclasses.replace(given, select=None).select == ()
    hash(given)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (None, None),
        (False, False),
        (True, True),
        ("0-7", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0,3,5-7", (0, 3, 5, 6, 7)),
        ([0, 3], (0, 3)),
        (["5-7", 0], (0, 5, 6, 7)),
        (["0-3", "5"], (0, 1, 2, 3, 5)),
        ([9, "0-1,4"], (0, 1, 4, 9)),
    ],
)
def test_forms_of_layer_numbers(given, numbers):
    found = RecomputeSettings(full=given).full
    assert found == numbers and type(found) is type(numbers)


def test_layers_to_swap():
    given = [{"layers": "0-1", "backward_prefetch": 20}, {"layers": [3]}, {"layers": [5], "backward_prefetch": None}]
    settings = SwapSettings(layer_swap=given, default_prefetch=7)
    assert settings.layer_swap == (LayerSwap((0, 1), 20), LayerSwap((3,), 7), LayerSwap((5,), 7))
    assert settings.is_on and settings.swap is True and settings.op_swap == ()
    assert SwapSettings(layer_swap=[{"layers": True}]).layer_swap == (LayerSwap(True, 1),)


def test_operators_to_swap_in_both_forms():
    listed = [{"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1]}, {"op_name": "*.cast"}]
    named = {"attention": {"backward_prefetch": 20, "layers": "0-1"}, "*.cast": True}
    expected = (OperatorSwap("attention", (0, 1), 20), OperatorSwap("*.cast", True, 4))
    for given in (listed, named, expected):
        settings = SwapSettings(op_swap=given, default_prefetch=4)
        assert settings.op_swap == expected and settings.is_on
        assert dataclasses.replace(settings) == settings
    assert SwapSettings(op_swap={"layers": True}).op_swap == (OperatorSwap("layers", True, 1),)  # named like a key


def test_swap_alone_is_attention_and_false_is_nothing():
    assert SwapSettings(swap=True, layer_swap=[{"layers": [0]}]).op_swap == ()
    assert not SwapSettings(layer_swap=[], op_swap={}).is_on and not SwapSettings(None, 1, None, None).is_on


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
    assert "model.layers.0.self_attn.core_attention.Attention" in printed
    assert "  model.layers.1-2.mlp: Mul\n" in printed
    assert re.search(r"= Attention\(.*\n? *\[recomputed: ", printed)
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


@pytest.mark.usefixtures("one_rank")
def test_every_stage_has_its_picture(tmp_path, capsys):
    """From the first rank that has it, and from no other."""
    net = recompute(sharded(llama), budget=0.6)
    prepare(net, *INPUTS[llama]())
    mesh = DeviceMesh((2, 1, 1, 2), MESH_AXES)
    for pipeline, budget in ((2, 0.6), (1, 0.6), (2, None)):
        recipe = SimpleNamespace(
            recompute=SimpleNamespace(budget=budget),
            parallelism=SimpleNamespace(pipeline_parallel=pipeline),
            training=SimpleNamespace(output_dir=str(tmp_path)),
        )
        for rank in range(4) if pipeline == 2 else (0,):
            report_activations(recipe, mesh, rank, {rank // 2: net, 2 + rank // 2: net} if pipeline == 2 else {0: net})
    stages = [f"recompute_curve_stage_{stage}.svg" for stage in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["recompute_curve.svg", *stages])
    said = capsys.readouterr().out
    assert re.findall(r"^(.*)recompute, budget 0.6: ", said, re.M) == [f"stage {s}: " for s in (0, 2, 1, 3)] + [""]
    assert re.findall(r"what memory costs: .*/(.*)", said)[0] == stages[0]
