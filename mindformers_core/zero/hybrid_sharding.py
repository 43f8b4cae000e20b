"""`hsdp()`: hybrid sharded data parallelism, ZeRO 1, 2 and 3 (Rajbhandari et al. 2020; RFC ICY7S6).

| level | a rank keeps a part of | a step communicates, in sizes of all weights |
|---|---|---|
| `shard_size=1` | nothing | 2: all-reduce of gradients |
| `"level1"` | optimizer state, and the master copy | 2: gradients reduce-scattered, weights gathered |
| `"level2"` | gradients, too: a bucket is reduced and dropped as soon as it is complete | 2 |
| `"level3"` | weights, too: a unit's are gathered for its forward and again for its backward pass | 3 |
"""

from dataclasses import replace

from mindspore import nn

from mindformers_core.communication import world
from mindformers_core.hints import nearest
from mindformers_core.mesh import DeviceMesh
from mindformers_core.program.graph import cell_label
from mindformers_core.sharding.optimizers_before import refuse_optimizers_of
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import ShardedCell, tree_and_path, tree_of
from mindformers_core.zero.apply import install, planned_parameters
from mindformers_core.zero.buckets import parse_comm_fusion
from mindformers_core.zero.precision import MixedPrecision
from mindformers_core.zero.settings import (
    REPLICATE_AXIS_SUFFIX,
    SHARD_AXIS_SUFFIX,
    HsdpSettings,
    check_flags,
    check_settings,
)
from mindformers_core.zero.storage import HsdpStorage, storage_of
from mindformers_core.zero.units import find_units

__all__ = ["hsdp", "share_parts"]


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
    """Train `cell` on the ranks of a data-parallel axis, with what each of them keeps cut into parts; gives `cell`.

    The weights of a Cell that `shard()` was called with are whole over its data-parallel axis, and every rank's batch
    differs: so what a backward pass gives is one term of their gradient. `hsdp()` decides where and when the terms are
    reduced. Afterwards `cell.trainable_params()`, `parameters_and_names()` and the like give *parts*, `Parameter`s with
    `layout` and `global_shape`: build the optimizer of them. Take steps with
    `mindformers_core.zero.value_and_grad(cell)`, or as a `PipelineStage`; a call of the Cell evaluates.

    Args:
        cell: sharded over a mesh with the data-parallel axis: its loss is that of the whole batch. Or sharded over
            other axes only (give `mesh`), or plain: every rank computes a loss of its own.
        shard_size: number of parts, a divisor of the axis' size; groups of so many neighbours hold the same. 1: plain.
        threshold: in KB (1024 bytes). Parameters that are not larger, as they compute, stay whole, and so do those of
            which no dim can be cut; `explain()` and `memory_report()` list them.
        optimizer_level: `"level1"`, `"level2"` or `"level3"`, see above.
        accumulate_grad_step: micro-steps of a step, over which gradients are averaged.
        axis, mesh: the data-parallel axis, and a mesh with it where the Cell isn't sharded over it, and with the axes
            (of size 1) that a plain Cell's `shard()` hooks name. Default: all ranks.
        gradients_mean: whether gradients are averaged over the axis. Default: where ranks have losses of their own.
        comm_fusion: what is communicated together, see `parse_comm_fusion`. Default: buckets of 64 MB.
        reshard_after_forward: at level 3, whether a unit's weights are dropped after its forward pass. If not, all are
            gathered at the beginning of a step, and stay. Default: True, but False in a pipeline.
        prefetch: at level 3, how many units ahead weights are gathered.
        mixed_precision: a `MixedPrecision`. Default: everything in the dtypes of the parameters.
        units: at level 3, paths of the Cells whose weights are gathered together. Default: see `find_units`.
        gradient_accumulation_shard: whether sums of gradients over micro-steps and micro-batches are kept in parts, and
            each one's gradients reduce-scattered. Default: at levels 2 and 3. (MindSpore: `parallel_optimizer_config`.)

    Raises:
        TypeError, ValueError: an argument that can't be; a second call; an optimizer that holds the parameters already.
    """
    mesh, has_axis = _checked_mesh(cell, axis, mesh)
    settings = _settings(
        mesh, axis, shard_size, threshold, optimizer_level, accumulate_grad_step, reshard_after_forward, prefetch,
        _checked_precision(mixed_precision), _checked_mean(gradients_mean, has_axis, axis, cell),
        gradient_accumulation_shard,
    )  # fmt: skip
    fusion, units = parse_comm_fusion(comm_fusion), _checked_units(cell, units)
    refuse_optimizers_of(cell, "hsdp")
    tree = _sharded_tree(cell, mesh, axis)  # what else can be wrong with it was looked for
    install(tree, settings, planned_parameters(tree, settings, units), fusion, has_axis)
    return cell


def _settings(mesh, axis, shard_size, threshold, level, count, reshard, prefetch, precision, mean, shards):
    check_settings(mesh, axis, shard_size, threshold, level, count, prefetch)
    check_flags(reshard_after_forward=reshard, gradient_accumulation_shard=shards)
    return HsdpSettings(
        *_refined(mesh, axis, shard_size), axis, shard_size, threshold, level, count, reshard, prefetch, precision,
        mean, shards,
    )  # fmt: skip


def _checked_precision(mixed_precision):
    precision = MixedPrecision() if mixed_precision is None else mixed_precision
    if not isinstance(precision, MixedPrecision):
        raise TypeError(
            f"hsdp(mixed_precision={mixed_precision!r}): should be a MixedPrecision, such as "
            'MixedPrecision(compute="float16")'
        )
    return precision


def _checked_mean(gradients_mean, has_axis, axis, cell):
    check_flags(gradients_mean=gradients_mean)
    if gradients_mean and has_axis:
        raise ValueError(
            f"hsdp(gradients_mean=True): {cell_label('', cell)} is sharded over axis '{axis}', so its loss is that of "
            "the whole batch, and gradients are terms of a sum: leave gradients_mean out"
        )
    return not has_axis if gradients_mean is None else bool(gradients_mean)


def _sharded_tree(cell, mesh, axis):
    """The `ShardedTree` of a Cell; a plain one is sharded over this rank alone, on a mesh with the other axes, which
    hooks may name, if of size 1."""
    if isinstance(cell, ShardedCell):
        return tree_of(cell)
    others = [name for name in mesh.axis_names if name != axis]
    names = others if others and mesh.axis_size(*others) == 1 else ["rank"]
    try:
        shard(cell, DeviceMesh((1,) * len(names), names, (world().rank,)))
    except ValueError as error:
        raise ValueError(
            f"{error} (hsdp() shards a plain Cell over one rank: where its hooks name mesh axes, call shard() before, "
            "or give hsdp() a mesh in which these have size 1)"
        ) from error
    return tree_of(cell)


def _refuse_second(cell):
    """Raise `ValueError` where a Cell, or one below, is in a tree that `hsdp()` can't take, or has taken."""
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


def _checked_mesh(cell, axis, mesh):
    """The mesh that has the data-parallel axis, and whether the Cell is sharded over that."""
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"hsdp() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
    if not isinstance(axis, str):
        raise TypeError(f"hsdp(axis={axis!r}): should be the name of one mesh axis")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"hsdp(mesh={mesh!r}): should be a DeviceMesh, as init_device_mesh() makes it")
    _refuse_second(cell)
    own = tree_of(cell).mesh if isinstance(cell, ShardedCell) else None
    if mesh is None:
        mesh = DeviceMesh((world().size,), (axis,)) if own is None else own
    if world().rank not in mesh:
        raise ValueError(
            f"hsdp(mesh={mesh!r}): this is rank {world().rank}, which isn't in it: give a mesh that has it"
        )
    if own is not None and own != mesh:
        _check_part(cell, own, axis, mesh)
    return mesh, own is not None and axis in own.axis_names


def _check_part(cell, own, axis, mesh):
    """Raise `ValueError` where a Cell is sharded over a mesh that isn't this rank's part of another one."""
    if axis in own.axis_names:
        raise ValueError(
            f"hsdp(mesh={mesh!r}): {cell_label('', cell)} is sharded over {own!r}, which has axis '{axis}': leave "
            "mesh out"
        )
    parts = set(own.axis_names) <= set(mesh.axis_names)
    if own.size > 1 and not (parts and mesh.sub_mesh(own.axis_names, world().rank) == own):
        raise ValueError(
            f"hsdp(mesh={mesh!r}): {cell_label('', cell)} is sharded over {own!r}, which isn't what rank "
            f"{world().rank} has of that mesh: shard it over mesh.sub_mesh(…) of the mesh that hsdp() gets"
        )


def _refined(mesh, axis, shard_size):
    """The mesh with the axis split where only a part of it shards; the axes that shard, and those that replicate."""
    size = mesh.axis_size(axis)
    if shard_size == size:
        return mesh, (axis,), ()
    if shard_size == 1:
        return mesh, (), (axis,)
    names = (axis + REPLICATE_AXIS_SUFFIX, axis + SHARD_AXIS_SUFFIX)
    for name in names:
        if name in mesh.axis_names:
            raise ValueError(
                f"hsdp(shard_size={shard_size}) cuts axis '{axis}' of {mesh} into {' and '.join(names)}, but the mesh "
                f"has an axis '{name}': rename that"
            )
    sizes = (size // shard_size, shard_size)
    return mesh.split_axis(axis, **dict(zip(names, sizes))), names[1:], names[:1]


def _checked_units(cell, units):
    """Paths of the units."""
    if units is None:
        return find_units(cell)
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


def share_parts(cells, paths):
    """Let Cells of one rank update a parameter together that each of them computes with: stages of a pipeline whose
    embedding is the output layer, too.

    The first Cell's part is what all of them have afterwards, in `cell.trainable_params()`, too: it is stored, updated
    and counted once. Call this before stages and optimizers are made of the Cells.

    Args:
        cells: what `hsdp()` was called with, alike.
        paths: of parameters; those of any that only one Cell has, or none, are left as they are.

    Raises:
        ValueError: parameters of a path that are cut otherwise, or of other shapes or dtypes.
    """
    for path in paths:
        holders = [(storage, storage.find(path)) for storage in map(storage_of, cells)]
        holders = [(storage, stored) for storage, stored in holders if stored is not None]
        for storage, stored in holders[1:]:
            _check_alike(path, *holders[0], storage, stored)
            storage.check_closed()
            storage.share(stored, holders[0][1])


def _check_alike(path, first_storage, first, storage, stored):
    plans = [replace(one.plan, unit="", reason="") for one in (first, stored)]
    if plans[0] != plans[1] or first.part.layout != stored.part.layout:
        raise ValueError(
            f"share_parts(): parameter '{path}' is {_shown(first)} in {first_storage.label}, but {_shown(stored)} in "
            f"{storage.label}: only what shard() and hsdp() treat alike can be one parameter"
        )


def _shown(stored):
    trained = "trained" if stored.plan.trainable else "frozen"
    dtypes = f"{stored.plan.dtype}, updated in {stored.plan.part_dtype}"
    return f"{trained}, of shape {stored.plan.shape}, {dtypes}, a part of {stored.part_shape} as {stored.part.layout}"
