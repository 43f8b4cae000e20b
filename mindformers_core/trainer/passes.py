"""The forward and backward passes of a step over a rank's Cells, stages of a pipeline: a whole model is one."""

from contextlib import ExitStack

import mindspore as ms

from mindformers_core.data.reading import micro_batch, passed_count
from mindformers_core.dtypes import dtype_name
from mindformers_core.operators.signature import tensor_meta
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.recipe.pipeline import recipe_schedule, stage_count
from mindformers_core.recipe.sections import batch_plan
from mindformers_core.sharding.inspecting import programs
from mindformers_core.sharding.parameter_storage import computing_dtype
from mindformers_core.sharding.sharded_cells import own_class


def pipeline_passes(recipe, mesh, cells, loss_scale):
    """`(parameters, run, clipping, forward)` of this rank's stages of a pipeline.

    `run(arrays)` returns the results of all runs, tuples that begin with the loss, and the reduced gradients of the
    parameters; `clipping` are keyword arguments of `ClipByGlobalNorm`. `forward(batches)` returns the results of the
    arrays of micro-batches, a list of at most as many as a run has, without gradients.

    Raises:
        TypeError, ValueError: a model that doesn't return the loss; on all ranks: stages that contradict each other.
    """
    stage_num, kind = stage_count(recipe), recipe_schedule(recipe)
    options = {"mesh": mesh, "compiled": recipe.context.mode == 0, "tied": recipe.spec.tied(recipe.model)}
    of_last = {"loss": recipe.spec.loss, "loss_scale": loss_scale}
    stages = [
        PipelineStage(net, index, stage_num, **options, **(of_last if index == stage_num - 1 else {}))
        for index, net in cells.items()
    ]
    given = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    schedule = kind(given, batch_plan(recipe, mesh.axis_size("dp")).micro_batches, share_outputs=True)
    names = recipe.spec.inputs[1:] if stage_num > 1 else ()  # one stage takes all arrays by place

    def arguments(arrays, first=1):  # so many of them, and those behind the named ones, go by place
        others = arrays[first:]
        return (*arrays[:first], *others[len(names) :]), dict(zip(names, others))

    metas = {index: _computed(micro_batch(recipe, net, index)) for index, net in cells.items()}
    given = {index: arguments(found, passed_count(recipe, index)) for index, found in metas.items()}
    schedule.meet().make_programs(schedule.table, given)
    _check_result(recipe, stages[-1])

    def run(arrays):
        losses = []
        for stage in stages:
            stage.zero_gradients()
        for batch in zip(*arrays, strict=True):
            args, kwargs = arguments(batch)
            losses.append(_several(schedule.run(*args, **kwargs)))
        gradients = _once_each(stages, "gradients")
        return losses, gradients if loss_scale is None else loss_scale.unscale(gradients)

    def forward(batches):
        with ExitStack() as held:
            for stage in stages:
                held.enter_context(stage.function.in_pynative())  # batches of other shapes would be compiled, too
            return _several(schedule.run_microbatches([*map(arguments, batches)], training=False))

    dtypes = {dtype_name(parameter.dtype) for net in cells.values() for parameter in net.get_parameters()}
    dtype = ms.float64 if "float64" in dtypes else ms.float32  # a stage may train nothing
    clipping = {"mesh": mesh, "over": ("pp",), "counted": _once_each(stages, "counted"), "dtype": dtype}
    return _once_each(stages, "parameters"), run, clipping, forward


def _check_result(recipe, stage):
    """Raise `TypeError` where the program of a pipeline's last stage returns no loss."""
    for program in programs(stage.cell)[-1:] if stage.is_last else ():  # none in an eager Cell
        result = program.graph.result
        if isinstance(result, dict) or program.results[0].shape:
            code = own_class(stage.cell).construct.__code__
            what = "a dict" if isinstance(result, dict) else f"a tensor of shape {program.results[0].shape}"
            raise TypeError(
                f"model.name: {recipe.model_name}: construct ({code.co_filename}:{code.co_firstlineno}) should return "
                f"the loss, a floating scalar, alone or first of a tuple: it returns {what}"
            )


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
