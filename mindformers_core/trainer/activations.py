"""`recompute()` and `swap()` as a recipe says."""

from mindformers_core.recompute import recompute, swap
from mindformers_core.trainer.recompute_recipe import recompute_arguments, swap_arguments

__all__ = ["with_activations"]


def with_activations(net, recipe):
    """`net` itself, the recipe's sharded model or a stage of it, computing again and swapping what the recipe names."""
    is_part = recipe.parallelism.pipeline_parallel > 1
    recompute(net, is_part=is_part, **recompute_arguments(recipe))
    return swap(net, is_part=is_part, **swap_arguments(recipe))
