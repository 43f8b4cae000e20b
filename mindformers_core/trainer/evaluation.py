"""Evaluation on held-out samples: the loss of one card on any mesh, whatever the last batch is."""

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby

import mindspore as ms

from mindformers_core.data.datasets import dataset_of
from mindformers_core.data.reading import batch_layouts, local_batch
from mindformers_core.lazy_exports import import_object
from mindformers_core.recipe.loader import evaluated
from mindformers_core.scopes import errors_at, replaced
from mindformers_core.sharding.sharded_cells import tree_of


class Loss:
    """The built-in `Metric`: the mean loss over all labels, or over all samples where the model returns a mean.

    Args:
        form: `ModelSpec.loss`.
    """

    def __init__(self, form):
        self._form, self._total, self._count = form, 0.0, 0.0

    def update(self, results, samples):
        """See `Metric`."""
        is_sum = self._form == "sum"
        self._total += results[0] if is_sum else results[0] * samples
        self._count += results[1] if is_sum else samples

    def compute(self):
        """See `Metric`: `loss`, and `perplexity`, its exponential."""
        loss = self._total / max(self._count, 1)
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


class Evaluator:
    """Evaluates the Cells of a job; all ranks call it alike.

    Args:
        recipe: the `Recipe`, with a section `evaluation`.
        plan: the `BatchPlan` of a step.
        rank: this rank's number.
        cells: from `build_cells`.
        forward: see `model_passes`.
        dataset: see `dataset_of`. Default: that of `evaluation.dataset`.

    Raises:
        ValueError, FileNotFoundError: there is no such dataset, or no such metric.
    """

    def __init__(self, recipe, plan, rank, cells, forward, dataset=None):
        self._recipe, self._plan, self._rank, self._cells, self._forward = recipe, plan, rank, cells, forward
        self._layouts = batch_layouts(recipe, cells)
        self._alike = [each.replace(dims=[_without_dp(dim) for dim in each.dims]) for each in self._layouts]
        with errors_at("evaluation.metrics: ", kinds=ValueError):
            self._metrics = [import_object(path, "metric") for path in recipe.evaluation.metrics]
        self._dataset = dataset_of(evaluated(recipe)) if dataset is None else dataset

    def run(self):
        """The metrics of the first `evaluation.samples` samples: a dict, "eval_" and the name -> number.

        The Cells compute as for inference: nothing is dropped, no statistics change, and no gradients are kept.
        MindSpore's generator stays as it is.
        """
        section, plan, form = self._recipe.evaluation, self._plan, self._recipe.spec.loss
        passes = evaluation_passes(section.samples, plan.size, plan.ranks)
        metrics, found = [Loss(form), *(metric() for metric in self._metrics)], []
        with inference(self._cells.values()):
            for (rows, is_alike), alike in groupby(passes, key=lambda each: each[1:]):
                firsts = [first for first, *_ in alike]
                for start in range(0, len(firsts), plan.micro_batches):
                    run = firsts[start : start + plan.micro_batches]
                    results = self._forward([self._batch(first, rows, is_alike) for first in run])
                    samples = rows * len(run) * (1 if is_alike else plan.ranks)
                    found.append((results, samples, plan.ranks if is_alike and form == "sum" else 1))
        for results, samples, times in found:  # are read when all are computed
            numbers = tuple(each.item() / times for each in results if each.ndim == 0)
            for metric in metrics:
                metric.update(numbers, samples)
        return {f"eval_{name}": value for metric in metrics for name, value in metric.compute().items()}

    def _batch(self, first, rows, is_alike):
        """A rank's arrays of a pass over samples from the first one on."""
        plan = replace(self._plan, samples=rows * (1 if is_alike else self._plan.ranks), size=rows, micro_batches=1)
        plan, layouts = (replace(plan, ranks=1), self._alike) if is_alike else (plan, self._layouts)
        return [ms.Tensor(array[0]) for array in local_batch(plan, layouts, self._rank, {}, self._dataset, first)]


def evaluation_passes(samples, rows, parts):
    """Forward passes over all samples that need no padding: tuples (first sample, rows of a rank, whether alike).

    The ranks of a pass have their own `rows` samples, one rank's after the other's. The last samples, fewer than ranks,
    are given to all of them alike: sums of a pass over these are `parts` times too large.

    >>> evaluation_passes(11, 2, 4)
    [(0, 2, False), (8, 2, True), (10, 1, True)]
    """
    whole, rest = divmod(samples, rows * parts)
    passes = [(number * rows * parts, rows, False) for number in range(whole)]
    own, left = divmod(rest, parts)
    passes += [(samples - rest, own, False)] if own else []
    return passes + [(first, min(rows, samples - first), True) for first in range(samples - left, samples, rows)]


def _without_dp(axes):
    return tuple(axis for axis in axes if axis != "dp")


@contextmanager
def inference(cells):
    """While open, Cells compute as for inference; then their flags, and MindSpore's generator, are as before."""
    children = [child for cell in cells for _, child in cell.cells_and_names()]
    flags, state = [child.training for child in children], ms.get_rng_state()
    for cell in cells:
        cell.set_train(False)
    try:
        with ExitStack() as unchecked:  # samples that ranks are given alike
            for cell in cells:
                unchecked.enter_context(replaced(tree_of(cell), check_inputs=False))
            yield
    finally:
        for child, is_training in zip(children, flags, strict=True):
            child.set_train(is_training)  # also those below, which follow
        ms.set_rng_state(state)
