"""Recipes of few ranks with the plans of many."""

from math import prod

import pytest
from support.nightly import daily

from mindformers_core.commands.shrinking import NARROWED, shrunk_recipe
from mindformers_core.communication import shutdown
from mindformers_core.recipe.loader import recipe_from_dict

SHARDS = {"data_parallel_shard": 16, "zero_level": 3}
ROUTED = {
    "name": "deepseek_v3", "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "first_k_dense_replace": 3, "n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "moe_intermediate_size": 48,
}  # fmt: skip

CASES = [
    (SHARDS, {"vocab_size": 528}, (1, 2, 1, 2, 1), 2, {"vocab_size": 258}),  # 16 x 2 don't divide 528, nor 2 x 2 258
    (SHARDS | {"data_parallel_shard": 48}, {}, (1, 3, 1, 2, 1), 2, {}),  # 48 and 3 don't divide sizes that 2 divide
    (SHARDS | {"tensor_parallel": 8}, {"num_key_value_heads": 8}, (1, 2, 1, 4, 1), 2, {"num_key_value_heads": 4}),
    ({"pipeline_parallel": 6, "data_parallel_replicate": 4}, {}, (2, 2, 1, 2, 3), 6, {}),
    ({"pipeline_parallel": 4}, {}, (1, 2, 1, 2, 4), 8, {}),  # 16 ranks are few
    ({"context_parallel": 8, "zero_level": 3}, {"num_key_value_heads": 4}, (1, 2, 4, 2, 1), 2, {}),
    (  # dense layers in front of those with experts, of which the router's groups have several each
        {"pipeline_parallel": 3, "data_parallel_shard": 16, "expert_parallel": ["dp"]}, ROUTED, (1, 2, 1, 2, 3), 6,
        {"first_k_dense_replace": 1, "n_group": 8},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parallelism", "model", "mesh", "layers", "sizes"), daily(CASES[2:3], CASES))
def test_fewer_ranks_with_the_same_plan(parallelism, model, mesh, layers, sizes):
    shutdown()
    own = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "vocab_size": 512}
    sections = {"model": own | {"num_hidden_layers": 12} | model, "training": {"local_batch_size": 12}}
    parallelism = {"data_parallel_shard": 2, "tensor_parallel": 2} | parallelism
    found, plans = shrunk_recipe(recipe_from_dict({**sections, "parallelism": parallelism}))
    assert tuple(getattr(found.parallelism, name) for name in NARROWED) == mesh
    assert found.model.num_hidden_layers == layers and sizes.items() <= vars(found.model).items(), found.model
    for (_, at), (_, plan) in plans.items():
        layouts = {layout for _, inner in plan.walk() for entry in inner.instructions for _, layout in entry.produced}
        assert {layout.mesh for layout in layouts} == {at} and at.size * mesh[-1] == prod(mesh)
