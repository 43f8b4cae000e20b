"""What a recipe says about sharding over data-parallel ranks (ZeRO, Rajbhandari et al. 2020). Calls no MindSpore."""

from mindformers_core.zero.buckets import parse_comm_fusion

__all__ = ["SHARDED", "check_zero", "zero_settings", "zero_state"]

SHARDED = {1: "optimizer state", 2: "optimizer state and gradients", 3: "optimizer state, gradients and weights"}


def check_zero(recipe):
    """Raise `ValueError` or `TypeError` for keys about dp ranks that can't stand together, with the keys' paths."""
    sizes = recipe.parallelism
    level = sizes.zero_level
    if level > 0 and sizes.data_parallel_shard == 1:
        raise ValueError(
            f"parallelism.zero_level: {level} shards {SHARDED[level]} among data_parallel_shard ranks, but "
            f"parallelism.data_parallel_shard is 1, so nothing would be sharded: use data_parallel_shard=2 or more, or "
            "zero_level=0"
        )
    if sizes.reshard_after_forward is not None and level != 3:
        raise ValueError(
            f"parallelism.reshard_after_forward: {sizes.reshard_after_forward} is about the sharded weights of "
            f"parallelism.zero_level 3, but zero_level is {level}: leave it out, or use zero_level=3"
        )
    if sizes.gradient_accumulation_shard and level == 0:
        raise ValueError(
            "parallelism.gradient_accumulation_shard: true is about sums of gradients that parallelism.zero_level 1, 2 "
            "or 3 shards, but zero_level is 0: leave it out, or use zero_level=2"
        )
    try:
        parse_comm_fusion(sizes.comm_fusion)
    except (TypeError, ValueError) as error:  # its message begins with the key
        raise type(error)(f"parallelism.{error}") from None


def zero_settings(recipe, mesh, micro_batches):
    """What the recipe says to `hsdp()`, as keyword arguments.

    Args:
        recipe: the `Recipe`.
        mesh: the whole mesh, with the axis `dp`.
        micro_batches: backward passes of a step between which nothing is communicated, see `accumulation_steps`.

    Returns:
        A dict with `shard_size` (ranks; 1 at `zero_level: 0`), `threshold` (KB), `optimizer_level`,
        `accumulate_grad_step`, `comm_fusion`, `reshard_after_forward` (None below level 3) and
        `gradient_accumulation_shard`.
    """
    sizes = recipe.parallelism
    groups = sizes.data_parallel_replicate
    assert mesh.axis_size("dp") % groups == 0, f"{mesh} was not made of this recipe's mesh_shape()"
    reshard = sizes.reshard_after_forward
    if sizes.zero_level == 3 and reshard is None:
        reshard = sizes.pipeline_parallel == 1  # in a pipeline every micro-batch would gather the weights again
    return {
        "shard_size": mesh.axis_size("dp") // groups if sizes.zero_level else 1,
        "threshold": sizes.zero_threshold_kb,
        "optimizer_level": f"level{max(1, sizes.zero_level)}",
        "accumulate_grad_step": micro_batches,
        "comm_fusion": sizes.comm_fusion,
        "reshard_after_forward": reshard,
        "gradient_accumulation_shard": sizes.gradient_accumulation_shard,
    }


def zero_state(recipe, mesh):
    """What has to be the same in a run that resumes: which part of every weight is on which rank.

    Args:
        recipe: the `Recipe`.
        mesh: the whole mesh, with the axis `dp`.
    """
    sizes, dp_size = recipe.parallelism, mesh.axis_size("dp")
    if sizes.zero_level == 0:  # as in a checkpoint that says nothing about it
        return {"zero": None}
    groups = sizes.data_parallel_replicate  # not the level: parts are the same at all of them
    shards = {"data_parallel_replicate": groups, "data_parallel_shard": dp_size // groups}
    return {"zero": {**shards, "zero_threshold_kb": sizes.zero_threshold_kb}}
