"""What `hsdp()` does to a sharded tree: plans, parts, layouts, buckets, and hooks on gradients."""

from weakref import proxy

from mindspore import DeviceCtx, Parameter, mint, ops
from mindspore import dtype as mstype

from mindformers_core.communication import world
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.layout import Layout
from mindformers_core.operators.signature import is_float
from mindformers_core.sharding.shard import replace_parameters
from mindformers_core.zero.bucket_collectives import BucketCollectives
from mindformers_core.zero.buckets import Fusion, make_buckets
from mindformers_core.zero.meter import MemoryMeter
from mindformers_core.zero.plan import ParameterPlan, plan_parameters
from mindformers_core.zero.sharded_parameter import ShardedParameter
from mindformers_core.zero.storage import HsdpStorage
from mindformers_core.zero.units import unit_of

__all__ = ["apply_hsdp", "planned_parameters"]


def planned_parameters(tree, settings, units):
    """A `ParameterPlan` for every parameter of the tree, in order.

    Raises:
        ValueError: a parameter that is declared as cut over the data-parallel axis.
    """
    precision, holding = settings.precision, {}  # id of a parameter -> the units of the Cells that hold it
    for path, cell in tree.cells.items():
        for parameter in cell._params.values():
            holding.setdefault(id(parameter), set()).add(unit_of(path, units))
    parameters = []
    for path, parameter in tree.cells[""].parameters_and_names():
        if any(settings.axis in axes for axes in parameter.layout.dims):
            raise ValueError(
                f"parameter '{path}' of {tree.label('')} is declared as {parameter.layout}, cut over axis "
                f"'{settings.axis}', which hsdp() cuts parameters over: leave that axis out of its layout"
            )
        own = dtype_name(parameter.dtype)
        floats = is_float(own)
        if parameter.requires_grad and not floats:
            raise ValueError(
                f"parameter '{path}' of {tree.label('')} is {own}, which has no gradient: make it with "
                "requires_grad=False"
            )
        dtype, shard_dtype = (precision.compute_dtype(own), precision.parameter_dtype(own)) if floats else (own, own)
        by_unit = settings.level == "level3" and settings.shard_size > 1 and len(holding[id(parameter)]) == 1
        unit = next(iter(holding[id(parameter)])) if by_unit else ""
        parameters.append(
            ParameterPlan(path, tuple(parameter.shape), dtype, shard_dtype, parameter.requires_grad, unit)
        )
    return plan_parameters(parameters, settings.shard_size, settings.threshold, settings.level)


def apply_hsdp(tree, settings, plans, fusion, has_axis):
    """Give the tree its `HsdpStorage`.

    Args:
        tree: the `ShardedTree`.
        settings, plans: of `hsdp()`.
        fusion: a `Fusion` for every kind of collective.
        has_axis: whether the tree is sharded over the data-parallel axis.
    """
    root = tree.cells[""]
    sources = [parameter for _, parameter in root.parameters_and_names()]
    wholes = [_computing(source, plan) for source, plan in zip(sources, plans)]
    replace_parameters(root, {id(source): whole for source, whole in zip(sources, wholes)})
    stored, meter = [], MemoryMeter()
    for plan, source, whole in zip(plans, sources, wholes, strict=True):
        part_layout = _part_layout(plan, source.layout, settings)
        index = settings.mesh.group_index(world().rank, settings.shard_axes)
        stored.append(ShardedParameter(plan, whole, source, part_layout, index, settings.shard_size, meter))
        marks = (settings.axis,) if has_axis else ()
        tree.parameter_layouts[plan.path] = whole.computing_layout = source.layout.replace(varying=marks)
    for entry in stored:  # a whole that is what is updated, too
        if not entry.is_copied:
            entry.unsharded.layout = _part_layout(entry.plan, entry.unsharded.layout, settings)
    buckets = _buckets(plans, settings, fusion)
    storage = HsdpStorage(settings, stored, *buckets, meter, tree.label(""), tree.cells.values())
    if world().backend != "fake":
        _connect(storage)
    tree.forget_programs()
    tree.storage = storage


def _computing(source, plan):
    """The Parameter that computes: the one that there is, or one in another dtype."""
    if plan.dtype == dtype_name(source.dtype):
        return source
    dtype = getattr(mstype, plan.dtype)
    if source.is_meta:
        with DeviceCtx("meta"):
            values = mint.zeros(plan.shape, dtype=dtype)
            whole = Parameter(values, name=source.name, requires_grad=source.requires_grad)
    else:
        whole = Parameter(ops.cast(source.value(), dtype), name=source.name, requires_grad=source.requires_grad)
    vars(whole).update({name: value for name, value in vars(source).items() if name not in vars(whole)})
    return whole


def _part_layout(plan, layout, settings):
    """The layout of a parameter's part, on the mesh that has the shard axis."""
    dims = list(layout.dims)
    if plan.dim is not None:
        dims[plan.dim] = (*dims[plan.dim], *settings.shard_axes)
    return Layout.on(settings.mesh, dims)


def _buckets(plans, settings, fusion):
    """Buckets of weights, in the order of the Cells, and of gradients, in that of a backward pass."""

    def reduce_dtype(plan):
        return settings.precision.reduce_dtype(plan.dtype)

    if settings.mesh.axis_size(*settings.replicate_axes, *settings.shard_axes) == 1:  # nothing to put together for
        fusion = dict.fromkeys(fusion, Fusion(0))
    cut = [number for number, plan in enumerate(plans) if plan.dim is not None]
    gathers = make_buckets("allgather", plans, cut, fusion["allgather"], lambda plan: plan.dtype, ITEM_BYTES)
    reduces = []
    for kind, is_cut in (("reducescatter", True), ("allreduce", False)):
        numbers = [number for number, plan in enumerate(plans) if plan.trainable and (plan.dim is not None) == is_cut]
        reduces += make_buckets(kind, plans, numbers[::-1], fusion[kind], reduce_dtype, ITEM_BYTES)
    reduces.sort(key=lambda bucket: -min(bucket.members))
    return gathers, reduces


def _connect(storage):
    """Make the collectives, listen to gradients, and go to parts."""
    settings = storage.settings
    storage.collectives = BucketCollectives(
        settings.mesh, settings.shard_axes, settings.replicate_axes, settings.scale, settings.precision, storage.meter
    )
    for number in storage.trained:
        storage.parameters[number].unsharded.register_hook(_listener(proxy(storage.schedule), number))
    for stored in storage.parameters:
        stored.release()


def _listener(schedule, number):
    """A hook on a parameter that MindSpore hides from the garbage collector: so `schedule` is a weak reference."""
    return lambda gradient: schedule.gradient_came(number, gradient)
