"""One optimizer step over a rank's Cells: passes, clipping, update."""

import math
from collections import Counter

from mindspore import ops

from mindformers_core.checkpoint.tensors import states_of
from mindformers_core.communication.world import process_state
from mindformers_core.optimizers.average import AveragedWeights
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.tensor_parallel import jit
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.trainer.passes import pipeline_passes
from mindformers_core.zero.loss_scale import is_finite


def step_parts(recipe, mesh, cells, loss_scale=None):
    """One optimizer step of a rank, part by part, whose programs are generated; all ranks of a pipeline call this.

    The pipeline's schedule runs once for every batch of micro-batches, of which a model that isn't cut has one.
    Gradients are reduced over data-parallel ranks by the last run, whose number is hsdp's `accumulate_grad_step`.

    Args:
        mesh: with the axes `MESH_AXES`.
        cells: from `build_cells`; the model is a function of the arrays of a micro-batch that returns the loss.
        loss_scale: a `LossScale`. Default: none.

    Returns:
        `(run, clip, optimizer, forward)`: a function of the local inputs of the model, a sequence of tensors of shape
        (runs, samples of one, …), that returns the results of all runs and the reduced gradients of the parameters,
        None where the loss scale finds one that isn't finite; the `ClipByGlobalNorm`; the `GroupedOptimizer` of the
        trainable parameters; and `forward` of `pipeline_passes`.

    Raises:
        ValueError: on all ranks of the pipeline: stages that contradict each other, or a stage without a program.
    """
    parameters, run, clipping, forward = pipeline_passes(recipe, mesh, cells, loss_scale)
    optimizer = GroupedOptimizer(parameters, recipe.optimizer)
    if recipe.training.average_decay is not None:
        optimizer.average = AveragedWeights(parameters, recipe.training.average_decay)
    clip = ClipByGlobalNorm(optimizer.parameters, recipe.training.max_norm, **clipping)
    return run, clip, optimizer, forward


def step_function(recipe, mesh, cells, loss_scale=None):
    """The optimizer and the function of one step; arguments and errors as of `step_parts`.

    In graph mode both passes of a model or stage are compiled functions, and clipping and update are another: the
    sequence of runs and the collectives of gradients are run by Python.

    Returns:
        `(optimizer, step, forward)`: the `GroupedOptimizer` of the trainable parameters of this rank, a function that
        updates them, and `forward` of `pipeline_passes`. The function's arguments are the local inputs of the model, as
        of `step_parts`, the optimizer's `scalars`, and a function to call before the update. Results are the mean loss,
        a tensor, which nobody has read, the gradients' norm before clipping, a float, both equal on all ranks, None,
        and tensors for the row: norms of `monitor.gradient_norms`, and what the model's `after_step` returns.
        Where one of the first two isn't finite, no rank updates anything, and in place of None are the paths of this
        rank's parameters whose gradients aren't, in the order of the backward pass. Where the loss scale skips the
        step, the norm is infinite, with None.
    """
    run, clip, optimizer, forward = step_parts(recipe, mesh, cells, loss_scale)
    watched = {f"gradient_norm {pattern}": clip.of_names((pattern,)) for pattern in recipe.monitor.gradient_norms}

    def norm_of(*gradients):  # one by one: tensors in a tuple would be compiled in as constants
        norms = (clip.norm(gradients),)
        for each in watched.values():
            norms = norms + (each.norm(gradients),)
        return norms

    count, states, average = len(optimizer.scalar_names), _numbered_states(optimizer), optimizer.average

    def update(norm, *tensors):
        optimizer(clip.clipped(tensors[count:], norm), *tensors[:count])
        if average is not None:
            average()

    norm_of, update = map(jit, (norm_of, update)) if recipe.context.mode == 0 else (norm_of, update)

    def step(arrays, scalars, before_update):
        results, gradients = run(arrays)
        loss = mean_loss(results, recipe.spec.loss)
        if gradients is None:
            return loss, math.inf, None, {}
        norm, *norms = norm_of(*gradients)
        row = dict(zip(watched, norms))
        _hold(optimizer, {"reduced gradient": gradients})
        # the one number that a step reads: with a loss that isn't finite it isn't either
        number = float((norm + loss * 0).asnumpy())
        if not math.isfinite(number):
            pairs = zip(reversed(optimizer.parameters), reversed(gradients))
            names = [parameter.name for parameter, each in pairs if not is_finite(each)]
            return loss, float(norm.asnumpy()), names, row
        before_update()
        update(norm, *scalars, *gradients)
        row |= _after_step(cells, results)
        named = dict(zip(optimizer.scalar_names, scalars, strict=True))
        for what, scalar in {"loss": loss, "gradient norm": norm, **named}.items():
            process_state().observer.held(what, scalar)
        for what, state, parameter in states:
            process_state().observer.held(what, state, parameter)
        _hold(optimizer, {"parameter": optimizer.parameters})
        return loss, number, None, row

    return optimizer, step, forward


def _after_step(cells, results):
    """What the Cells' `after_step` returns for the results of all runs: sums of scalars, and joined tensors."""
    found = {}
    for net in cells.values():
        if hasattr(net, "after_step") and len(results[0]) > 2:
            parts = zip(*results)
            found |= net.after_step(*(ops.cat(each, 0) if each[0].ndim else sum(each[1:], each[0]) for each in parts))
    return found


def mean_loss(results, form):
    """The loss of a step, from the results of its runs; `form`: see `ModelSpec.loss`."""
    losses, *others = zip(*results)
    return sum(losses) / (ops.maximum(sum(others[0]), 1) if form == "sum" else len(losses))


def _numbered_states(optimizer):
    """`("moment 1", state, parameter)` of the states that lie with a parameter, by their number there."""
    seen, placed = Counter(), [(state, parameter) for state, parameter in states_of(optimizer) if parameter is not None]
    numbers = [seen.update((parameter.name,)) or seen[parameter.name] for _, parameter in placed]
    return [(f"moment {number}", *pair) for number, pair in zip(numbers, placed)]


def _hold(optimizer, computed):
    """Give the observer what a step has computed for the parameters: a dict, name -> tensors."""
    for what, tensors in computed.items():
        for parameter, tensor in zip(optimizer.parameters, tensors, strict=True):
            process_state().observer.held(what, tensor, parameter)
