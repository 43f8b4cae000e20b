"""Recipes: every key typed, every mistake an error that names the key's path and what is allowed."""

import dataclasses
import runpy
from pathlib import Path

import pytest
import yaml

from mindformers_core.pipeline.schedules.named import SCHEDULES, schedule_class
from mindformers_core.trainer.pipeline_recipe import layers_of_rank, layers_of_stages, recipe_timeline
from mindformers_core.trainer.recipe import accumulation_steps, learning_rate, mesh_shape
from mindformers_core.trainer.recipe_loader import load_recipe, recipe_to_yaml
from mindformers_core.trainer.recipe_text import parse_overrides

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = str(CONFIGS / "llama_tiny_cpu.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_our_recipes_load_and_survive_a_round_trip(path, tmp_path):
    recipe = load_recipe(str(path))
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe


def test_the_two_quickstart_recipes_differ_in_topology_only():
    four, one = load_recipe(TINY), load_recipe(str(CONFIGS / "llama_tiny_cpu_1p.yaml"))
    assert dataclasses.replace(one, parallelism=four.parallelism) == four
    assert mesh_shape(four, 4) == (1, 2, 1, 2) and mesh_shape(one, 1) == (1, 1, 1, 1)
    assert accumulation_steps(four, 2) == 1 and accumulation_steps(one, 1) == 2


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
        ("monitor.plot=false", lambda recipe: recipe.monitor.plot is False),
    ],
)
def test_overrides(override, read):
    assert read(load_recipe(TINY, [override]))


# overrides of the quickstart's recipe, error, and a piece of its text
ERRORS = [
    (["full=true"], ValueError, "full: unknown section (did you mean 'recompute.full'?); known: model, training"),
    (["trainig.steps=7"], ValueError, "trainig: unknown section (did you mean 'training'?)"),
    (["parallelism.tensor_paralel=2"], ValueError,
        "parallelism.tensor_paralel: unknown key (did you mean 'tensor_parallel'?)"),
    (["model.hiden_size=2"], ValueError, "model.hiden_size: unknown key (did you mean 'hidden_size'?)"),
    (["training.steps=ten"], TypeError, "training.steps: 'ten' (str) should be a whole number"),
    (["training.steps=0"], ValueError, "training.steps: 0 should be at least 1"),
    (["training=3"], TypeError, "training: 3 should be a section with keys, as steps, local_batch_size"),
    (["monitor.plot=1"], TypeError, "monitor.plot: 1 (int) should be true or false"),
    (["lr_scheduler.type=CosineWithWarmUp"], ValueError, "(did you mean 'CosineWithWarmUpLR'?)"),
    (["context.device_target=TPU"], ValueError, "context.device_target: 'TPU' is not one of CPU, GPU, Ascend"),
    (["context.mode=0", "context.engine=eager"], ValueError,
        "context.engine: eager can't be compiled, as context.mode: 0"),
    (["context.mode=true"], ValueError, "context.mode: True is not one of 0, 1"),
    (["model.dtype=bfloat16"], ValueError,
        "model.dtype: MindSpore can't run bfloat16 models on context.device_target CPU: use float32 or float16 there"),
    (["parallelism.context_parallel=2"], ValueError, "parallelism.context_parallel: 2 is not available yet"),
    (["parallelism.data_parallel_shard=0"], ValueError,
        "parallelism.data_parallel_shard: 0 is neither -1 nor at least 1"),
    (["parallelism.data_parallel_shard=3"], ValueError,
        "training.global_batch_size: 8 is no multiple of training.local_batch_size 4 x 3"),
    (["parallelism.tensor_parallel=3"], ValueError,
        "model.num_attention_heads: 4 can't be cut into parallelism.tensor_parallel 3 parts: try 2"),
    (["parallelism.sequence_parallel=true", "train_dataset.seq_length=63"], ValueError,
        "train_dataset.seq_length: 63 can't be cut"),
    (["train_dataset.seq_length=4096"], ValueError,
        "train_dataset.seq_length: 4096 is more than model.max_position_embeddings 128"),
    (["model.heterogeneous_block_specs=[{}, {}, {intermediate_size: 351}, {}]"], ValueError,
        "model.intermediate_size: 351 can't be cut into parallelism.tensor_parallel 2 parts: try 1"),
    (["model.heterogeneous_block_specs=[1]"], TypeError, "block_specs[0]: 1 (int) should be a mapping"),
    (["model.vocab_size=128"], ValueError, "model.vocab_size: 128 is too small for bytes"),
    (["model.hidden_size=126"], ValueError, "hidden_size"),
    (["model.vocab_size=null"], TypeError, "model.vocab_size: None (NoneType) should be a whole number"),
    (["optimizer.betas=[0.9]"], ValueError, "optimizer.betas: [0.9] should have 2 entries, not 1"),
    (["optimizer.betas=[0.9, x]"], TypeError, "optimizer.betas[1]: 'x' (str) should be a number"),
    (["optimizer.betas=0.9"], TypeError, "optimizer.betas: 0.9 should be a list of float"),
    (["lr_scheduler.warmup_ratio=0.1"], ValueError, "warmup_steps and warmup_ratio are both given"),
    (["model.name=lama"], ValueError, "model.name: no model is called 'lama' (did you mean 'llama'?)"),
    (["model.name=3"], TypeError, "model.name: 3 should be a text: llama, or package.module:Class: docs/models.md"),
    (["model.name=no_such:Net"], ValueError, "model.name: model 'no_such:Net': there is no module 'no_such'"),
    (["model.name=json:loads"], TypeError, "model.name: json:loads is <function loads"),
    (["model.pipeline_parallel=2"], ValueError, "model.pipeline_parallel: unknown key"),
    (["lr_scheduler.lr_end=1.0"], ValueError, "lr_scheduler.lr_end: 1.0 is more than lr_scheduler.learning_rate"),
    (["training.steps"], ValueError, "'training.steps' is no override: write section.key=value"),
    (["training.steps.more=1"], ValueError, "'training.steps.more': training.steps is a value, not a section"),
    (["training.steps=[1"], ValueError, "override 'training.steps=[1': not valid YAML"),
]  # fmt: skip


PP = "parallelism.pipeline_parallel"
PIPELINE_ERRORS = [  # overrides of llama_tiny_pp.yaml: 2 stages of 2 layers, 4 micro-batches; and a piece of the error
    ([f"{PP}_schedule=1f1"], f"{PP}_schedule: no pipeline schedule is called '1f1' (did you mean '1f1b'?)"),
    ([f"{PP}_schedule=mine.MySchedule"], f"{PP}_schedule: pipeline schedule 'mine.MySchedule': there is no module"),
    ([f"{PP}_schedule=zb_v"], f"{PP}_schedule: zb_v, with pipeline_parallel 2, pipeline_parallel_interleave_num 1"),
    ([f"{PP}_interleave_num=2"], "Schedule1F1B has one stage on every rank, not 4 on 2"),
    ([f"{PP}_microbatch_size=3"], f"training.local_batch_size: 4 can't be cut into micro-batches of {PP}_microbatch"),
    ([f"{PP}_schedule=dualpipe_v", f"{PP}_interleave_num=2", f"{PP}_microbatch_size=2"],
        "and 2 micro-batches (training"),
    ([f"{PP}_layers_per_stage=[1,2]"], "layers_per_stage: [1, 2] makes 3 layers, but num_hidden_layers is 4"),
    ([f"{PP}_layers_per_stage=[4]"], "_layers_per_stage [4]: model.layers_per_stage: [4] has 1 entries"),
    ([f"{PP}=3"], f"{PP} 3 x pipeline_parallel_interleave_num 1"),
    ([f"{PP}_shedule=gpipe"], f"{PP}_shedule: unknown key (did you mean 'pipeline_parallel_schedule'?)"),
]  # fmt: skip


@pytest.mark.parametrize("overrides, message", PIPELINE_ERRORS, ids=[" ".join(error[0]) for error in PIPELINE_ERRORS])
def test_mistakes_of_pipelines(overrides, message):
    with pytest.raises(ValueError) as caught:
        load_recipe(str(CONFIGS / "llama_tiny_pp.yaml"), overrides)
    assert message in str(caught.value)


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


@pytest.mark.parametrize("overrides, kind, message", ERRORS, ids=[" ".join(error[0]) for error in ERRORS])
def test_mistakes(overrides, kind, message):
    with pytest.raises(kind) as caught:
        load_recipe(TINY, overrides)
    assert message in str(caught.value)


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
    with pytest.raises(TypeError, match="a recipe is a mapping of sections"):
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
