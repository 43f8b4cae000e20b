"""`python -m mindformers_core verify`: the training step of a recipe on all ranks of its mesh, against one card."""

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import mindspore as ms
import numpy as np

from mindformers_core.commands.shrinking import NARROWED, planned, shrunk_recipe
from mindformers_core.data.datasets import dataset_of
from mindformers_core.data.reading import balanced, batch_reader, ignored_rows, local_batch
from mindformers_core.layout import Layout
from mindformers_core.recipe.sections import batch_plan, micro_batches_of_a_run, recipe_mesh
from mindformers_core.recipe.zero import mixed_precision
from mindformers_core.sharding.initialize import materialize
from mindformers_core.sharding.parameter_storage import as_computed
from mindformers_core.trainer.cells import build_cells, build_model, check_patterns
from mindformers_core.trainer.step import step_parts
from mindformers_core.verification.engine import acts_in_training, seed_restored, simulate
from mindformers_core.zero.precision import MixedPrecision


@seed_restored()
def verify_recipe(recipe, full=False):
    """The `Check` of one training step of a recipe on all ranks of its mesh, in PyNative.

    Args:
        recipe: the `Recipe`; its data are random.
        full: whether the model has its own sizes, on all ranks; else the least with the same plan, see
            `shrunk_recipe`.

    Raises:
        ValueError: the recipe is impossible, or has another plan at small sizes.
    """
    check_patterns(recipe)
    given, recipe = recipe, replace(recipe, context=replace(recipe.context, mode=1, engine="generated"))
    if recipe.precision.compute == "bfloat16":  # of which CPU lacks kernels; casts are at the same places
        recipe = replace(recipe, precision=replace(recipe.precision, compute="float16"))
    if full:
        plans = {(stage, tree.mesh): (graph, plan) for stage, (tree, graph, plan) in planned(recipe).items()}
    else:
        print(f"planning on {recipe_mesh(recipe).size:,} ranks, at their own sizes …", file=sys.stderr, flush=True)
        recipe, plans = shrunk_recipe(recipe)
    recipe, mesh = replace(recipe, context=replace(recipe.context, engine=given.context.engine)), recipe_mesh(recipe)
    print(f"running {mesh.size:,} ranks …", file=sys.stderr, flush=True)
    plan, is_sum = batch_plan(recipe, mesh.axis_size("dp")), recipe.spec.loss == "sum"
    data = _dataset(_inputs(recipe, plan.samples))
    inputs = balanced(recipe, data).batch(0, plan.samples)  # as ranks compute with them

    def step(rank, cells):
        ms.set_seed(recipe.training.seed)
        run_passes, clip, optimizer, _ = step_parts(recipe, mesh, cells)
        arrays = batch_reader(recipe, plan, cells, rank, data)(data)
        results, gradients = run_passes(tuple(as_computed(ms.Tensor(array)) for array in arrays))
        share = plan.micro_batches if is_sum else 1  # of a run's loss: passes are compared by their mean
        losses = {(None, run): [(loss / share, None)] for run, (loss, *_) in enumerate(results)}
        return losses, gradients, clip, optimizer

    net = build_model(recipe).set_train()
    materialize(net, recipe.training.seed)
    parameters = {path: parameter.asnumpy() for path, parameter in net.parameters_and_names()}

    first = next(graph for (stage, _), (graph, _) in plans.items() if stage == 0)
    names = (recipe.spec.inputs or list(first.arguments))[: len(inputs)]
    layouts = [Layout.on(mesh, ((),) * array.ndim) for array in inputs]
    whole = local_batch(plan, layouts, 0, ignored_rows(recipe), _dataset(inputs))
    passes = _passes(whole, plan, 1 if is_sum else 1 / plan.micro_batches, names)
    subject = SimpleNamespace(
        mesh=mesh, build=partial(build_cells, recipe, mesh), step=step, replica=lambda *_: 0, parameters=parameters,
        passes=passes, divisor=None if is_sum else plan.runs, device_target=recipe.context.device_target, model=net,
        goes_on=True, is_mixed=mixed_precision(recipe) != MixedPrecision(),
    )  # fmt: skip
    notes = _notes(given, recipe)
    if not is_sum and not acts_in_training(plans):
        notes += _check_mean(recipe, net, inputs, [(*args, *named.values()) for _, args, named, _ in passes])
    return simulate(subject, plans, notes)


def _check_mean(recipe, net, inputs, passes):
    """Raise `ValueError` where a loss that is a mean isn't that of one batch; notes if the model can't run here."""
    try:
        results = [net(*map(ms.Tensor, arrays)) for arrays in (inputs, *passes)]
    except Exception as error:  # operators without a kernel here that generated code calls in another way
        return [f"not verified: whether samples weigh alike; the model fails here: {str(error).partition(chr(10))[0]}"]
    whole, *parts = (float((each[0] if isinstance(each, tuple) else each).asnumpy()) for each in results)
    if not np.isclose(whole, np.mean(parts), 1e-2 if "16" in str(getattr(recipe.model, "dtype", "")) else 1e-4):
        raise ValueError(
            f"model.name: {recipe.model_name}: the loss of a batch is {whole:g}, and the mean over its micro-batches "
            f"{np.mean(parts):g}: samples don't weigh alike, so return the sum and the number of labels, with "
            'ModelSpec(loss="sum"): docs/models.md'
        )
    return []


def _notes(given, recipe):
    """Sentences about what differs between a recipe and the one that is verified."""
    notes = ["not verified: graph mode; the programs run in PyNative"] if given.context.mode == 0 else []
    notes += ["not verified: tensors inside; ranks run operator by operator"] * (given.context.engine == "eager")
    notes += ["in float16 in the place of bfloat16"] * (given.precision.compute != recipe.precision.compute)
    ranks = [(name, vars(given.parallelism)[name], vars(recipe.parallelism)[name]) for name in NARROWED]
    if fewer := ", ".join(f"{name} {old} -> {new}" for name, old, new in ranks if old != new):
        few, all_ranks = (recipe_mesh(each).size for each in (recipe, given))
        notes.append(f"on {few:,} of {all_ranks:,} ranks, which are planned alike: {fewer}")
    large, small = (
        vars(each.model) | {"seq_length": each.train_dataset.seq_length, "micro-batches": micro_batches_of_a_run(each)}
        for each in (given, recipe)
    )
    changed = [f"{key} {old} -> {small[key]}" for key, old in large.items() if type(old) is int and old != small[key]]
    return [*notes, f"at small sizes: {', '.join(changed)}"] if changed else notes


def _inputs(recipe, count):
    """Random ids, labels, and positions where documents are packed; or a user's data: arrays of so many samples."""
    if recipe.train_dataset.is_own:
        return dataset_of(recipe).batch(0, count)
    draw, length = np.random.default_rng(recipe.training.seed), recipe.train_dataset.seq_length
    ids = draw.integers(0, recipe.model.vocab_size, (count, length + 1)).astype(np.int32)
    labels = np.where(draw.random((count, length)) < 0.1, -100, ids[:, 1:]).astype(np.int32)
    if recipe.train_dataset.packing == "none":
        return ids[:, :-1], labels
    places = np.arange(length, dtype=np.int32)
    begins = np.maximum.accumulate(np.where(draw.random((count, length)) < 0.2, places, 0), 1)
    return ids[:, :-1], labels, places - begins


def _dataset(arrays):
    """A dataset whose samples are the rows of arrays."""
    return SimpleNamespace(batch=lambda first, count: [array[first : first + count] for array in arrays])


def _passes(inputs, plan, slope, names):
    """The passes of a subject of `simulate`: every one of the micro-batches of every run, of all dp ranks together."""

    def slopes(found):  # of the loss alone
        return [np.full_like(each, 0 if place else slope) for place, each in enumerate(found)]

    passes, parts = [], zip(*(array.reshape(-1, plan.rows, *array.shape[2:]) for array in inputs))
    for (run, number), (first, *others) in zip(np.ndindex(plan.runs, plan.micro_batches), parts, strict=True):
        named = dict(zip(names[1:], others, strict=True))
        passes.append(((number, run, 0), (first,), named, slopes))
    return passes
