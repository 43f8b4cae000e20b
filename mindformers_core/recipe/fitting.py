"""A recipe on fewer ranks, where some are missing: data parallelism shrinks, and the run stays as it is."""

from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import batch_plan, mesh_shape


def fitting_ranks(path, overrides, whole, available, least=1):
    """The largest number of ranks that a job can go on with, and the overrides of its recipe that make it do so.

    Tensor, context and pipeline parallelism stay, and so do the samples of a step: dp ranks have other shares of them.

    Args:
        path, overrides: as of `load_recipe`, whose errors it raises.
        whole, available, least: ranks that it is meant for, that there are, and with which it may go on.

    Raises:
        ValueError: none of these numbers fits, with the reason of the largest one.
    """
    recipe = load_recipe(path, overrides)
    sizes, dp = recipe.parallelism, mesh_shape(recipe, whole)[1]
    copy, shard, reason = whole // dp, dp // sizes.data_parallel_replicate, ""
    for ranks in range(available // copy * copy, max(least, 1) - 1, -copy):
        left = ranks // copy
        replicate = left // shard if left % shard == 0 else 1  # what a rank holds stays where it can
        changed = [
            f"training.global_batch_size={batch_plan(recipe, dp).samples}",
            "training.gradient_accumulation_steps=null",
            f"parallelism.data_parallel_replicate={replicate}",
            f"parallelism.data_parallel_shard={left // replicate}",
        ]
        if left == sizes.context_parallel == 1:  # nothing is sharded among one
            keys = ("zero_level=0", "reshard_after_forward=null", "gradient_accumulation_shard=null")
            changed += [f"parallelism.{key}" for key in keys]
        try:
            load_recipe(path, [*overrides, *changed])
            return ranks, changed
        except ValueError as error:
            reason = reason or f": {ranks} ranks: {error}"
    raise ValueError(
        f"{path}: no number of ranks from {least} to {available} fits: a copy of the model has {copy} "
        f"(pipeline_parallel x context_parallel x tensor_parallel){reason}"
    )
