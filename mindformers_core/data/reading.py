"""The arrays of a step that a rank reads: the rows and parts that declared layouts of inputs give it."""

from functools import cache, partial

import numpy as np

from mindformers_core.batches import batch_slices
from mindformers_core.data.balanced import Balanced
from mindformers_core.data.datasets import dataset_of
from mindformers_core.data.streams import Stream
from mindformers_core.layout import Layout
from mindformers_core.operators.signature import tensor_meta
from mindformers_core.placement import open_mesh
from mindformers_core.recipe.sections import batch_plan
from mindformers_core.sharding.sharded_cells import tree_of


def sample_arrays(recipe):
    """The whole arrays of one sample, each (1, …): a tuple of `TensorMeta`s."""
    if recipe.train_dataset.is_own:
        dataset = balanced(recipe, dataset_of(recipe))
        found = tuple(tensor_meta((1, *shape), str(dtype)) for shape, dtype in _kinds(dataset))
    else:
        count = 3 if recipe.train_dataset.packing == "documents" else 2  # see `Sequences`
        count = 4 if recipe.parallelism.order is None else count  # see `Balanced`
        found = (tensor_meta((1, recipe.train_dataset.seq_length), "int32"),) * count
    if recipe.spec.inputs and len(found) > len(recipe.spec.inputs):
        raise ValueError(
            f"model.name: the ModelSpec of {recipe.model_name} has the inputs {', '.join(recipe.spec.inputs)}, but the "
            f"dataset gives {len(found)} arrays: name them all"
        )
    return found


def balanced(recipe, dataset):
    """A dataset with its tokens in the order of `parallelism.context_parallel_balance`."""
    sizes = recipe.parallelism
    if sizes.order == (0,):
        return dataset
    return Balanced(dataset, sizes.context_parallel_balance, sizes.context_parallel)


def micro_batch(recipe, net, stage=0):
    """The local inputs of one forward pass of a stage, `net`, with this number: a tuple of `TensorMeta`s.

    The first stage, or the whole model, takes the arrays of the dataset: input ids and labels of shape (sequences,
    tokens of a sequence), or those of a user's dataset. Every other stage takes what the stage before it gives, see
    `ModelSpec.boundary`, in place of the first array.
    """
    rows = batch_plan(recipe, tree_of(net).mesh.axis_size("dp")).rows
    first, *others = (tensor_meta((rows, *each.shape[1:]), each.dtype) for each in sample_arrays(recipe))
    firsts = (first,)
    if stage > 0:
        first, *more = _passed(recipe, rows)
        firsts = tensor_meta(first.shape, recipe.precision.compute or first.dtype), *more
    names = [*tree_of(net).boundaries[""].arguments[: len(firsts)]]
    names += [_name(recipe, net, 1 + place) for place in range(len(others))]
    given = []
    for place, (name, each) in enumerate(zip(names, (*firsts, *others), strict=True)):
        layout = tree_of(net).boundaries[""].arriving_layout(name, len(each.shape))
        given.append(tensor_meta(layout.local_shape(each.shape, f"array {place} of a batch"), each.dtype))
    return tuple(given)


def passed_count(recipe, stage):
    """Of the arguments of a stage with this number, how many the stage before gives; 1: the first stage's array."""
    return len(_passed(recipe, 1)) if stage > 0 else 1


def _passed(recipe, rows):
    found = recipe.spec.boundary(recipe.model, rows, recipe.train_dataset.seq_length)
    return found if isinstance(found, tuple) else (found,)


def _name(recipe, net, place):
    """The name of the argument of a stage that takes the input number `place`."""
    arguments, names = tree_of(net).boundaries[""].arguments, recipe.spec.inputs
    return names[place] if place and names else arguments[min(place, len(arguments) - 1)]


def batch_reader(recipe, plan, cells, rank, dataset):
    """The function of a dataset and the number of samples of earlier steps that reads a step's arrays: `local_batch`.

    Args:
        plan: its `BatchPlan`.
        cells: see `batch_layouts`.
        rank: number of the rank.
        dataset: one whose samples have the same arrays.
    """
    given = plan, batch_layouts(recipe, cells, balanced(recipe, dataset)), rank, ignored_rows(recipe)
    return lambda dataset, consumed=0: local_batch(*given, balanced(recipe, dataset), consumed)


def batch_layouts(recipe, cells, dataset):
    """The layouts of the arrays of a micro-batch of a dataset.

    Of a rank's stages, see `build_cells`, the first one that takes an array says what of it is read; where none does,
    it is cut over dp.
    """
    layouts, mesh = [], tree_of(next(iter(cells.values()))).mesh
    for place, (shape, _) in enumerate(_kinds(dataset)):
        layout = Layout.on(mesh, (("dp",), *[()] * len(shape)))
        for stage, net in reversed(cells.items()):
            boundary, name = tree_of(net).boundaries[""], _name(recipe, net, place)
            if name in boundary.arguments and (place > 0 or stage == 0):
                layout = boundary.arriving_layout(name, 1 + len(shape))
        layouts.append(layout)
    return layouts


def _kinds(dataset):
    """Shape and dtype of each array of a sample; of a `Stream` without reading, where that can be."""
    if isinstance(dataset, Stream):
        return dataset.kinds
    return [(array.shape[1:], array.dtype) for array in dataset.batch(0, 1)]


def ignored_rows(recipe):
    """Place of an array of a batch -> what its empty rows hold, see `ModelSpec.ignored`."""
    return {recipe.spec.inputs.index(name): value for name, value in recipe.spec.ignored.items()}


def local_batch(plan, layouts, rank, ignored, dataset, consumed=0):
    """The arrays of a step on `rank`, each (runs, rows of a run, …): ids and labels, or those of a user's dataset.

    A `Stream` is asked for the rank's part of its samples; of others whole samples are read.

    Args:
        plan: the `BatchPlan`.
        layouts: of each array of a micro-batch, of all ranks together, the `Layout`.
        rank: number of the rank, which reads its own samples only.
        ignored: place of an array -> what empty rows of it hold; others repeat the last sample.
        dataset: see `dataset_of`.
        consumed: number of samples that earlier steps took.
    """
    of_rows = [each.replace(dims=each.dims[:1]) for each in layouts]
    own = [run for ((*runs,),) in batch_slices(of_rows, [(plan.rows,)] * len(layouts), rank) for run in runs]
    first, end = min(run.start for run in own), max(run.stop for run in own)
    simple, strided = ([_some_dims(each, is_strided) for each in layouts] for is_strided in (False, True))
    cut = cache(partial(_cut, plan, simple, rank))
    found = []
    for samples in plan.passes:
        real = samples[first:end]
        read = real or range(plan.samples - 1, plan.samples)
        asked = consumed + read.start, len(read)
        if isinstance(dataset, Stream):
            arrays = dataset.batch(*asked, cut)
        else:
            arrays = dataset.batch(*asked)
            parts = cut(tuple(array.shape[1:] for array in arrays))
            arrays = [array[(slice(None), *slices)] for array, slices in zip(arrays, parts)]
        if len(real) < end - first:
            arrays = [np.take(array, range(end - first), 0, mode="clip") for array in arrays]
            for place, value in ignored.items():
                arrays[place][len(real) :] = value
        slices = batch_slices(strided, [(plan.rows, *array.shape[1:]) for array in arrays], rank)
        found.append([_part(array, first, *runs) for array, runs in zip(arrays, slices, strict=True)])
    arrays = map(np.concatenate, zip(*found))
    return [array.reshape(plan.runs, -1, *array.shape[1:]) for array in arrays]


def _cut(plan, layouts, rank, shapes):
    """For each array of a sample the slices of its dims that `rank` reads, see `Stream.batch`: none is strided."""
    if len(shapes) != len(layouts):
        raise ValueError(f"a sample has {len(shapes)} arrays, the first one {len(layouts)}: all samples need as many")
    slices = batch_slices(layouts, [(plan.rows, *shape) for shape in shapes], rank)
    return tuple(tuple(run for (run,) in runs) for _, *runs in slices)


def _some_dims(layout, is_strided):
    """A layout that cuts, of the dims after the first, those alone that are strided in `layout`, or that aren't."""
    pairs = zip(layout.dims[1:], layout.axes[1:])
    return layout.replace(dims=[layout.dims[0], *(dim if (dim != axes) == is_strided else () for dim, axes in pairs)])


def _part(rows, first, own, *others):
    """The part of an array by the slices of its dims, of which those of dim 0 count from row `first` on."""
    runs = [slice(run.start - first, run.stop - first) for run in own], *others
    return rows[open_mesh(runs) if any(each[1:] for each in runs) else tuple(each[0] for each in runs)]
