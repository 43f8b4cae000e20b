"""The recipe's model on this rank, whole or as stages of a pipeline, and one optimizer step over it."""

import mindspore as ms

from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.recompute import recompute, swap
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import layers_of_rank, micro_batches_of_a_run, recipe_schedule
from mindformers_core.trainer.zero_recipe import zero_settings
from mindformers_core.zero import hsdp, tie_shards, value_and_grad

__all__ = ["build_cells", "pipeline_step_function", "step_function"]


def build_cells(recipe, mesh, rank):
    """The stages of the recipe's model on `rank` of `mesh`: sharded, under `hsdp()`, initialized from the seed.

    Stages of a rank that share a parameter store and update it once. The axes of `mesh` are `MESH_AXES`.

    Returns:
        A dict, number of a stage -> its Cell, in order; without a pipeline 0 -> the model.
    """
    is_part, layers, zero = recipe.parallelism.pipeline_parallel > 1, {0: None}, zero_settings(recipe, mesh)
    if is_part:
        layers = layers_of_rank(recipe, *mesh.coordinate(rank, ("pp",)))
        mesh = mesh.sub_mesh(tuple(axis for axis in mesh.axis_names if axis != "pp"), rank)
    cells = {}
    for stage, part in layers.items():
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model, part).set_train()
        shard(net, mesh, recipe.parallelism, seed=recipe.training.seed, mode=recipe.context.engine)
        cells[stage] = swap(recompute(net, recipe.recompute, is_part=is_part), recipe.swap, is_part=is_part)
    for net in cells.values():
        hsdp(net, **zero)
    tie_shards(list(cells.values()), recipe.spec.tied(recipe.model))
    return cells


def step_function(recipe, net):
    """The optimizer and the function of one step, without a pipeline; the program of the model is generated.

    Forward and backward pass run once for every micro-batch. In graph mode both passes are one compiled function, and
    clipping and update another: the sequence of micro-steps and the collectives of gradients are run by Python.

    Args:
        recipe: the `Recipe`.
        net: the model, from `build_cells`: a function of the arrays of a micro-batch that returns the loss.

    Returns:
        `(optimizer, step)`: an `AdamW` of `net.trainable_params()`, and a function that updates the parameters. Its
        arguments are the local inputs of the model, a sequence of tensors of shape (micro-batches, samples of one, …),
        with as many micro-batches as hsdp's `accumulate_grad_step`, and the float32 scalars of `AdamW.scalars`. Results
        are the mean loss and the gradients' norm before clipping, local tensors that are equal on all ranks.
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
    """As `step_function`, with this rank's stages of a pipeline; all ranks of the pipeline call this.

    A step is as many runs of the schedule as hsdp's `accumulate_grad_step`; gradients are reduced over data-parallel
    ranks after the last. The axes of `mesh` are `MESH_AXES`, and `cells` are from `build_cells`.

    Raises:
        ValueError: on all ranks of the pipeline: stages that contradict each other, or a stage without a program.
    """
    sizes, names, kind = recipe.parallelism, recipe.spec.inputs[1:], recipe_schedule(recipe)
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    options = {"mesh": mesh, "compiled": recipe.context.mode == 0, "tied": recipe.spec.tied(recipe.model)}
    stages = [PipelineStage(net, index, stage_num, **options) for index, net in cells.items()]
    several = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], micro_batches_of_a_run(recipe), share_outputs=True)
    optimizer = AdamW(_once_each(stages, "parameters"), recipe.optimizer)
    inputs = {index: micro_batch(recipe, index) for index in cells}
    given = {index: ((first,), dict(zip(names, others, strict=True))) for index, (first, *others) in inputs.items()}
    schedule.meet().make_programs(schedule.table, given)
    update = _update_function(recipe, optimizer, mesh=mesh, over=("pp",), counted=_once_each(stages, "counted"))

    def step(arrays, rate, eps, decay):
        for stage in stages:
            stage.zero_gradients()
        losses = [schedule.run(first, **dict(zip(names, others, strict=True))) for first, *others in zip(*arrays)]
        return sum(losses) / len(losses), update(rate, eps, decay, *_once_each(stages, "gradients"))

    return optimizer, step


def _once_each(stages, attribute):
    """The entries of an attribute of stages, which has one for every parameter, without those of tied parameters."""
    entries = {}
    for stage in stages:
        for parameter, value in zip(stage.parameters, getattr(stage, attribute), strict=True):
            entries.setdefault(parameter, value)
    return list(entries.values())


def _update_function(recipe, optimizer, **settings):
    """A function that clips the reduced gradients, updates the parameters, and returns the norm before clipping.

    It takes the scalars of `AdamW.scalars`, tensors, so that graph mode compiles it once, and the gradients one by one.
    `settings` are keyword arguments of `ClipByGlobalNorm`.
    """
    clip = ClipByGlobalNorm(optimizer.parameters, recipe.training.max_norm, **settings)

    def update(rate, eps, decay, *gradients):  # one by one: tensors in a tuple would be compiled in as constants
        clipped, norm = clip(gradients)
        optimizer(clipped, rate, eps, decay)
        return norm

    return jit(update) if recipe.context.mode == 0 else update
