"""Recipes of few ranks with the plans of many."""

import pytest

from mindformers_core.communication import shutdown
from mindformers_core.trainer.recipe_loader import recipe_from_dict
from mindformers_core.trainer.shrinking import narrowed_recipe

SHARDS = {"data_parallel_shard": 16, "zero_level": 3}


@pytest.mark.parametrize(
    ("parallelism", "model", "mesh", "layers", "vocabulary"),
    [
        (SHARDS, {}, (1, 8, 1), 2, 512),  # on 8 ranks a collective stays within a node
        (SHARDS, {"vocab_size": 528}, (1, 8, 1), 2, 536),  # 16 x 2 don't divide 528
        (SHARDS | {"data_parallel_shard": 48}, {}, (1, 48, 1), 12, 512),  # 48 don't divide the sizes of weights
        ({"pipeline_parallel": 6, "data_parallel_replicate": 4}, {}, (3, 2, 4), 6, 512),
        ({"pipeline_parallel": 4}, {}, (4, 2, 1), 12, 512),  # 16 ranks are few
    ],
)
def test_fewer_ranks_with_the_same_plan(parallelism, model, mesh, layers, vocabulary):
    shutdown()
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 512}
    sections = {"model": sizes | {"num_hidden_layers": 12} | model, "training": {"local_batch_size": 12}}
    parallelism = {"data_parallel_shard": 2, "tensor_parallel": 2} | parallelism
    found = narrowed_recipe(recipe_from_dict({**sections, "parallelism": parallelism}))
    sizes = found.parallelism
    assert (sizes.pipeline_parallel, sizes.data_parallel_shard, sizes.data_parallel_replicate) == mesh
    assert (found.model.num_hidden_layers, found.model.vocab_size) == (layers, vocabulary)
