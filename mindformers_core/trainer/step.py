"""The recipe's model on this rank, whole or as stages of a pipeline, and one optimizer step over it."""

import math

import mindspore as ms
from mindspore import ops

from mindformers_core.communication.world import process_state
from mindformers_core.operators.signature import tensor_meta
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.recompute import recompute, swap
from mindformers_core.sharding.inspecting import programs
from mindformers_core.sharding.parameter_storage import computing_dtype
from mindformers_core.sharding.sharded_cells import own_class
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.data import micro_batch
from mindformers_core.trainer.pipeline_recipe import layers_of_rank, micro_batches_of_a_run, recipe_schedule
from mindformers_core.trainer.recipe_checks import recipe_device_model
from mindformers_core.trainer.zero_recipe import zero_settings
from mindformers_core.zero import hsdp, tie_shards, value_and_grad
from mindformers_core.zero.loss_scale import LossScale, all_finite


def build_cells(recipe, mesh, rank):
    """The stages of the recipe's model on `rank` of `mesh`: sharded, under `hsdp()`, initialized from the seed.

    Stages of a rank that share a parameter store and update it once. The axes of `mesh` are `MESH_AXES`.

    Returns:
        A dict, number of a stage -> its Cell, in order; without a pipeline 0 -> the model.
    """
    zero, cells = zero_settings(recipe, mesh), {}
    layers, mesh, is_part = stages_of(recipe, mesh, rank)
    for stage, part in layers.items():
        with ms.DeviceCtx("meta"):
            net = recipe.spec.build(recipe.model, part).set_train()
        shard(net, mesh, recipe.parallelism, **shard_settings(recipe))
        cells[stage] = swap(recompute(net, recipe.recompute, is_part=is_part), recipe.swap, is_part=is_part)
    for net in cells.values():
        hsdp(net, **zero)
    tie_shards(list(cells.values()), recipe.spec.tied(recipe.model))
    return cells


def shard_settings(recipe):
    """The keywords of `shard()` that a recipe gives."""
    model = recipe_device_model(recipe)
    return {"seed": recipe.training.seed, "mode": recipe.context.engine, "device_model": model}


def loss_scale_of(recipe, mesh):
    """The `LossScale` of a recipe, or None."""
    start, training = recipe.precision.loss_scale, recipe.training
    if start is None and recipe.precision.compute == "float16":
        labels = training.local_batch_size * mesh.axis_size("dp") * recipe.train_dataset.seq_length
        labels = labels // micro_batches_of_a_run(recipe) if recipe.spec.loss == "sum" else 1
        start = max(1.0, 2.0 ** (17 - labels.bit_length()))
    return None if start is None else LossScale(ms.amp.DynamicLossScaler(start, 2, 2000), mesh)


def stages_of(recipe, mesh, rank):
    """A dict, number of a stage of `rank` -> its `LayerRange`, without a pipeline 0 -> None; the mesh of the ranks that
    share these stages; and whether there is a pipeline.
    """
    if recipe.parallelism.pipeline_parallel == 1:
        return {0: None}, mesh, False
    layers = layers_of_rank(recipe, *mesh.coordinate(rank, ("pp",)))
    return layers, mesh.sub_mesh(tuple(axis for axis in mesh.axis_names if axis != "pp"), rank), True


def step_parts(recipe, mesh, cells, loss_scale=None):
    """One optimizer step of a rank, part by part, whose programs are generated; all ranks of a pipeline call this.

    Forward and backward pass run once for every micro-batch; in a pipeline, the schedule runs once for every batch of
    micro-batches. Gradients are reduced over data-parallel ranks after the last run, whose number is hsdp's
    `accumulate_grad_step`.

    Args:
        recipe: the `Recipe`.
        mesh: with the axes `MESH_AXES`.
        cells: from `build_cells`; the model is a function of the arrays of a micro-batch that returns the loss.
        loss_scale: a `LossScale`. Default: none.

    Returns:
        `(run, clip, optimizer)`: a function of the local inputs of the model, a sequence of tensors of shape (runs,
        samples of one, …), that returns the results of all runs and the reduced gradients of the parameters, None where
        the loss scale finds one that isn't finite; the
        `ClipByGlobalNorm`, and the `AdamW` of the trainable parameters.

    Raises:
        ValueError: on all ranks of the pipeline: stages that contradict each other, or a stage without a program.
    """
    functions = _model_function if recipe.parallelism.pipeline_parallel == 1 else _schedule_function
    parameters, run, clipping = functions(recipe, mesh, cells, loss_scale)
    optimizer = AdamW(parameters, recipe.optimizer)
    return run, ClipByGlobalNorm(optimizer.parameters, recipe.training.max_norm, **clipping), optimizer


def step_function(recipe, mesh, cells, loss_scale=None):
    """The optimizer and the function of one step; arguments and errors as of `step_parts`.

    In graph mode both passes of a model or stage are compiled functions, and clipping and update are another: the
    sequence of runs and the collectives of gradients are run by Python.

    Returns:
        `(optimizer, step)`: an `AdamW` of the trainable parameters of this rank, and a function that updates them. Its
        arguments are the local inputs of the model, as of `step_parts`, the float32 scalars of `AdamW.scalars`, and a
        function to call before the update.
        Results are the mean loss and the gradients' norm before clipping, floats that are equal on all ranks, and None.
        Where one of them isn't finite, no rank updates anything, and in place of None are the paths of this rank's
        parameters whose gradients aren't, in the order of the backward pass. Where the loss scale skips the step, the
        norm is infinite, with None.
    """
    run, clip, optimizer = step_parts(recipe, mesh, cells, loss_scale)

    def norm_of(*gradients):  # one by one: tensors in a tuple would be compiled in as constants
        return clip.norm(gradients)

    def update(rate, eps, decay, norm, *gradients):
        optimizer(clip.clipped(gradients, norm), rate, eps, decay)

    norm_of, update = map(jit, (norm_of, update)) if recipe.context.mode == 0 else (norm_of, update)

    def step(arrays, rate, eps, decay, before_update):
        results, gradients = run(arrays)
        loss = mean_loss(results, recipe.spec.loss)
        if gradients is None:
            return float(loss.asnumpy()), math.inf, None
        norm = norm_of(*gradients)
        _hold(optimizer, {"reduced gradient": gradients})
        numbers = float(loss.asnumpy()), float(norm.asnumpy())
        if not all(map(math.isfinite, numbers)):
            pairs = zip(reversed(optimizer.parameters), reversed(gradients))
            return *numbers, [parameter.name for parameter, each in pairs if not all_finite(None, (each,))]
        before_update()
        update(rate, eps, decay, norm, *gradients)
        for what, number in {"loss": loss, "gradient norm": norm, "rate": rate, "decay": decay}.items():
            process_state().observer.held(what, number)
        moments = {"moment 1": optimizer.moments1, "moment 2": optimizer.moments2}
        _hold(optimizer, {**moments, "parameter": optimizer.parameters})
        return *numbers, None

    return optimizer, step


def mean_loss(results, form):
    """The loss of a step, from the results of its runs; `form`: see `ModelSpec.loss`."""
    losses, *others = zip(*results)
    return sum(losses) / (ops.maximum(sum(others[0]), 1) if form == "sum" else len(losses))


def _hold(optimizer, computed):
    """Give the observer what a step has computed for the parameters: a dict, name -> tensors."""
    for what, tensors in computed.items():
        for parameter, tensor in zip(optimizer.parameters, tensors, strict=True):
            process_state().observer.held(what, tensor, parameter)


def _model_function(recipe, mesh, cells, loss_scale):
    """`(parameters, run, clipping)` without a pipeline.

    `run(arrays)` returns the results of all runs, tuples that begin with the loss, and the reduced gradients of the
    parameters; `clipping` are keyword arguments of `ClipByGlobalNorm`.
    """
    gradient_of = value_and_grad(cells[0], recipe.context.mode == 0, loss_scale, recipe.spec.loss)
    gradient_of.prepare(*_computed(micro_batch(recipe)))
    for program in programs(cells[0])[-1:]:  # none in an eager Cell
        if isinstance(program.graph.result, dict) or program.results[0].shape:
            code, result = own_class(cells[0]).construct.__code__, program.graph.result
            what = "a dict" if isinstance(result, dict) else f"a tensor of shape {program.results[0].shape}"
            raise TypeError(
                f"model.name: {recipe.model_name}: construct ({code.co_filename}:{code.co_firstlineno}) should return "
                f"the loss, a floating scalar, alone or first of a tuple: it returns {what}"
            )

    def run(arrays):
        losses, gradients = [], None
        for inputs in zip(*arrays, strict=True):
            assert gradients is None, f"{len(arrays[0])} micro-batches are more than accumulate_grad_step"
            results, gradients = gradient_of(*inputs)
            losses.append(results if isinstance(results, tuple) else (results,))
        return losses, gradients

    return cells[0].trainable_params(), run, {}


def _schedule_function(recipe, mesh, cells, loss_scale):
    """As `_model_function`, with this rank's stages of a pipeline."""
    sizes, names, kind = recipe.parallelism, recipe.spec.inputs[1:], recipe_schedule(recipe)
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    options = {"mesh": mesh, "compiled": recipe.context.mode == 0, "tied": recipe.spec.tied(recipe.model)}
    of_last = {"loss": recipe.spec.loss, "loss_scale": loss_scale}
    stages = [
        PipelineStage(net, index, stage_num, **options, **(of_last if index == stage_num - 1 else {}))
        for index, net in cells.items()
    ]
    several = issubclass(kind, PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], micro_batches_of_a_run(recipe), share_outputs=True)
    inputs = {index: _computed(micro_batch(recipe, index)) for index in cells}
    given = {index: ((first,), dict(zip(names, others, strict=True))) for index, (first, *others) in inputs.items()}
    schedule.meet().make_programs(schedule.table, given)

    def run(arrays):
        for stage in stages:
            stage.zero_gradients()
        losses = [schedule.run(first, **dict(zip(names, others, strict=True))) for first, *others in zip(*arrays)]
        gradients = _once_each(stages, "gradients")
        gradients = gradients if loss_scale is None else loss_scale.unscale(gradients)
        return [each if isinstance(each, tuple) else (each,) for each in losses], gradients

    counted = _once_each(stages, "counted")
    return _once_each(stages, "parameters"), run, {"mesh": mesh, "over": ("pp",), "counted": counted}


def _computed(metas):
    """`TensorMeta`s in the dtypes to compute with."""
    return [tensor_meta(each.shape, computing_dtype(each.dtype)) for each in metas]


def _once_each(stages, attribute):
    """The entries of an attribute of stages, which has one for every parameter, without those of tied parameters."""
    entries = {}
    for stage in stages:
        for parameter, value in zip(stage.parameters, getattr(stage, attribute), strict=True):
            entries.setdefault(parameter, value)
    return list(entries.values())
