"""The recipe's model on this rank, whole or as stages of a pipeline, and one optimizer step over it."""

import mindspore as ms

from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.recompute import recompute, swap
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import (
    layers_of_stages,
    micro_batches_of_a_run,
    recipe_schedule,
    stages_held,
)
from mindformers_core.zero import hsdp, share_parts, value_and_grad

__all__ = ["build_cells", "pipeline_step_function", "step_function"]


def build_cells(recipe, mesh, rank, zero):
    """The recipe's model as `rank` of `mesh` holds it: sharded, under `hsdp()`, its values drawn from the seed.

    A parameter that several stages of the rank hold is stored and updated once.

    Args:
        recipe: the `Recipe`.
        mesh: with the axes `MESH_AXES`.
        rank: of a process.
        zero: keyword arguments of `hsdp()`.

    Returns:
        A dict, number of a stage -> its Cell, in order; without a pipeline 0 -> the model.
    """
    is_part, layers = recipe.parallelism.pipeline_parallel > 1, {0: None}
    if is_part:
        (pipeline_rank,), split = mesh.coordinate(rank, ("pp",)), layers_of_stages(recipe)
        layers = {stage: split[stage] for stage in stages_held(recipe, pipeline_rank)}
        mesh = mesh.sub_mesh(tuple(axis for axis in mesh.axis_names if axis != "pp"), rank)
    cells = {}
    for stage, part in layers.items():
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model, part).set_train()
        shard(net, mesh, recipe.parallelism, seed=recipe.training.seed, mode=recipe.context.engine)
        cells[stage] = swap(recompute(net, recipe.recompute, is_part=is_part), recipe.swap, is_part=is_part)
    for net in cells.values():
        hsdp(net, **zero)
    share_parts(list(cells.values()), recipe.spec.tied(recipe.model))
    return cells


def step_function(recipe, net):
    """The optimizer and the function that takes one step, without a pipeline.

    Forward and backward pass run once for every micro-batch. In graph mode they are one compiled function, and clipping
    and update another: the schedule of micro-steps and collectives of gradients stays in Python.

    Args:
        recipe: the `Recipe`.
        net: the model that `build_cells` made; called with the arrays of a batch, it gives the loss. Its program is
            made now.

    Returns:
        `(optimizer, step)`: an `AdamW` of `net.trainable_params()`, and a function of the tensors that the model is
        called with, a sequence, each of shape (micro-batches, samples of one, …) on this rank, as many micro-batches as
        hsdp's `accumulate_grad_step`; and of the float32 scalars of `AdamW.scalars`. It updates the parameters, and
        returns the mean loss and the gradients' norm before clipping, local tensors that are the same on all ranks.
    """
    optimizer = AdamW(net.trainable_params(), recipe.optimizer)
    gradient_of = value_and_grad(net, compiled=recipe.context.mode == 0)
    gradient_of.prepare(*micro_batch(recipe))
    update = _update_function(recipe, optimizer)

    def step(arrays, rate, eps, decay):
        losses, gradients = [], None
        for inputs in zip(*arrays, strict=True):
            assert gradients is None, f"{len(arrays[0])} micro-batches are more than accumulate_grad_step"
            loss, gradients = gradient_of(*inputs)
            losses.append(loss)
        return sum(losses) / len(losses), update(rate, eps, decay, *gradients)

    return optimizer, step


def pipeline_step_function(recipe, mesh, cells):
    """The same with this rank's stages of a pipeline, whose ranks call this together.

    Gradients are reduced over data-parallel ranks once, after the last of the runs, as many as hsdp's
    `accumulate_grad_step`.

    Args:
        recipe: the `Recipe`.
        mesh: with the axes `MESH_AXES`.
        cells: what `build_cells` returned.

    Raises:
        ValueError: on all ranks of the pipeline: stages that don't fit, or of which one has no program for this.
    """
    sizes, names, kind = recipe.parallelism, recipe.spec.inputs[1:], recipe_schedule(recipe)
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    options = {"mesh": mesh, "compiled": recipe.context.mode == 0, "tied": recipe.spec.tied(recipe.model)}
    stages = [PipelineStage(net, index, stage_num, **options) for index, net in cells.items()]
    several = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], micro_batches_of_a_run(recipe), share_outputs=True)
    optimizer = AdamW(list(_first_of_each(stages, [stage.parameters for stage in stages])), recipe.optimizer)
    given = {}
    for index in cells:
        first, *others = micro_batch(recipe, index)
        given[index] = (first,), dict(zip(names, others, strict=True))
    schedule.meet().prepare(schedule.table, given)
    counted = _first_of_each(stages, [stage.counted for stage in stages])
    update = _update_function(recipe, optimizer, mesh=mesh, over=("pp",), counted=counted)

    def step(arrays, rate, eps, decay):
        for stage in stages:
            stage.zero_gradients()
        losses = [schedule.run(first, **dict(zip(names, others, strict=True))) for first, *others in zip(*arrays)]
        gradients = _first_of_each(stages, [stage.gradients for stage in stages])
        return sum(losses) / len(losses), update(rate, eps, decay, *gradients)

    return optimizer, step


def _first_of_each(stages, by_stage):
    """What belongs to the parameters of stages, given stage by stage, once for each parameter: a tuple."""
    entries = {}
    for stage, values in zip(stages, by_stage, strict=True):
        for parameter, value in zip(stage.parameters, values, strict=True):
            entries.setdefault(parameter, value)
    return tuple(entries.values())


def _update_function(recipe, optimizer, **settings):
    """The function of the scalars of `AdamW.scalars` and of all reduced gradients, one by one, that clips, updates,
    and returns the norm before clipping.

    In graph mode it is compiled at its first call. Numbers that change from step to step are tensors, so that it is
    compiled once.

    Args:
        recipe: the `Recipe`.
        optimizer: an `AdamW`.
        settings: keyword arguments of `ClipByGlobalNorm`.
    """
    clip = ClipByGlobalNorm(optimizer.parameters, recipe.training.max_norm, **settings)

    def update(rate, eps, decay, *gradients):  # one by one: tensors in a tuple would be compiled in as constants
        clipped, norm = clip(gradients)
        optimizer(clipped, rate, eps, decay)
        return norm

    return jit(update) if recipe.context.mode == 0 else update
