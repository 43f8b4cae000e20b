"""The recipe's model as a pipeline: this rank's stages, their schedule, and one optimizer step over it."""

import mindspore as ms

from mindformers_core.models import LlamaForCausalLM, tied_paths
from mindformers_core.models.layer_specs import stage_index
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.activations import with_activations
from mindformers_core.trainer.pipeline_recipe import micro_batches_of_a_run, model_part, recipe_schedule
from mindformers_core.trainer.step import update_function
from mindformers_core.zero import hsdp, share_parts

__all__ = ["build_chunks", "build_schedule", "hsdp_chunks", "own_parameters", "pipeline_step_function"]


def build_chunks(recipe, mesh, rank):
    """`[(stage index, Cell), …]`: the chunks of the recipe's model that `rank` of `mesh` holds, sharded, in order."""
    (pipeline_rank,) = mesh.coordinate(rank, ("pp",))
    config = model_part(recipe, pipeline_rank)
    inner = mesh.sub_mesh(tuple(axis for axis in mesh.axis_names if axis != "pp"), rank)
    chunks = []
    for chunk in range(config.virtual_pipeline):
        chunk = chunk if config.virtual_pipeline > 1 else None
        with ms.DeviceCtx("meta"):
            net = LlamaForCausalLM(config, vp_stage=chunk).set_train()
        shard(net, inner, recipe.parallelism, seed=recipe.training.seed, mode=recipe.context.engine)
        chunks.append((stage_index(config, chunk), with_activations(net, recipe)))
    return chunks


def hsdp_chunks(recipe, nets, zero):
    """Call `hsdp()` with the chunks of a rank; a parameter that several hold is stored and updated once.

    Args:
        recipe: the `Recipe`.
        nets: the Cells, in order.
        zero: keyword arguments of `hsdp()`.
    """
    for net in nets:
        hsdp(net, **zero)
    share_parts(nets, tied_paths(recipe.model))


def build_schedule(recipe, mesh, rank, zero):
    """The recipe's schedule with the stages of `rank` of `mesh`, whose axes are `MESH_AXES`; `zero` are the keyword
    arguments of `hsdp()`."""
    sizes = recipe.parallelism
    chunks = build_chunks(recipe, mesh, rank)
    hsdp_chunks(recipe, [net for _, net in chunks], zero)
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    stages = [
        PipelineStage(
            net, index, stage_num, mesh=mesh, compiled=recipe.context.mode == 0, tied=tied_paths(recipe.model)
        )
        for index, net in chunks
    ]
    kind = recipe_schedule(recipe)
    stages = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(stages, micro_batches_of_a_run(recipe), share_outputs=True)


def own_parameters(schedule):
    """This rank's parts of the Parameters of its stages, stage by stage, each once."""
    return list(dict.fromkeys(parameter for stage in schedule.stages for parameter in stage.parameters))


def pipeline_step_function(schedule, optimizer, max_norm, mesh, compiled, given):
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

    Raises:
        ValueError: on all ranks of the pipeline: stages that don't fit, or of which one has no program for this.
    """
    named = {stage: ((first,), {"labels": labels}) for stage, (first, labels) in given.items()}
    schedule.meet().prepare(schedule.table, named)
    counted = _first_of_each(schedule, [stage.counted for stage in schedule.stages])
    clip = ClipByGlobalNorm(optimizer.parameters, max_norm, mesh, ("pp",), counted)
    update = update_function(optimizer, clip, compiled)

    def step(input_ids, labels, rate, eps, decay):
        for stage in schedule.stages:
            stage.zero_gradients()
        losses = [schedule.run(ids, labels=targets) for ids, targets in zip(input_ids, labels)]
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
