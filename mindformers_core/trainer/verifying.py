"""`python -m mindformers_core verify`: the training step of a recipe on all ranks of its mesh, against one card."""

from dataclasses import replace

import mindspore as ms
import numpy as np

from mindformers_core.mesh import init_device_mesh
from mindformers_core.sharding.initialize import materialize
from mindformers_core.sharding.parameter_storage import as_computed
from mindformers_core.trainer.data import dataset_of, micro_batch
from mindformers_core.trainer.pipeline_recipe import micro_batches_of_a_run
from mindformers_core.trainer.recipe import MESH_AXES, accumulation_steps, mesh_shape
from mindformers_core.trainer.shrinking import shrunk_recipe
from mindformers_core.trainer.step import build_cells, step_parts
from mindformers_core.verification.drawing import DROPOUTS
from mindformers_core.verification.engine import RankStep, Subject, operators_of, plans_of, simulate

__all__ = ["verify_recipe"]


def verify_recipe(recipe, full=False):
    """The `Check` of one training step of a recipe on all ranks of its mesh, in PyNative.

    Args:
        recipe: the `Recipe`; its data are random.
        full: whether the model has its own sizes; else the least ones with the same plan, see `shrunk_recipe`.

    Raises:
        ValueError: the recipe is impossible, or has another plan at small sizes.
    """
    recipe, choices = replace(recipe, context=replace(recipe.context, mode=1)), None
    if not full:
        small = shrunk_recipe(recipe)
        recipe, choices = small.recipe, small.choices
    mesh, target = init_device_mesh(mesh_shape(recipe), MESH_AXES), recipe.context.device_target

    def build(rank):
        return build_cells(recipe, mesh, rank)

    plans = plans_of(mesh, build, lambda rank, stage, net: (micro_batch(recipe, stage), {}), choices, target)
    arguments = next(list(graph.arguments) for (stage, _), (graph, _) in plans.items() if stage == 0)
    batches, count = _global_batches(recipe, mesh), _micro_batches(recipe)
    passes = _passes(recipe, mesh, batches, count, arguments)

    def step(rank, cells):
        ms.set_seed(recipe.training.seed)
        parts = step_parts(recipe, mesh, cells)
        local = [as_computed(ms.Tensor(array)) for array in _local_batches(batches, mesh, rank)]
        _, gradients = parts.run(tuple(local))
        return RankStep({}, (), parts.optimizer.parameters, gradients, parts.clip, parts.optimizer)

    net = _whole_model(recipe)
    parameters = {path: parameter.asnumpy() for path, parameter in net.parameters_and_names()}
    has_kernels = {parameter.dtype for parameter in net.get_parameters()} == {ms.float32}

    def model(args, kwargs):
        named = {path: parameter for path, parameter in net.parameters_and_names() if parameter.requires_grad}
        gradient_of = ms.value_and_grad(net, None, list(named.values()))
        given = {name: ms.Tensor(array) for name, array in kwargs.items()}
        loss, gradients = gradient_of(*map(ms.Tensor, args), **given)
        return loss, dict(zip(named, gradients, strict=True))

    comparable = has_kernels and DROPOUTS.keys().isdisjoint(operators_of(plans))
    rest = passes, len(batches), target, model if comparable else None
    return simulate(Subject(mesh, build, step, lambda rank, cells: 0, parameters, *rest), plans)


def _micro_batches(recipe):
    """Number of passes of a run."""
    return micro_batches_of_a_run(recipe) if recipe.parallelism.pipeline_parallel > 1 else 1


def _whole_model(recipe):
    """The model on one card, with its initial values."""
    with ms.DeviceCtx("meta"):
        net = recipe.spec.build(recipe.model).set_train()
    materialize(net, recipe.training.seed)
    return net


def _global_batches(recipe, mesh):
    """The arrays of every run, of all data-parallel ranks one after the other: random ids, or a user's dataset."""
    size, length = mesh.axis_size("dp"), recipe.train_dataset.seq_length
    draw, rows = np.random.default_rng(recipe.training.seed), size * recipe.training.local_batch_size
    runs = accumulation_steps(recipe, size)
    if recipe.train_dataset.factory:
        dataset = dataset_of(recipe)
        return [dataset.batch(run * rows, rows) for run in range(runs)]
    found = []
    for _ in range(runs):
        ids = draw.integers(0, recipe.model.vocab_size, (rows, length + 1)).astype(np.int32)
        labels = np.where(draw.random((rows, length)) < 0.1, -100, ids[:, 1:]).astype(np.int32)
        found.append((ids[:, :-1], labels))
    return found


def _local_batches(batches, mesh, rank):
    """A rank's arrays of shape (runs, samples of one, …)."""
    size, (dp_rank,) = mesh.axis_size("dp"), mesh.coordinate(rank, ("dp",))
    return [np.stack([np.split(array, size)[dp_rank] for array in arrays]) for arrays in zip(*batches)]


def _passes(recipe, mesh, batches, count, arguments):
    """The passes of `Subject`: every micro-batch of every run, of all data-parallel ranks together."""
    size, passes = mesh.axis_size("dp"), []
    names = recipe.spec.inputs[1:] or arguments[1:]
    for run, arrays in enumerate(batches):
        for number in range(count):
            first, *others = [
                np.concatenate([np.split(part, count)[number] for part in np.split(array, size)]) for array in arrays
            ]
            named = dict(zip(names, others, strict=True))
            passes.append(((number, run, 0), (first,), named, lambda losses: [np.full_like(losses[0], 1 / count)]))
    return passes
