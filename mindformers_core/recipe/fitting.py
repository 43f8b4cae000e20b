"""A recipe on fewer ranks, where some are missing: data parallelism shrinks, and the run stays as it is."""

from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import batch_plan, mesh_shape


def fitting_ranks(path, overrides, whole, available, least=1):
    """The largest number of ranks that a job can go on with, and the overrides of its recipe that make it do so.

    Tensor, context and pipeline parallelism stay, and so do the samples of a step: dp ranks have other shares of them.

    Args:
        path, overrides: of the recipe, as of `load_recipe`.
        whole: the number of ranks that it is meant for.
        available: how many there are; least: with how many it may go on.

    Returns:
        `(ranks, overrides)`.

    Raises:
        ValueError: none of these numbers fits, with the reason of the largest one. Other errors as of `load_recipe`.
    """
    recipe = load_recipe(path, overrides)
    shape = mesh_shape(recipe, whole)
    sizes, dp = recipe.parallelism, shape[1]
    copy, samples, reason = whole // dp, batch_plan(recipe, dp).samples, ""
    shard = dp // sizes.data_parallel_replicate
    for ranks in range(available // copy * copy, max(least, 1) - 1, -copy):
        left = ranks // copy
        keeps = left % shard == 0  # what a rank holds stays
        changed = [
            f"training.global_batch_size={samples}",
            "training.gradient_accumulation_steps=null",
            f"parallelism.data_parallel_replicate={left // shard if keeps else 1}",
            f"parallelism.data_parallel_shard={shard if keeps else left}",
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
