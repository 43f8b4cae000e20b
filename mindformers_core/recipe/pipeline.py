"""A recipe's pipeline: the schedule, and the layers of every stage and rank. No MindSpore is called here."""

from mindformers_core.pipeline.layer_split import split_config
from mindformers_core.pipeline.schedules.named import schedule_class
from mindformers_core.pipeline.tables.simulating import simulate
from mindformers_core.recipe.sections import micro_batches_of_a_run
from mindformers_core.scopes import errors_at


def check_pipeline(recipe):
    """Raise `ValueError` for an impossible pipeline, with the keys' paths."""
    sizes = recipe.parallelism
    if sizes.pipeline_parallel == 1:
        return
    lacking = [key for key in ("boundary", "inputs") if not getattr(recipe.spec, key)]
    lacking += [] if hasattr(recipe.model, "num_hidden_layers") else ["config with num_hidden_layers"]
    if lacking:
        raise ValueError(
            f"parallelism.pipeline_parallel: {sizes.pipeline_parallel}, but the model {recipe.model_name} can't be "
            f"split into stages: its ModelSpec has no {' and no '.join(lacking)}: docs/models.md"
        )
    _plan(recipe)
    with errors_at(
        f"parallelism.pipeline_parallel {sizes.pipeline_parallel} x pipeline_parallel_interleave_num "
        f"{sizes.pipeline_parallel_interleave_num}, pipeline_parallel_layers_per_stage "
        f"{list(sizes.pipeline_parallel_layers_per_stage)}: model."
    ):
        layers_of_stages(recipe)


def _plan(recipe):
    """The recipe's schedule without stages: its table can be simulated."""
    sizes, count = recipe.parallelism, micro_batches_of_a_run(recipe)
    passes = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num * count
    if passes > 2**18:  # a schedule's table has a line for each
        raise ValueError(
            f"training.local_batch_size: {recipe.training.local_batch_size} makes {count} micro-batches, and {passes} "
            f"forward passes of pipeline stages: at most {2**18} are possible"
        )
    kind = recipe_schedule(recipe)
    with errors_at(
        f"parallelism.pipeline_parallel_schedule: {sizes.pipeline_parallel_schedule}, with pipeline_parallel "
        f"{sizes.pipeline_parallel}, pipeline_parallel_interleave_num {sizes.pipeline_parallel_interleave_num} "
        f"and {count} micro-batches (training.local_batch_size {recipe.training.local_batch_size} / "
        f"parallelism.pipeline_parallel_microbatch_size {sizes.pipeline_parallel_microbatch_size}): ",
        kinds=ValueError,
    ):
        return kind.planned(sizes.pipeline_parallel, count, sizes.pipeline_parallel_interleave_num)


def recipe_timeline(recipe):
    """The simulated `Timeline` of the recipe's schedule, with equal durations of all passes of all stages."""
    return simulate(_plan(recipe).table)


def recipe_schedule(recipe):
    """The class of the recipe's schedule; for one rank, whose keys aren't read, that of a pipeline of one stage.

    Raises:
        ValueError, TypeError, OSError: as of `schedule_class`.
    """
    with errors_at("parallelism.pipeline_parallel_schedule: ", kinds=(ValueError, TypeError, OSError)):
        return schedule_class(recipe.parallelism.pipeline_parallel_schedule if stage_count(recipe) > 1 else "1f1b")


def stage_count(recipe):
    """Number of stages of the pipeline, over all ranks; one rank has one."""
    sizes = recipe.parallelism
    return sizes.pipeline_parallel * (sizes.pipeline_parallel_interleave_num if sizes.pipeline_parallel > 1 else 1)


def stage_holders(recipe):
    """For every stage the pipeline rank that holds it, a tuple."""
    return recipe_schedule(recipe).stage_ranks(stage_count(recipe), recipe.parallelism.pipeline_parallel)


def layers_of_stages(recipe):
    """The `LayerRange` of every stage.

    Raises:
        ValueError: an impossible split of the layers.
    """
    sizes = recipe.parallelism
    stages = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    return split_config(recipe.model, stages, sizes.pipeline_parallel_layers_per_stage)


def layers_of_rank(recipe, pipeline_rank):
    """A dict, number of a stage of a pipeline rank -> its `LayerRange`."""
    layers = layers_of_stages(recipe)
    return {stage: layers[stage] for stage, holder in enumerate(stage_holders(recipe)) if holder == pipeline_rank}
