"""Evaluation on held-out samples: the loss of one card on any mesh, whatever the last batch is."""

import math
from contextlib import ExitStack, contextmanager
from itertools import groupby, islice

import mindspore as ms

from mindformers_core.batches import BatchPlan
from mindformers_core.data.reading import balanced, batch_layouts, local_batch
from mindformers_core.lazy_exports import import_object
from mindformers_core.scopes import replaced
from mindformers_core.sharding.sharded_cells import tree_of


class Loss:
    """The built-in `Metric`: the mean loss over all labels, or over all samples where the model returns a mean.

    Args:
        form: `ModelSpec.loss`.
    """

    def __init__(self, form):
        self._form, self._total, self._count = form, 0.0, 0.0

    def update(self, results, samples):
        is_sum = self._form == "sum"
        self._total += results[0] if is_sum else results[0] * samples
        self._count += results[1] if is_sum else samples

    def compute(self):
        """See `Metric`: `loss`, and `perplexity`, its exponential."""
        loss = self._total / max(self._count, 1)
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}


def evaluate(recipe, plan, rank, cells, forward, dataset):
    """The metrics of the first `evaluation.samples` samples: a dict, "eval_" and the name -> number; all ranks call it.

    The Cells compute as for inference: nothing is dropped, no statistics change, and no gradients are kept. MindSpore's
    generator stays as it is.

    Args:
        recipe, plan: the `Recipe`, and the `BatchPlan` of a step.
        rank: this rank's number.
        cells: from `build_cells`.
        forward: see `pipeline_passes`.
        dataset: see `dataset_of`.
    """
    dataset = balanced(recipe, dataset)
    layouts, form, found = batch_layouts(recipe, cells, dataset), recipe.spec.loss, []
    alike = [each.replace(dims=[tuple(a for a in dim if a != "dp") for dim in each.dims]) for each in layouts]

    def batch(first, rows, is_alike):
        ranks = 1 if is_alike else plan.ranks
        given = BatchPlan(rows * ranks, ranks, rows), alike if is_alike else layouts
        return [ms.Tensor(array[0]) for array in local_batch(*given, rank, {}, dataset, first)]

    metrics = [Loss(form), *(import_object(path, "metric")() for path in recipe.evaluation.metrics)]
    passes = evaluation_passes(recipe.evaluation.samples, plan.size, plan.ranks)
    with inference(cells.values()):
        for kind, of_kind in groupby(passes, key=lambda each: each[1:]):
            while run := [*islice(of_kind, plan.micro_batches)]:
                found.append((kind, len(run), forward([batch(*each) for each in run])))
    for (rows, is_alike), count, results in found:  # are read when all are computed
        times = plan.ranks if is_alike and form == "sum" else 1
        numbers = tuple(each.item() / times for each in results if each.ndim == 0)
        for metric in metrics:
            metric.update(numbers, rows * count * (1 if is_alike else plan.ranks))
    return {f"eval_{name}": value for metric in metrics for name, value in metric.compute().items()}


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


@contextmanager
def inference(cells):
    """While open, Cells compute as for inference; then their flags, and MindSpore's generator, are as before."""
    with ExitStack() as held:
        held.callback(ms.set_rng_state, ms.get_rng_state())
        for cell in cells:
            held.enter_context(replaced(tree_of(cell), check_inputs=False))  # ranks may be given samples alike
            for _, child in reversed([*cell.cells_and_names()]):  # at the end those around others come first
                held.callback(child.set_train, child.training)
            cell.set_train(False)
        yield
