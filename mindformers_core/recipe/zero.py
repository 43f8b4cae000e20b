"""A recipe's sharding over data-parallel ranks (ZeRO, Rajbhandari et al. 2020). No MindSpore is called here."""

from mindformers_core.recipe.sections import batch_plan
from mindformers_core.zero.precision import MixedPrecision


def mixed_precision(recipe):
    """The `MixedPrecision` of a recipe."""
    return MixedPrecision(*(getattr(recipe.precision, name) for name in ("parameter", "compute", "reduce")))


def zero_settings(recipe, mesh):
    """The keyword arguments of `hsdp()`; `mesh` is the whole mesh, with `MESH_AXES`.

    Parameters are sharded over the ranks of `data_parallel_shard` and of `context_parallel`. `reshard_after_forward` is
    None below level 3. Between the backward passes of the micro-batches of a step nothing is communicated.
    """
    sizes, dp_size = recipe.parallelism, mesh.axis_size("dp")
    axes = sizes.batch_axes + (sizes.sequence_axes or ())  # of other data, and equal weights
    assert dp_size % sizes.data_parallel_replicate == 0, f"{mesh} was not made of this recipe's mesh_shape()"
    reshard = sizes.reshard_after_forward
    if sizes.zero_level == 3 and reshard is None:
        reshard = sizes.pipeline_parallel == 1  # in a pipeline every micro-batch would gather the weights again
    return {
        "axis": axes,
        "shard_size": mesh.axis_size(*axes) // sizes.data_parallel_replicate if sizes.zero_level else 1,
        "threshold": sizes.zero_threshold_kb,
        "optimizer_level": f"level{max(1, sizes.zero_level)}",
        "accumulate_grad_step": batch_plan(recipe, dp_size).runs,
        "comm_fusion": sizes.comm_fusion,
        "reshard_after_forward": reshard,
        "gradient_accumulation_shard": sizes.gradient_accumulation_shard,
        "mixed_precision": mixed_precision(recipe),
    }
