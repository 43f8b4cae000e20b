"""Recipes: every key typed, every mistake an error that names the key's path and what is allowed."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import yaml

from mindformers_core.data.datasets import dataset_of
from mindformers_core.pipeline.schedules.named import SCHEDULES, schedule_class
from mindformers_core.recipe.learning_rate import learning_rate
from mindformers_core.recipe.loader import RecipeError, load_recipe, recipe_to_yaml
from mindformers_core.recipe.pipeline import layers_of_rank, layers_of_stages, recipe_timeline
from mindformers_core.recipe.sections import batch_plan, mesh_shape
from mindformers_core.recipe.text import parse_overrides

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = str(CONFIGS / "llama_tiny_cpu.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_our_recipes_load_and_survive_a_round_trip(path, tmp_path):
    recipe = load_recipe(str(path))
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_the_two_quickstart_recipes_differ_in_topology_only():
    four, one = load_recipe(TINY), load_recipe(str(CONFIGS / "llama_tiny_cpu_1p.yaml"))
    alike = {name: dataclasses.replace(each.training, output_dir="") for name, each in (("one", one), ("four", four))}
    assert one.training.output_dir == "output/llama_tiny_cpu_1p" and alike["one"] == alike["four"]
    assert dataclasses.replace(one, parallelism=four.parallelism, training=four.training) == four
    assert mesh_shape(four, 4) == (1, 2, 1, 2) and mesh_shape(one, 1) == (1, 1, 1, 1)
    assert batch_plan(four, 2).runs == 1 and batch_plan(one, 1).runs == 2


@pytest.mark.parametrize(
    "override, read",
    [
        ("training.steps=7", lambda recipe: recipe.training.steps == 7),
        ("optimizer.eps=1e-6", lambda recipe: recipe.optimizer.eps == 1e-6),
        ("optimizer.weight_decay=1", lambda recipe: type(recipe.optimizer.weight_decay) is float),
        ("optimizer.betas=[0.8, 0.9]", lambda recipe: recipe.optimizer.betas == (0.8, 0.9)),
        ("train_dataset.data_path=a.txt", lambda recipe: recipe.train_dataset.data_path == ("a.txt",)),
        ("train_dataset.data_path=[a.txt, b.txt]", lambda recipe: recipe.train_dataset.data_path == ("a.txt", "b.txt")),
        ("checkpoint.load_path=output/a=b", lambda recipe: recipe.checkpoint.load_path == "output/a=b"),
        ("train_dataset.seed=7", lambda recipe: dataset_of(recipe).seed == 7 and recipe.training.seed == 42),
        ("training.seed=7", lambda recipe: dataset_of(recipe).seed == 7),
        ("monitor.plot=false", lambda recipe: recipe.monitor.plot is False),
    ],
)
def test_overrides(override, read):
    assert read(load_recipe(TINY, [override]))


PP = "parallelism.pipeline_parallel"


def test_a_pipeline_of_one_rank_leaves_its_other_keys_unused():
    recipe = load_recipe(str(CONFIGS / "llama_tiny_pp.yaml"), [f"{PP}=1", f"{PP}_microbatch_size=3"])
    assert recipe.parallelism.pipeline_parallel == 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_named(name):
    chunks = 2 if schedule_class(name).placement == "v" else 1
    recipe = load_recipe(
        str(CONFIGS / "llama_tiny_pp.yaml"), [f"{PP}_schedule={name}", f"{PP}_interleave_num={chunks}"]
    )
    assert sum(layers.count for layers in layers_of_stages(recipe)) == 4 and recipe_timeline(recipe).makespan > 0
    assert {**layers_of_rank(recipe, 0), **layers_of_rank(recipe, 1)} == dict(enumerate(layers_of_stages(recipe)))


@pytest.mark.parametrize(
    "overrides", [["model.dtype=float16"], ["model.dtype=bfloat16", "context.device_target=Ascend"]]
)
def test_dtypes_that_a_device_has(overrides):
    assert load_recipe(TINY, overrides).model.dtype == overrides[0].partition("=")[2]


def test_missing_keys_files_and_sections(tmp_path):
    sections = yaml.safe_load(Path(TINY).read_text())
    del sections["model"]
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(sections))
    with pytest.raises(ValueError, match=r"short.yaml: model: missing; it is a LlamaConfig and has no default"):
        load_recipe(str(tmp_path / "short.yaml"))
    with pytest.raises(FileNotFoundError, match=r"no recipe file '.*shrt.yaml' \(did you mean 'short.yaml'\?\)"):
        load_recipe(str(tmp_path / "shrt.yaml"))
    (tmp_path / "twice.yaml").write_text("training: {steps: 1, steps: 2}")
    with pytest.raises(ValueError, match="twice.yaml: not valid YAML: key 'steps' is given twice$"):
        load_recipe(str(tmp_path / "twice.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RecipeError, match="a recipe is a mapping of sections"):
        load_recipe(str(tmp_path / "list.yaml"))


NO_YAML = [  # text, and the error behind the file's path
    ("model:\n  a: 1\nmonitor:\n\nmodel: {}\n",
        ", line 5: not valid YAML: key 'model' is given twice, first in line 1"),
    ("model: [1\nb: 2\n", ", line 2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"),
    ("a: \x01", ": not valid YAML: unacceptable character #x0001: special characters are not allowed"),
    ("a: 1\n{[b]: 2}: 3", ", line 2: not valid YAML: while constructing a mapping, found unhashable key"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), NO_YAML)
def test_no_yaml(text, message, tmp_path):
    """One line, with the file and the line in it."""
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        load_recipe(str(tmp_path / "wrong.yaml"))
    assert str(caught.value) == f"{tmp_path / 'wrong.yaml'}{message}"


def test_wrong_number_of_ranks_says_how_to_launch():
    recipe = load_recipe(TINY)
    with pytest.raises(ValueError, match="needs 4 ranks, but 1 was launched"):
        mesh_shape(recipe, 1)
    rest = load_recipe(TINY, ["parallelism.data_parallel_shard=-1"])
    assert mesh_shape(rest, 4) == (1, 2, 1, 2)
    with pytest.raises(ValueError, match="needs 2 ranks, but 1 was launched"):
        mesh_shape(rest, 1)
    with pytest.raises(ValueError, match="needs 4 ranks, but 5 were launched"):
        mesh_shape(rest, 5)
    with pytest.raises(ValueError, match="data_parallel_shard: -1 .* a dry run launches none"):
        mesh_shape(rest)


def test_the_page_has_all_keys():
    """docs/recipe.md is as `python docs/make_recipe.py` writes it."""
    make = runpy.run_path(str(CONFIGS.parent / "docs" / "make_recipe.py"))
    text = make["page"]()
    assert make["PAGE"].read_text(encoding="utf-8") == text
    assert "| `gradient_accumulation_shard` | `bool or None` | `null` |  | sums over micro-steps" in text


def test_parse_overrides_keeps_the_value_whole():
    assert parse_overrides(["a.b.c=[1, 2]", "a.b="]) == [(("a", "b", "c"), [1, 2]), (("a", "b"), None)]


@pytest.mark.parametrize(
    "kind, last", [("ConstantWarmUpLR", 1.0), ("LinearWithWarmUpLR", 0.1), ("CosineWithWarmUpLR", 0.1)]
)
def test_learning_rate(kind, last):
    recipe = load_recipe(
        TINY, [f"lr_scheduler.type={kind}", "lr_scheduler.learning_rate=1.0", "lr_scheduler.lr_end=0.1"]
    )
    rates = [learning_rate(recipe, step) for step in range(1, 121)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[-1] == pytest.approx(last)
    assert rates[64] == pytest.approx((1 + last) / 2)  # step 65 is half way from 10 to 120
    assert all(one >= other for one, other in zip(rates[9:], rates[10:]))
    assert learning_rate(load_recipe(TINY, ["lr_scheduler.warmup_steps=0"]), 120) == pytest.approx(1e-4)
