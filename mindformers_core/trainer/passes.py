"""The forward and backward passes of a step over a rank's Cells: one after the other, or by a pipeline's schedule.

One stage is no pipeline of one: `value_and_grad` reduces gradients while the backward pass goes on, and frees each
whole one then; a stage, whose micro-batches may overlap, holds all of a pass, which at ZeRO 2 and 3 is more memory.
"""

import mindspore as ms

from mindformers_core.data.reading import micro_batch
from mindformers_core.dtypes import dtype_name
from mindformers_core.operators.signature import tensor_meta
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.recipe.pipeline import recipe_schedule
from mindformers_core.recipe.sections import batch_plan
from mindformers_core.sharding.inspecting import programs
from mindformers_core.sharding.parameter_storage import computing_dtype
from mindformers_core.sharding.sharded_cells import own_class
from mindformers_core.zero import value_and_grad


def model_passes(recipe, mesh, cells, loss_scale):
    """`(parameters, run, clipping, forward)` without a pipeline.

    `run(arrays)` returns the results of all runs, tuples that begin with the loss, and the reduced gradients of the
    parameters; `clipping` are keyword arguments of `ClipByGlobalNorm`. `forward(batches)` returns the results of the
    arrays of micro-batches, a list of at most as many as a run has, without gradients.
    """
    gradient_of = value_and_grad(cells[0], recipe.context.mode == 0, loss_scale, recipe.spec.loss)
    gradient_of.prepare(*_computed(micro_batch(recipe, cells[0])))
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
            losses.append(_several(results))
        return losses, gradients

    def forward(batches):
        return tuple(each.to_local() for each in _several(cells[0](*batches[0])))

    return cells[0].trainable_params(), run, {}, forward


def pipeline_passes(recipe, mesh, cells, loss_scale):
    """As `model_passes`, with this rank's stages of a pipeline."""
    sizes, names, kind = recipe.parallelism, recipe.spec.inputs[1:], recipe_schedule(recipe)
    stage_num = sizes.pipeline_parallel * sizes.pipeline_parallel_interleave_num
    options = {"mesh": mesh, "compiled": recipe.context.mode == 0, "tied": recipe.spec.tied(recipe.model)}
    of_last = {"loss": recipe.spec.loss, "loss_scale": loss_scale}
    stages = [
        PipelineStage(net, index, stage_num, **options, **(of_last if index == stage_num - 1 else {}))
        for index, net in cells.items()
    ]
    several = issubclass(kind, PipelineScheduleMulti)
    plan = batch_plan(recipe, mesh.axis_size("dp"))
    schedule = kind(stages if several else stages[0], plan.micro_batches, share_outputs=True)
    inputs = {index: _computed(micro_batch(recipe, net, index)) for index, net in cells.items()}
    given = {index: ((first,), dict(zip(names, others))) for index, (first, *others) in inputs.items()}
    schedule.meet().make_programs(schedule.table, given)

    def run(arrays):
        for stage in stages:
            stage.zero_gradients()
        losses = [schedule.run(first, **dict(zip(names, others))) for first, *others in zip(*arrays)]
        gradients = _once_each(stages, "gradients")
        gradients = gradients if loss_scale is None else loss_scale.unscale(gradients)
        return [*map(_several, losses)], gradients

    def forward(batches):
        batches = [((first,), dict(zip(names, others))) for first, *others in batches]
        return _several(schedule.run_microbatches(batches, training=False))

    counted = _once_each(stages, "counted")
    dtypes = {dtype_name(parameter.dtype) for net in cells.values() for parameter in net.get_parameters()}
    dtype = ms.float64 if "float64" in dtypes else ms.float32  # a stage may train nothing
    clipping = {"mesh": mesh, "over": ("pp",), "counted": counted, "dtype": dtype}
    return _once_each(stages, "parameters"), run, clipping, forward


def _several(results):
    """Results as a tuple, which may be a loss alone."""
    return results if isinstance(results, tuple) else (results,)


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
