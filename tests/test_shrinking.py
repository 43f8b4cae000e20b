"""Recipes of small sizes with the plans of large ones."""

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from mindspore import nn, ops
from support.nightly import daily
from support.plan_differences import first_difference
from support.random_recipes import random_recipe

from mindformers_core.commands import shrinking
from mindformers_core.commands.shrinking import shrunk_recipe
from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.data.reading import micro_batch
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.activation_policy import Keeper
from mindformers_core.program.plan import CallPlan, OperatorPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.resized import resized
from mindformers_core.recipe.loader import load_recipe, recipe_from_dict, recipe_to_yaml
from mindformers_core.recipe.sections import MESH_AXES, batch_plan, mesh_shape
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.trainer.cells import build_cells

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
ON_128 = (
    "parallelism.data_parallel_shard=4", "parallelism.pipeline_parallel=4", "parallelism.zero_level=3",
    "training.local_batch_size=16", "training.global_batch_size=128",
)  # fmt: skip
RECIPES = {
    "70B": ("configs/llama3_70b.yaml", *ON_128, "train_dataset.seq_length=768", "recompute.full=[3, 40-44]"),
    "8B": (
        "configs/llama3_8b.yaml", "parallelism.data_parallel_shard=2", "parallelism.tensor_parallel=8",
        "train_dataset.seq_length=768",
    ),
    "own": ("examples/own_model.yaml",),
    "own, stages": ("examples/own_model.yaml", "parallelism.pipeline_parallel=2", "parallelism.zero_level=2"),
    "recomputed": ("configs/llama_tiny_pp.yaml", "recompute.full=[1]", "model.num_hidden_layers=8"),
    **{path.stem: (f"configs/{path.name}",) for path in sorted((ROOT / "configs").glob("llama_tiny*"))},
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_initialized(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(shrinking, "_FEW", 2**30)  # all ranks remain; fewer: test_narrowing
    shutdown()
    yield
    shutdown()


def programs_of(recipe, plans=None):
    """Stage -> (`HsdpStorage`, `Program`); `plans`: those of a small recipe."""
    plans = {stage: plan for (stage, _), (_, plan) in plans.items()} if plans else {}
    sizes = recipe.parallelism
    shape = mesh_shape(recipe, None if sizes.data_parallel_shard > 0 else sizes.tensor_parallel)
    mesh, found = init_device_mesh(shape, MESH_AXES), {}
    for rank in mesh.group(mesh.rank_list[0], ("pp",)):
        init_distributed("fake", world_size=mesh.size, rank=rank)
        for stage, net in build_cells(recipe, mesh, rank).items():
            given = {"saved_plan": partial(resized, plans[stage])} if plans else {}
            program = prepare(net, *micro_batch(recipe, net, stage), **given)
            found[stage] = tree_of(net).storage, program
        shutdown()
    return found


def check_shrunk(recipe, found, plans):
    """Assert that a small recipe is one, with the programs of the large one; returns the programs of both."""
    small = recipe_from_dict(yaml.safe_load(recipe_to_yaml(found)))
    assert recipe_to_yaml(small) == recipe_to_yaml(found) and mesh_shape(small) == mesh_shape(recipe)
    large, programs = programs_of(recipe), programs_of(small, plans)
    assert large.keys() == programs.keys()
    for (storage, theirs), (other, ours) in zip(large.values(), programs.values()):
        assert first_difference(theirs.plan, ours.plan) is None
        assert {*map(kind_of, storage.parameters)} == {*map(kind_of, other.parameters)}
        assert sum(each.plan.size for each in other.parameters) < 250_000
        values = {value for _, plan in ours.plan.walk() for e in plan.instructions for value, _ in e.produced}
        assert max(math.prod(value.shape) for value in values) < 300_000  # scores of 16 heads and 64 tokens are 262,144
        if getattr(small.model, "num_hidden_layers", 0) == getattr(recipe.model, "num_hidden_layers", 0):
            assert ours.source.text.count("def ") == theirs.source.text.count("def ")
    return large, programs


def kind_of(stored):
    """What of a parameter's sharding doesn't depend on sizes."""
    kind = "".join(letter for letter in stored.plan.path if not letter.isdigit())
    return kind, stored.plan.dim, stored.plan.reason == ""


@pytest.mark.parametrize("name", daily(("own, stages",), RECIPES))
def test_recipes(name):
    path, *overrides = RECIPES[name]
    recipe = load_recipe(path, [*overrides, *(["parallelism.data_parallel_shard=2"] if "cpu" in name else [])])
    check_shrunk(recipe, *shrunk_recipe(recipe))


@pytest.mark.parametrize("seed", daily((1, 2), range(200)))  # of which every eighth is planned in both sizes
def test_random_recipes(seed):
    recipe = recipe_from_dict(random_recipe(seed))
    small, plans = shrunk_recipe(recipe)
    check_sizes(recipe, small)
    if seed % 8 == 0:
        check_shrunk(recipe, small, plans)


def check_sizes(large, small):
    """Assert that unequal sizes are unequal, and that what the mesh doesn't divide it doesn't divide.

    Equal sizes are equal, except for the sequence's, which may be an odd one.
    """
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    pairs = [(getattr(large.model, key), getattr(small.model, key)) for key in keys]
    pairs.append((large.train_dataset.seq_length, small.train_dataset.seq_length))
    for one, other in pairs:
        assert other <= one
        for divisor in (large.parallelism.tensor_parallel, large.parallelism.data_parallel_shard):
            assert one % divisor == 0 or other % divisor
        for third, fourth in pairs:
            assert one == third or other != fourth, pairs
    assert all(other == fourth for one, other in pairs[:-1] for third, fourth in pairs[:-1] if one == third), pairs


@pytest.mark.nightly
def test_70b_at_its_own_length():
    """Its programs, and buckets."""
    recipe = load_recipe("configs/llama3_70b.yaml", ON_128)
    small, plans = shrunk_recipe(recipe)
    large, programs = check_shrunk(recipe, small, plans)
    assert small.model.hidden_size == 64
    for number, layer in ((1, 19), (2, 20), (7, 61)):
        stage = layer // 20
        theirs, ours = (
            sorted(len(b.members) for b in stages[stage][0].gathers if b.unit == f"model.layers.{place}")
            for stages, place in ((large, layer), (programs, number))
        )
        assert theirs == [1, 1, 1, 4] and len(ours) > 1 and ours[-1] > 1


@pytest.fixture
def layers(monkeypatch):
    """The numbers of the layers that `shrunk_recipe` keeps, as a list that it fills."""
    found, with_layers = [], shrinking._with_layers

    def spied(recipe, stages):
        found[:] = [number for numbers in stages for number in numbers]
        return with_layers(recipe, stages)

    monkeypatch.setattr(shrinking, "_with_layers", spied)
    return found


def test_70b_on_128_ranks(layers):
    """Its numbers: what remains of layers, micro-batches and sizes."""
    recipe = load_recipe("configs/llama3_70b.yaml", [*ON_128, "train_dataset.seq_length=768"])
    small, _ = shrunk_recipe(recipe)
    model = small.model
    assert layers == [0, 19, 20, 21, 40, 41, 60, 61]  # the first one of a stage has an argument
    assert small.parallelism.pipeline_parallel_layers_per_stage == (2, 2, 2, 2) and model.num_hidden_layers == 8
    plan = batch_plan(small, 4)
    assert plan.micro_batches == 5 and plan.runs == 2 == batch_plan(recipe, 4).runs
    assert model.hidden_size == model.num_attention_heads * model.head_dim and model.num_key_value_heads == 8


def settings_of(layers, **sections):
    """A recipe of a Llama of many layers with these sections."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 512}
    parallelism = {"data_parallel_shard": 2, "tensor_parallel": 2} | sections.pop("parallelism", {})
    model = sizes | {"num_hidden_layers": layers} | sections.pop("model", {})
    return recipe_from_dict({"model": model, "parallelism": parallelism, **sections})


def test_layers_that_settings_name_remain(layers):
    recipe = settings_of(9, recompute={"full": "3-5", "select": "layers.7.mlp"}, swap={"layer_swap": [{"layers": [1]}]})
    small, plans = shrunk_recipe(recipe)
    assert layers == [0, 1, 3, 7]
    assert small.recompute.full == (2,) and small.swap.layer_swap[0].layers == (1,)
    check_shrunk(recipe, small, plans)


def test_layers_of_other_sizes_remain(layers):
    specs = [{}, {}, {"intermediate_size": 96}, {}, {"intermediate_size": 96}, {}, {"num_key_value_heads": 2}, {}, {}]
    recipe = settings_of(9, model={"heterogeneous_block_specs": specs})
    model = shrunk_recipe(recipe)[0].model
    assert layers == [0, 2, 6]
    wide, narrow = model.intermediate_size, model.heterogeneous_block_specs[1]
    assert narrow["intermediate_size"] != wide and model.heterogeneous_block_specs[0] == {}


def test_a_layer_counted_for_the_embedding(layers):
    counted = {"account_for_embedding_in_pipeline_split": True}
    recipe = settings_of(11, model=counted, parallelism={"pipeline_parallel": 3}, training={"local_batch_size": 6})
    small, plans = shrunk_recipe(recipe)
    assert layers == [0, 2, 3, 4, 7, 8]
    check_shrunk(recipe, small, plans)


@dataclass(frozen=True)
class RigidConfig:
    """Sizes of `Rigid`."""

    features: int = 96
    hidden_size: int = 64


class Rigid(nn.Cell):
    """A model that can't be made in another size."""

    config_class = RigidConfig

    def __init__(self, config):
        super().__init__()
        if config.hidden_size != 64:
            raise ZeroDivisionError("it has 64 features")
        self.layer = nn.Dense(config.features, config.hidden_size)

    def shard(self, config):
        return layout(config.batch_axes, ...), None, None

    def construct(self, samples):
        return ops.mean(self.layer(samples))


class Rows:
    """A dataset."""

    def __init__(self, features):
        self.features = features

    def batch(self, first, count):
        return (np.zeros((count, self.features), np.float32),)


def open_rows(section, config, seed):
    return Rows(config.features)


def test_what_can_not_shrink_is_an_error_that_names_the_way_out():
    sections = {"name": "test_shrinking:Rigid"}
    data = {"factory": "test_shrinking:open_rows", "seq_length": 1}
    recipe = recipe_from_dict({"model": sections, "train_dataset": data, "parallelism": {"data_parallel_shard": 2}})
    with pytest.raises(ValueError, match=r"no small sizes with the same plan \(it has 64 features\): .* --full$"):
        shrunk_recipe(recipe)


def altered(plan, target, index, change):
    """A copy of a plan in which `change` was applied to an instruction of the plan `target` in it."""
    entries, keepers = list(plan.instructions), dict(plan.keepers)
    for place, entry in enumerate(plan.instructions):
        if isinstance(entry, CallPlan) and entry.plan is not None:
            entries[place] = replace(entry, plan=altered(entry.plan, target, index, change))
            if entry in keepers:
                keepers[entries[place]] = keepers[entry]
    if plan is target:
        change(entries, index, keepers)
    return replace(plan, instructions=tuple(entries), keepers=keepers)


def change_choice(draw):
    """A function that changes one instruction of a plan, in one of many ways."""

    def change(entries, index, keepers):
        entry = entries[index]
        kinds = ["keeper", "dropped"]
        if isinstance(entry, Redistribution):
            kinds += ["gradient", "target"] + (["axes", "steps"] if entry.steps else [])
        elif isinstance(entry, OperatorPlan):
            kinds += (
                ["algorithm", "cut"] + (["inputs"] if entry.inputs else []) + (["outputs"] if entry.outputs else [])
            )
        else:
            kinds += ["outputs"] if entry.outputs else []
        kind = draw.choice(kinds)
        if kind == "dropped":
            del entries[index]
            return
        if kind == "keeper":
            new = replace(entry)
            keepers.pop(entry, None)
            if entry not in keepers:
                keepers[new] = Keeper("", "other", "", True)
        else:
            new = replace(entry, **CHANGES[kind](entry))
        entries[index] = new

    return change


def other_layout(at):
    """Another layout of the same tensor."""
    used = {axis for axes in at.dims for axis in axes} | set(dict(at.partial))
    others = [axis for axis in at.mesh.axis_names if axis not in used]
    marked = at.replace(varying=() if at.varying else others)
    return marked if marked != at else at.replace(dims=((),) * at.ndim, partial=())


CHANGES = {
    "gradient": lambda entry: {"gradient": not entry.gradient},
    "target": lambda entry: {"target": other_layout(entry.target)},
    "steps": lambda entry: {"steps": entry.steps[:-1]},
    "axes": lambda entry: {"steps": (*entry.steps[:-1], replace(entry.steps[-1], axes=("cp",)))},
    "algorithm": lambda entry: {"algorithm": f"{entry.algorithm}_other", "cut_axes": ("tp",)},
    "cut": lambda entry: {"choice": replace(entry.choice, cuts=(*entry.choice.cuts, ("other", ("tp",))))},
    "inputs": lambda entry: {"inputs": tuple(map(other_layout, entry.inputs))},
    "outputs": lambda entry: {"outputs": tuple(map(other_layout, entry.outputs))},
}  # fmt: skip


@pytest.mark.parametrize("name", daily(("llama_tiny_recompute",), ("llama_tiny_recompute", "own")))
def test_an_altered_choice_is_found(name):
    draw = random.Random(5)
    path, *overrides = RECIPES[name]
    recipe = load_recipe(path, overrides)
    ((_, large),), ((_, small),) = (programs_of(*given).values() for given in ((recipe,), shrunk_recipe(recipe)))
    plans = [plan for _, plan in small.plan.walk() if plan.instructions]
    for _ in range(40):
        target = draw.choice(plans)
        index = draw.randrange(len(target.instructions))
        other = altered(small.plan, target, index, change_choice(draw))
        why = first_difference(large.plan, other)
        assert why and "at the recipe's sizes, and" in why and target.graph.label.split()[-1] in why


def test_a_difference_of_a_dropped_layer_is_found():
    """Which the small plan has no layer for."""
    ((_, large),) = programs_of(settings_of(6)).values()
    ((_, small),) = programs_of(*shrunk_recipe(settings_of(6))).values()
    assert first_difference(large.plan, small.plan) is None
    annotated = programs_of(settings_of(6, recompute={"full": [2]}))[0][1].plan
    assert "kept by recomputed' at the recipe's sizes" in first_difference(annotated, small.plan)


def test_the_boundary_of_a_stage_shrinks_too():
    small, plans = shrunk_recipe(load_recipe("configs/llama_tiny_pp.yaml"))
    (_, program) = programs_of(small, plans)[1]
    hidden = tree_leaves(program.graph.arguments)[0].shape
    assert hidden == (2, small.train_dataset.seq_length, small.model.hidden_size) and hidden[-1] < 64
