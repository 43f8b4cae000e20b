"""The recipe's model on a rank, whole or as stages of a pipeline, and its loss scale."""

import fnmatch

import mindspore as ms

from mindformers_core.hints import any_layer, first_of, nearest
from mindformers_core.models.adapters import adapted_layers, add_adapters
from mindformers_core.program.structure import call_signature
from mindformers_core.recipe.checks import ranks_of_exchange, recipe_device_model
from mindformers_core.recipe.pipeline import layers_of_rank
from mindformers_core.recipe.sections import batch_plan, dataset_layouts
from mindformers_core.recipe.zero import zero_settings
from mindformers_core.recompute import recompute, swap
from mindformers_core.scopes import errors_at
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import hsdp, tie_shards
from mindformers_core.zero.loss_scale import LossScale


def build_cells(recipe, mesh, rank):
    """The stages of the recipe's model on `rank` of `mesh`: sharded, under `hsdp()`, initialized from the seed.

    Stages of a rank that share a parameter store and update it once. The axes of `mesh` are `MESH_AXES`.

    Returns:
        A dict, number of a stage -> its Cell, in order; without a pipeline 0 -> the model.
    """
    zero, cells = zero_settings(recipe, mesh), {}
    layers, mesh, is_part = stages_of(recipe, mesh, rank)
    for stage, part in layers.items():
        net = build_model(recipe, part).set_train()
        for path, parameter in net.parameters_and_names():
            frozen = recipe.optimizer.placed(path, len(parameter.shape)).frozen
            if frozen or frozen is False and getattr(parameter, "is_base", False):
                parameter.requires_grad = not frozen  # before shard() and hsdp(), which ask for it
        shard(net, mesh, recipe.parallelism, inputs=_arriving(recipe, net, stage), **shard_settings(recipe))
        cells[stage] = swap(recompute(net, recipe.recompute, is_part=is_part), recipe.swap, is_part=is_part)
    for net in cells.values():
        hsdp(net, **zero)
    tie_shards(list(cells.values()), recipe.spec.tied(recipe.model))
    return cells


def build_model(recipe, part=None):
    """The recipe's model with its adapters, or the stage of it with the layers `part`, on the meta device.

    Raises:
        ValueError: a pattern of `adapters.patterns` matches no layer of the whole model; or a model that can't take
            tokens as `parallelism.context_parallel_balance` puts them.
    """
    section = recipe.adapters
    with ms.DeviceCtx("meta"):
        net = recipe.spec.build(recipe.model, part)
        whole = recipe.spec.build(recipe.model) if section.rank and part is not None else net
    _share_sequences(recipe, net)
    for block in net.mixtures().values() if recipe.moe.placement.interval else ():
        block.experts.let_move()
    if hasattr(net, "share_heads"):
        net.share_heads(recipe.parallelism.tensor_parallel, ranks_of_exchange(recipe.parallelism))
    if section.rank:
        own = {path for path, _ in net.cells_and_names()}
        with errors_at("adapters.patterns: ", f": {section.page}"):
            paths = [path for path in adapted_layers(whole, section.patterns) if path in own]
            add_adapters(net, section.rank, paths, section.alpha, section.dropout)
    return net


def _share_sequences(recipe, net):
    """Tell a model how ranks share every sequence, where that isn't as it would be for any tensor."""
    sizes = recipe.parallelism
    order, algorithm = sizes.order, sizes.context_parallel_algorithm
    if (order, algorithm) == ((0,), "auto"):
        return
    lacks_places = order is None and (*recipe.spec.inputs[2:4],) != ("positions", "places")  # as `Balanced` has them
    lacking = "third and fourth input positions, places" if lacks_places else "method share_sequences(order, algorithm)"
    if lacks_places or not hasattr(net, "share_sequences"):
        raise ValueError(
            f"parallelism: context_parallel_balance {sizes.context_parallel_balance} and context_parallel_algorithm "
            f"{algorithm} need a model that knows of them, but {recipe.model_name} has no "
            f"{lacking}: use contiguous and auto, or see docs/models.md"
        )
    net.share_sequences(order or (0,), algorithm)


def check_patterns(recipe):
    """Raise `ValueError` for a pattern of a recipe that matches no parameter of the whole model, with its key."""
    keys = {"monitor.gradient_norms": recipe.monitor.gradient_norms}
    keys |= {
        f"optimizer.groups[{index}].parameters": each.parameters for index, each in enumerate(recipe.optimizer.groups)
    }
    if not any(keys.values()):
        return
    names = [path for path, _ in build_model(recipe).parameters_and_names()]
    for key, patterns in keys.items():
        for place, pattern in enumerate(patterns):
            if not fnmatch.filter(names, pattern):
                known = list(dict.fromkeys(map(any_layer, names)))
                hint = nearest(pattern, known) or f": they are {first_of(known)}"
                raise ValueError(f"{key}[{place}]: '{pattern}' matches no parameter{hint}")


def placed_of(recipe, cells):
    """A dict, name -> `Placed`, of the parameters of a rank's stages that are trained, or that a group freezes."""
    named = {path: each for net in cells.values() for path, each in net.parameters_and_names()}
    placed = {path: recipe.optimizer.placed(path, len(each.global_shape)) for path, each in named.items()}
    return {path: each for path, each in placed.items() if each.frozen or named[path].requires_grad}


def _arriving(recipe, net, stage):
    """Name of an argument of a stage -> the layout in which it is read, where the recipe gives one."""
    arguments = [*call_signature(type(net).construct).parameters][1:]
    names = recipe.spec.inputs or arguments
    taken = [name for name in arguments if stage == 0 or name != names[0]]
    return {name: each for name, each in dataset_layouts(recipe.train_dataset, names).items() if name in taken}


def shard_settings(recipe):
    """The keywords of `shard()` that a recipe gives."""
    model = recipe_device_model(recipe)
    return {"seed": recipe.training.seed, "mode": recipe.context.engine, "device_model": model}


def loss_scale_of(recipe, mesh):
    """The `LossScale` of a recipe, or None."""
    start = recipe.precision.loss_scale
    if start is None and recipe.precision.compute == "float16":
        labels = batch_plan(recipe, mesh.axis_size("dp")).rows * recipe.train_dataset.seq_length
        labels = labels if recipe.spec.loss == "sum" else 1
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
