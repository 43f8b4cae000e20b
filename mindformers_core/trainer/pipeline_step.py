"""The recipe's model as a pipeline: this rank's stages, their schedule, and one optimizer step over it."""

import mindspore as ms

from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.recompute import recompute, swap
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.pipeline_recipe import (
    layers_of_stages,
    micro_batches_of_a_run,
    recipe_schedule,
    stages_held,
)
from mindformers_core.trainer.step import update_function
from mindformers_core.zero import hsdp, tie_shards

__all__ = ["build_chunks", "build_schedule", "hsdp_chunks", "own_parameters", "pipeline_step_function", "sharded_model"]


def build_chunks(recipe, mesh, rank):
    """`[(stage index, Cell), …]`: the chunks of the recipe's model that `rank` of `mesh` holds, sharded, in order."""
    (pipeline_rank,) = mesh.coordinate(rank, ("pp",))
    inner = mesh.sub_mesh(tuple(axis for axis in mesh.axis_names if axis != "pp"), rank)
    layers = layers_of_stages(recipe)
    return [(stage, sharded_model(recipe, inner, layers[stage])) for stage in stages_held(recipe, pipeline_rank)]


def sharded_model(recipe, mesh, layers=None):
    """The recipe's model, or the stage of it with these layers, sharded over `mesh`, its values drawn from the seed."""
    with ms.DeviceCtx("meta"):
        net = recipe.spec.build(recipe.model, layers).set_train()
    shard(net, mesh, recipe.parallelism, seed=recipe.training.seed, mode=recipe.context.engine)
    is_part = recipe.parallelism.pipeline_parallel > 1
    return swap(recompute(net, recipe.recompute, is_part=is_part), recipe.swap, is_part=is_part)


def hsdp_chunks(recipe, nets, zero):
    """Call `hsdp()` with the chunks of a rank; a parameter that several hold is stored and updated once.

    Args:
        recipe: the `Recipe`.
        nets: the Cells, in order.
        zero: keyword arguments of `hsdp()`.
    """
    for net in nets:
        hsdp(net, **zero)
    tie_shards(nets, recipe.spec.tied(recipe.model))


def build_schedule(recipe, mesh, rank, zero):
    """The recipe's schedule with the stages of `rank` of `mesh`, whose axes are `MESH_AXES`; `zero` are the keyword
    arguments of `hsdp()`."""
    sizes = recipe.parallelism
    chunks = build_chunks(recipe, mesh, rank)
    hsdp_chunks(recipe, [net for _, net in chunks], zero)
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    stages = [
        PipelineStage(
            net, index, stage_num, mesh=mesh, compiled=recipe.context.mode == 0, tied=recipe.spec.tied(recipe.model)
        )
        for index, net in chunks
    ]
    kind = recipe_schedule(recipe)
    stages = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(stages, micro_batches_of_a_run(recipe), share_outputs=True)


def own_parameters(schedule):
    """This rank's parts of the Parameters of its stages, stage by stage, each once."""
    return list(dict.fromkeys(parameter for stage in schedule.stages for parameter in stage.parameters))


def pipeline_step_function(schedule, optimizer, max_norm, mesh, compiled, given, names):
    """The function that takes one step; see `step_function`, whose function has the same arguments and results.

    Gradients are reduced over data-parallel ranks once, after the last of the runs, as many as hsdp's
    `accumulate_grad_step`.

    Args:
        schedule: with this rank's stages; the ranks of the pipeline call this together.
        optimizer: an `AdamW` of `own_parameters(schedule)`.
        max_norm: of the gradients of all stages, see `ClipByGlobalNorm`.
        mesh: with the axis "pp".
        compiled: whether clipping and update are compiled, as the stages are.
        given: stage index -> what its Cell takes in a micro-batch, see `micro_batch`; of this rank's stages.
        names: of the arguments of the whole model; all but the first go to every stage by name.

    Raises:
        ValueError: on all ranks of the pipeline: stages that don't fit, or of which one has no program for this.
    """
    named = {stage: ((first,), dict(zip(names[1:], others, strict=True))) for stage, (first, *others) in given.items()}
    schedule.meet().prepare(schedule.table, named)
    counted = _first_of_each(schedule, [stage.counted for stage in schedule.stages])
    clip = ClipByGlobalNorm(optimizer.parameters, max_norm, mesh, ("pp",), counted)
    update = update_function(optimizer, clip, compiled)

    def step(arrays, rate, eps, decay):
        for stage in schedule.stages:
            stage.zero_gradients()
        losses = [schedule.run(first, **dict(zip(names[1:], others, strict=True))) for first, *others in zip(*arrays)]
        gradients = _first_of_each(schedule, [stage.gradients for stage in schedule.stages])
        return sum(losses) / len(losses), update(rate, eps, decay, *gradients)

    return step


def _first_of_each(schedule, by_stage):
    """What belongs to the stages' parameters, stage by stage, in the order of `own_parameters`: a tuple."""
    entries = {}
    for stage, values in zip(schedule.stages, by_stage, strict=True):
        for parameter, value in zip(stage.parameters, values, strict=True):
            entries.setdefault(parameter, value)
    return tuple(entries.values())
