"""Recipe keys about data-parallel ranks: sizes, batches, what is sharded, and what hsdp() is told."""

import pytest
from test_recipe import CONFIGS

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.loader import load_recipe, recipe_to_yaml
from mindformers_core.recipe.sections import MESH_AXES, batch_plan, mesh_shape
from mindformers_core.recipe.zero import zero_settings
from mindformers_core.zero.precision import MixedPrecision

ZERO = str(CONFIGS / "llama_tiny_zero.yaml")
REPLICATE, SHARD = "parallelism.data_parallel_replicate", "parallelism.data_parallel_shard"
LEVEL, FUSION, RESHARD = "parallelism.zero_level", "parallelism.comm_fusion", "parallelism.reshard_after_forward"
GLOBAL, ACCUMULATE = "training.global_batch_size", "training.gradient_accumulation_steps"


def settings(overrides, world_size=4):
    """The recipe of `overrides`, and what it says to hsdp()."""
    recipe = load_recipe(ZERO, overrides)
    mesh = init_device_mesh(mesh_shape(recipe, world_size), MESH_AXES)
    return zero_settings(recipe, mesh)


def test_our_recipe_shards_gradients_over_two_ranks():
    assert settings([]) == {
        "axis": ("dp",),
        "shard_size": 2,
        "threshold": 1,
        "optimizer_level": "level2",
        "accumulate_grad_step": 2,
        "comm_fusion": "auto",
        "reshard_after_forward": None,
        "gradient_accumulation_shard": None,
        "mixed_precision": MixedPrecision(),
    }


@pytest.mark.parametrize(
    ("overrides", "world_size", "dp", "shard_size"),
    [
        ([], 4, 2, 2),
        ([f"{REPLICATE}=2"], 8, 4, 2),
        ([f"{SHARD}=-1"], 16, 8, 8),
        ([f"{SHARD}=-1", f"{REPLICATE}=2"], 16, 8, 4),
        ([f"{SHARD}=-1", f"{REPLICATE}=4"], 8, 4, 1),  # nothing is left to shard among: plain data parallel
        ([f"{REPLICATE}=2", f"{LEVEL}=0"], 8, 4, 1),
        ([f"{SHARD}=1", f"{REPLICATE}=2", f"{LEVEL}=0"], 4, 2, 1),
    ],
)
def test_the_dp_axis_has_all_groups_of_shards(overrides, world_size, dp, shard_size):
    assert mesh_shape(load_recipe(ZERO, overrides), world_size) == (1, dp, 1, 2)
    assert settings(overrides, world_size)["shard_size"] == shard_size


@pytest.mark.parametrize("level, said", [(0, "level1"), (1, "level1"), (2, "level2"), (3, "level3")])
def test_levels(level, said):
    assert settings([f"{LEVEL}={level}"])["optimizer_level"] == said


@pytest.mark.parametrize(
    ("overrides", "world_size", "reshard"),
    [
        ([f"{LEVEL}=3"], 4, True),
        ([f"{LEVEL}=3", f"{RESHARD}=false"], 4, False),
        ([f"{LEVEL}=3", "parallelism.pipeline_parallel=2"], 8, False),
        ([f"{LEVEL}=3", "parallelism.pipeline_parallel=2", f"{RESHARD}=true"], 8, True),
        ([f"{LEVEL}=2"], 4, None),
    ],
)
def test_weights_are_dropped_after_forward_except_in_a_pipeline(overrides, world_size, reshard):
    assert settings(overrides, world_size)["reshard_after_forward"] is reshard


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("=auto", "auto"),
        ("=32", 32),
        ("=0.5", 0.5),
        ("={mode: size, config: 32}", {"mode": "size", "config": 32}),
        ("={allreduce: {mode: index, config: [20, 35]}}", {"allreduce": {"mode": "index", "config": [20, 35]}}),
    ],
)
def test_comm_fusion_is_a_number_a_text_or_a_mapping(text, read, tmp_path):
    recipe = load_recipe(ZERO, [FUSION + text])
    assert recipe.parallelism.comm_fusion == read
    assert type(recipe.parallelism.comm_fusion) is type(read)
    assert settings([FUSION + text])["comm_fusion"] == read
    (tmp_path / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe
    hash(recipe.parallelism)


def test_comm_fusion_key_by_key(tmp_path):
    (tmp_path / "short.yaml").write_text("model: {vocab_size: 256}\ntrain_dataset: {seq_length: 16}")
    overrides = [f"{FUSION}.allgather.mode=size", f"{FUSION}.allgather.config=8"]
    recipe = load_recipe(str(tmp_path / "short.yaml"), overrides)
    assert recipe.parallelism.comm_fusion == {"allgather": {"mode": "size", "config": 8}}


BATCHES = [  # global_batch_size, gradient_accumulation_steps (None: not given), dp ranks -> micro-batches
    (None, None, 2, 1),
    (None, None, 3, 1),
    (None, 3, 2, 3),
    (16, None, 2, 4),
    (16, None, 8, 1),
    (16, 4, 2, 4),
]


@pytest.mark.parametrize(("whole", "given", "dp", "micro_batches"), BATCHES)
def test_batches_follow_from_what_is_given(whole, given, dp, micro_batches):
    """`local_batch_size` is 2."""
    overrides = [f"{GLOBAL}={whole or 'null'}", f"{ACCUMULATE}={given or 'null'}", f"{SHARD}={dp}"]
    assert batch_plan(load_recipe(ZERO, overrides), dp).runs == micro_batches


def test_a_batch_that_does_not_fit_the_launched_ranks():
    recipe = load_recipe(ZERO, [f"{SHARD}=-1", f"{GLOBAL}=16"])
    _, dp, _, _ = mesh_shape(recipe, 8)
    assert batch_plan(recipe, dp).runs == 2
    _, dp, _, _ = mesh_shape(recipe, 16)
    with pytest.raises(ValueError, match="2 x 8 data-parallel ranks x .*_steps 2 = 32: .*=32 or .*_steps=1, or give"):
        batch_plan(recipe, dp)


def test_a_wrong_number_of_ranks_names_the_groups():
    recipe = load_recipe(ZERO, [f"{REPLICATE}=2"])
    sizes = (
        "pipeline_parallel 1 x data_parallel_replicate 2 x data_parallel_shard 2 x context_parallel 1 x tensor_parall"
    )
    with pytest.raises(ValueError, match=f"{sizes}el 2 needs 8 ranks, but 4 were launched"):
        mesh_shape(recipe, 4)
    rest = load_recipe(ZERO, [f"{REPLICATE}=2", f"{SHARD}=-1"])
    with pytest.raises(ValueError, match="needs 4 ranks, but 2 were launched"):
        mesh_shape(rest, 2)
    with pytest.raises(ValueError, match="data_parallel_shard 2 x .* needs 8 ranks, but 10 were launched"):
        mesh_shape(rest, 10)
    with pytest.raises(ValueError, match="needs 4 ranks") as caught:
        mesh_shape(load_recipe(ZERO), 1)
    assert "replicate" not in str(caught.value)
