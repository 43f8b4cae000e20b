"""`hsdp()`: hybrid sharded data parallelism, ZeRO 1, 2 and 3 (Rajbhandari et al. 2020; RFC ICY7S6).

| level | sharded | traffic of a step, in sizes of all weights |
|---|---|---|
| `shard_size=1` | nothing | 2: all-reduce of gradients |
| `"level1"` | optimizer state, and the master copy | 2: reduce-scatter of gradients, all-gather of weights |
| `"level2"` | gradients, too: a complete bucket is reduced and freed | 2 |
| `"level3"` | weights, too: a unit's are gathered for its forward and again for its backward pass | 3 |
"""

from dataclasses import replace

from mindspore import nn

from mindformers_core.communication import world
from mindformers_core.hints import nearest
from mindformers_core.mesh import DeviceMesh
from mindformers_core.program.graph import cell_label
from mindformers_core.scopes import errors_at
from mindformers_core.sharding.optimizers_before import refuse_optimizers_of
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import ShardedCell, tree_and_path, tree_of
from mindformers_core.zero.apply import apply_hsdp
from mindformers_core.zero.buckets import parse_comm_fusion
from mindformers_core.zero.precision import MixedPrecision
from mindformers_core.zero.settings import HsdpSettings, data_parallel_axes, shown_axes
from mindformers_core.zero.storage import HsdpStorage, storage_of
from mindformers_core.zero.units import find_units


def hsdp(
    cell,
    shard_size=1,
    threshold=64,
    optimizer_level="level1",
    accumulate_grad_step=1,
    *,
    axis="dp",
    mesh=None,
    gradients_mean=None,
    comm_fusion="auto",
    reshard_after_forward=None,
    prefetch=1,
    mixed_precision=None,
    units=None,
    gradient_accumulation_shard=None,
):
    """Shard the optimizer state, the gradients and the weights of `cell` over data-parallel ranks; returns `cell`.

    The weights of a Cell under `shard()` are replicated over its data-parallel axis, while the batches of ranks differ:
    so a backward pass computes one term of their gradient. `hsdp()` decides where and when the terms are reduced.
    Afterwards `cell.trainable_params()`, `parameters_and_names()` and the like return *shards*, `Parameter`s with
    `layout` and `global_shape`, for the optimizer. `mindformers_core.zero.value_and_grad(cell)`, or a `PipelineStage`,
    takes steps; a call of the Cell evaluates.

    Args:
        cell: sharded over a mesh with the data-parallel axis: the Cell's loss is that of the whole batch. Or sharded
            over other axes only (give `mesh`), or plain: every rank computes a loss of its own.
        shard_size: number of shards, a divisor of the axis' size, in groups of so many neighbours. 1: no sharding.
        threshold: KB (1024 bytes). Parameters that are not larger, in the dtype of the passes, are replicated, as are
            those without a dim that can be sharded; `explain()` and `memory_report()` list them.
        optimizer_level: `"level1"`, `"level2"` or `"level3"`, see above.
        accumulate_grad_step: micro-steps of a step, over which gradients are averaged.
        axis, mesh: the data-parallel axis, or several as a tuple, and a mesh with it where the Cell isn't sharded over
            it, and with the axes (of size 1) that a plain Cell's `shard()` hooks name. Default: all ranks.
        gradients_mean: whether gradients are averaged over the axis. Default: where ranks have losses of their own.
        comm_fusion: the buckets of collectives, see `parse_comm_fusion`. Default: 64 MB.
        reshard_after_forward: at level 3, whether a unit's weights are freed after its forward pass. Otherwise all are
            gathered at the beginning of a step, and stay. Default: True, but False in a pipeline.
        prefetch: at level 3, number of units whose weights are gathered ahead.
        mixed_precision: a `MixedPrecision`. Default: everything in the dtypes of the parameters.
        units: at level 3, paths of the Cells whose weights are gathered together. Default: see `find_units`.
        gradient_accumulation_shard: whether sums of gradients over micro-steps and micro-batches are sharded, and each
            one's gradients reduce-scattered. Default: at levels 2 and 3. (MindSpore: `parallel_optimizer_config`.)

    Raises:
        TypeError, ValueError: an invalid argument; a second call; an optimizer that holds the parameters already.
    """
    axes, mesh, has_axis = _checked_mesh(cell, axis, mesh, gradients_mean)
    settings = HsdpSettings(
        *data_parallel_axes(mesh, axes, shard_size), axes, shard_size, threshold, optimizer_level,
        accumulate_grad_step, reshard_after_forward, prefetch,
        MixedPrecision() if mixed_precision is None else mixed_precision,
        not has_axis if gradients_mean is None else gradients_mean, gradient_accumulation_shard,
    )  # fmt: skip
    fusion = parse_comm_fusion(comm_fusion)
    units = find_units(cell) if units is None else _checked_units(cell, units)
    refuse_optimizers_of(cell, "hsdp")
    apply_hsdp(_sharded_tree(cell, mesh, axes), settings, units, fusion, has_axis)
    return cell


def _sharded_tree(cell, mesh, axes):
    """The `ShardedTree` of a Cell; a plain one is sharded over this rank alone.

    Its mesh is that of the other axes, for the Cell's hooks, where their size is 1.
    """
    if isinstance(cell, ShardedCell):
        return tree_of(cell)
    rank, others = world().rank, [name for name in mesh.axis_names if name not in axes]
    of_hooks = others and mesh.axis_size(*others) == 1
    advice = (
        " (hsdp() shards a plain Cell over one rank: where its hooks name mesh axes, call shard() before, or give "
        "hsdp() a mesh in which these have size 1)"
    )
    with errors_at("", advice, kinds=(ValueError,)):
        shard(cell, mesh.sub_mesh(others, rank) if of_hooks else DeviceMesh((1,), ("rank",), (rank,)))
    return tree_of(cell)


def _refuse_second(cell):
    """Raise `ValueError` for a Cell inside a sharded tree, or with one below, and for a Cell under `hsdp()`."""
    for path, child in cell.cells_and_names():
        if isinstance(child, ShardedCell):
            tree, inner = tree_and_path(child)
            if isinstance(tree.storage, HsdpStorage):
                where = f"{cell_label(path, child)} is under hsdp() already" if path else (
                    f"hsdp() was called with {tree.label('')} already"
                )  # fmt: skip
                raise ValueError(f"{where}: call it once, with the root Cell, and build the optimizer after that")
            if path == "" and inner != "":
                raise ValueError(
                    f"hsdp() takes a Cell as shard() was called with it: this is {tree.label(inner)} in "
                    f"{tree.label('')}, call hsdp() with that"
                )
            if path != "" and child is tree.cells[""]:
                raise ValueError(
                    f"{cell_label(path, child)} in {cell_label('', cell)} is sharded by itself: call hsdp() with that "
                    "Cell alone, or shard() with the root"
                )


def _checked_mesh(cell, axis, mesh, gradients_mean):
    """The data-parallel axes, a tuple; the mesh with these, and whether the Cell is sharded over them."""
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"hsdp() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
    axes = (axis,) if isinstance(axis, str) else axis
    if not (isinstance(axes, tuple) and axes and all(isinstance(axis, str) for axis in axes)):
        raise TypeError(f"hsdp(axis={axes!r}): should be the name of a mesh axis, or a tuple of names")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"hsdp(mesh={mesh!r}): should be a DeviceMesh, as init_device_mesh() makes it")
    _refuse_second(cell)
    own = tree_of(cell).mesh if isinstance(cell, ShardedCell) else None
    if mesh is None:
        mesh = DeviceMesh((*(1 for _ in axes[1:]), world().size), axes) if own is None else own
    if world().rank not in mesh:
        raise ValueError(
            f"hsdp(mesh={mesh!r}): this is rank {world().rank}, which isn't in it: give a mesh that has it"
        )
    if own is not None and own != mesh:
        _check_part(cell, own, axes, mesh)
    has_axis = own is not None and {*axes} <= {*own.axis_names}
    if gradients_mean is True and has_axis:
        raise ValueError(
            f"hsdp(gradients_mean=True): {cell_label('', cell)} is sharded over {shown_axes(axes)}, so its loss is "
            "that of the whole batch, and gradients are terms of a sum: leave gradients_mean out"
        )
    return axes, mesh, has_axis


def _check_part(cell, own, axes, mesh):
    """Raise `ValueError` for a Cell on a mesh `own` that isn't this rank's sub-mesh of `mesh`."""
    if had := [axis for axis in axes if axis in own.axis_names]:
        raise ValueError(
            f"hsdp(mesh={mesh!r}): {cell_label('', cell)} is sharded over {own!r}, which has axis '{had[0]}': leave "
            "mesh out"
        )
    parts = set(own.axis_names) <= set(mesh.axis_names)
    if own.size > 1 and not (parts and mesh.sub_mesh(own.axis_names, world().rank) == own):
        raise ValueError(
            f"hsdp(mesh={mesh!r}): {cell_label('', cell)} is sharded over {own!r}, which isn't what rank "
            f"{world().rank} has of that mesh: shard it over mesh.sub_mesh(…) of the mesh that hsdp() gets"
        )


def _checked_units(cell, units):
    """The units that a user gave, as a tuple."""
    if not isinstance(units, (tuple, list)) or not all(isinstance(unit, str) for unit in units):
        raise TypeError(f"hsdp(units={units!r}): should be a tuple of paths of Cells, such as ('layers.0', 'layers.1')")
    paths = [path for path, _ in cell.cells_and_names() if path]
    for place, unit in enumerate(units):
        if unit not in paths:
            raise ValueError(
                f"hsdp(units=…): there is no Cell '{unit}' in {cell_label('', cell)}{nearest(unit, paths)}"
            )
        if unit in units[:place]:
            raise ValueError(f"hsdp(units=…): Cell '{unit}' is given twice: give it once")
    nested = [(one, other) for one in units for other in units if other.startswith(f"{one}.")]
    if nested:
        raise ValueError(f"hsdp(units=…): Cell '{nested[0][1]}' lies in '{nested[0][0]}': give one of the two")
    return tuple(units)


def tie_shards(cells, paths):
    """Tie parameters of several Cells of one rank, such as the stages of a pipeline with the embedding and the output
    layer: the Cells update, store and count one shard.

    The first Cell's shard replaces those of the others, also in `cell.trainable_params()`. `PipelineStage`s and
    optimizers are made of the Cells afterwards.

    Args:
        cells: results of `hsdp()` with equal arguments.
        paths: paths of parameters; a path that fewer than two Cells have is ignored.

    Raises:
        ValueError: parameters of one path with different shapes, dtypes, or sharding.
    """
    for path in paths:
        every = [(storage, stored) for storage in map(storage_of, cells) for stored in storage.parameters]
        holders = [(storage, stored) for storage, stored in every if stored.plan.path == path]
        for storage, stored in holders[1:]:
            plans = [replace(one.plan, unit="", reason="") for one in (holders[0][1], stored)]
            if plans[0] != plans[1] or holders[0][1].shard.layout != stored.shard.layout:
                shown = [f"{_shown(one)} in {place.label}" for place, one in (holders[0], (storage, stored))]
                raise ValueError(
                    f"tie_shards(): parameter '{path}' is {', but '.join(shown)}: only what shard() and hsdp() treat "
                    "alike can be one parameter"
                )
            storage.check_closed()
            stored.share(holders[0][1])
            storage.copied.add(id(stored.unsharded))


def _shown(stored):
    trained = "trained" if stored.plan.trainable else "frozen"
    dtypes = f"{stored.plan.dtype}, updated in {stored.plan.shard_dtype}"
    return f"{trained}, of shape {stored.plan.shape}, {dtypes}, a part of {stored.shard_shape} as {stored.shard.layout}"
