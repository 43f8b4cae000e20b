"""The recipe's model as a pipeline: this rank's stages, their schedule, and one optimizer step over it."""

import mindspore as ms

from mindformers_core.models import LlamaForCausalLM, tied_paths
from mindformers_core.models.layer_specs import stage_index
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.pipeline_recipe import micro_batches_of_a_run, model_part, recipe_schedule

__all__ = ["build_chunks", "build_schedule", "own_parameters", "pipeline_step_function"]


def build_chunks(recipe, mesh, rank):
    """`[(stage index, Cell), …]`: the chunks of the recipe's model that `rank` of `mesh` holds, sharded, in order."""
    (pipeline_rank,) = mesh.coordinate(rank, ("pp",))
    config = model_part(recipe, pipeline_rank)
    inner = mesh.sub_mesh(tuple(axis for axis in mesh.axis_names if axis != "pp"), rank)
    chunks = []
    for chunk in range(config.virtual_pipeline):
        chunk = chunk if config.virtual_pipeline > 1 else None
        with ms.DeviceCtx("meta"):
            net = LlamaForCausalLM(config, vp_stage=chunk)
        shard(net, inner, recipe.parallelism, seed=recipe.training.seed, mode=recipe.context.engine)
        chunks.append((stage_index(config, chunk), net))
    _share_tied([net for _, net in chunks])
    return chunks


def _share_tied(nets):
    """Let Cells on one rank hold a parameter of the same path together, so that it is there and updated once."""
    known = {}
    for net in nets:
        for path, cell in net.cells_and_names():
            for name, parameter in cell._params.items():
                cell._params[name] = known.setdefault((path, name), parameter)


def build_schedule(recipe, mesh, rank):
    """The recipe's schedule with the stages of `rank` of `mesh`, whose axes are `MESH_AXES`."""
    sizes = recipe.parallelism
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    stages = [
        PipelineStage(
            net, index, stage_num, mesh=mesh, compiled=recipe.context.mode == 0, tied=tied_paths(recipe.model)
        )
        for index, net in build_chunks(recipe, mesh, rank)
    ]
    kind = recipe_schedule(recipe)
    stages = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    return kind(stages, micro_batches_of_a_run(recipe), share_outputs=True)


def own_parameters(schedule):
    """The Parameters of this rank's stages, stage by stage, each once."""
    return list(dict.fromkeys(parameter for stage in schedule.stages for parameter in stage.parameters))


def pipeline_step_function(schedule, optimizer, max_norm, mesh, compiled):
    """The function that takes one step; see `step_function`, whose function has the same arguments and results.

    Args:
        schedule: with this rank's stages; the ranks of the pipeline call this together.
        optimizer: an `AdamW` of `own_parameters(schedule)`.
        max_norm: of the gradients of all stages, see `ClipByGlobalNorm`.
        mesh: with the axis "pp".
        compiled: whether clipping and update are compiled, as the stages are.
    """
    schedule.meet()
    counted = _first_of_each(schedule, [stage.counted for stage in schedule.stages])
    clip = ClipByGlobalNorm(optimizer.parameters, max_norm, mesh, ("pp",), counted)

    def update(gradients, count, rate, eps, decay):
        averaged = ()
        for gradient in gradients:
            averaged = averaged + (gradient / count,)
        clipped, norm = clip(averaged)
        optimizer(clipped, rate, eps, decay)
        return norm

    run_update = jit(update) if compiled else update

    def step(input_ids, labels, rate, eps, decay):
        for stage in schedule.stages:
            stage.zero_gradients()
        losses = [schedule.run(ids, labels=targets) for ids, targets in zip(input_ids, labels)]
        gradients = _first_of_each(schedule, [stage.gradients for stage in schedule.stages])
        norm = run_update(gradients, ms.Tensor(float(len(losses)), ms.float32), rate, eps, decay)
        return sum(losses) / len(losses), norm

    return step


def _first_of_each(schedule, by_stage):
    """What belongs to the stages' parameters, stage by stage, in the order of `own_parameters`: a tuple."""
    entries = {}
    for stage, values in zip(schedule.stages, by_stage, strict=True):
        for parameter, value in zip(stage.parameters, values, strict=True):
            entries.setdefault(parameter, value)
    return tuple(entries.values())
