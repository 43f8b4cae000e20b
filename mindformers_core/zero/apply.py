"""The changes that `hsdp()` makes to a sharded tree: plans, shards, layouts, buckets, and hooks on gradients."""

from weakref import proxy

from mindformers_core.communication import world
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import Layout
from mindformers_core.operators.signature import is_float
from mindformers_core.sharding.parameter_storage import unit_of
from mindformers_core.sharding.replicas import check_replicas
from mindformers_core.sharding.shard import replace_parameters
from mindformers_core.zero.bucket_collectives import BucketCollectives
from mindformers_core.zero.buckets import Fusion, make_buckets
from mindformers_core.zero.meter import MemoryMeter
from mindformers_core.zero.plan import ParameterPlan, plan_parameters
from mindformers_core.zero.sharded_parameter import ShardedParameter, parameter_like
from mindformers_core.zero.storage import HsdpStorage

_UNWRITABLE = {  # by whether the optimizer updates another tensor
    True: "hsdp() updates a copy of it: leave it whole, by a larger threshold",
    False: "hsdp() gives every replica a batch, and so a value, of its own: have its axis in the mesh of shard()",
}


def apply_hsdp(tree, settings, units, fusion, has_axis):
    """Give a tree its `HsdpStorage`.

    Args:
        tree: the `ShardedTree`.
        settings: the `HsdpSettings`.
        units: paths of the Cells that are units at level 3.
        fusion: a `Fusion` for every kind of collective.
        has_axis: whether the tree is sharded over the data-parallel axes.

    Raises:
        ValueError: a parameter that has no gradient but is trained; ranks with other initial weights.
    """
    plans, root = _plans(tree, settings, units), tree.cells[""]
    check_replicas(root)  # shards of other weights would make neither rank's
    sources = [parameter for _, parameter in root.parameters_and_names()]
    computing = [
        source if plan.dtype == _model_dtype(source) else parameter_like(source, plan.shape, plan.dtype, source)
        for source, plan in zip(sources, plans)
    ]
    replace_parameters(root, {id(source): parameter for source, parameter in zip(sources, computing)})
    parameters, meter = [], MemoryMeter()
    for plan, source, parameter in zip(plans, sources, computing, strict=True):
        layout, own = source.layout, settings.without(plan.cut)
        dims = [tuple(piece for axis in entry for piece in _pieces(settings, axis)) for entry in layout.dims]
        if plan.dim is not None:
            dims[plan.dim] = (*dims[plan.dim], *own.shard_axes)
        if plan.is_copied or not has_axis and settings.group_size > 1:
            parameter.unwritable = f"parameter '{plan.path}' is written by a Cell, and {_UNWRITABLE[plan.is_copied]}"
        shard_layout = Layout.on(settings.mesh, dims)
        index = settings.mesh.group_index(world().rank, own.shard_axes)
        parameters.append(ShardedParameter(plan, parameter, source, shard_layout, index, own.shard_size, meter))
        marks = [axis for axis in settings.axes if has_axis and axis not in layout.cut_axes]
        tree.parameter_layouts[plan.path] = parameter.computing_layout = layout.replace(varying=marks)
    buckets = _buckets(plans, settings, fusion)
    storage = HsdpStorage(tree, settings, parameters, *buckets, meter)
    if not has_axis:
        axes = *settings.replicate_axes, *settings.shard_axes
        storage.replica = settings.mesh.group_index(world().rank, axes), settings.group_size
    if world().backend != "fake":
        storage.collectives = BucketCollectives(settings, meter, dict.fromkeys(plan.cut for plan in plans))
        for number in storage.trained:
            parameters[number].unsharded.register_hook(_gradient_hook(proxy(storage.schedule), number))
        for stored in parameters:
            stored.release()
    tree.forget_programs()
    tree.storage = storage


def _plans(tree, settings, units):
    """A `ParameterPlan` for every parameter of the tree, in order."""
    precision, holding = settings.precision, {}  # id of a parameter -> the units of the Cells that hold it
    for path, cell in tree.cells.items():
        for parameter in cell.get_parameters(expand=False):
            holding.setdefault(id(parameter), set()).add(unit_of(path, units))
    plans = []
    for path, parameter in tree.cells[""].parameters_and_names():
        cut = [axis for axis in settings.axes if axis in parameter.layout.cut_axes]
        cut = tuple(piece for axis in cut for piece in _pieces(settings, axis))
        own = _model_dtype(parameter)
        floats = is_float(own)
        if parameter.requires_grad and not floats:
            raise ValueError(
                f"parameter '{path}' of {tree.label('')} is {own}, which has no gradient: make it with "
                "requires_grad=False"
            )
        is_state = getattr(parameter, "is_state", False)  # is written between steps: it stays whole, in its dtype
        dtypes = (precision.compute or own, precision.parameter or own) if floats and not is_state else (own, own)
        by_unit = settings.level == "level3" and settings.shard_size > 1 and len(holding[id(parameter)]) == 1
        unit = next(iter(holding[id(parameter)])) if by_unit else ""
        plan = ParameterPlan(path, tuple(parameter.shape), *dtypes, parameter.requires_grad, unit, cut)
        size = 1 if is_state else settings.without(cut).shard_size
        plans += plan_parameters([plan], size, settings.threshold, settings.level)
    return tuple(plans)


def _pieces(settings, axis):
    """What an axis of the tree's mesh is in the settings' one: two axes where `shard_size` cuts it."""
    is_split = axis in settings.axes and axis not in settings.mesh.axis_names
    return (f"{axis}_replicate", f"{axis}_shard") if is_split else (axis,)


def _model_dtype(parameter):
    """The name of a Parameter's dtype in the model; an observer may have given it another one."""
    return getattr(parameter, "model_dtype", None) or dtype_name(parameter.dtype)


def _buckets(plans, settings, fusion):
    """Buckets of weights, in the order of the Cells, and of gradients, in that of a backward pass."""

    def reduce_dtype(plan):
        return settings.precision.reduce_dtype(plan.dtype)

    if settings.group_size == 1:  # no collective to fuse
        fusion = dict.fromkeys(fusion, Fusion(0))
    sharded = [number for number, plan in enumerate(plans) if plan.dim is not None]
    gathers = make_buckets("allgather", plans, sharded, fusion["allgather"], lambda plan: plan.dtype)
    reduces = []
    for kind, is_sharded in (("reducescatter", True), ("allreduce", False)):
        numbers = [each for each, plan in enumerate(plans) if plan.trainable and (plan.dim is not None) == is_sharded]
        reduces += make_buckets(kind, plans, numbers[::-1], fusion[kind], reduce_dtype)
    reduces.sort(key=lambda bucket: -min(bucket.members))
    return gathers, reduces


def _gradient_hook(schedule, number):
    """A hook on a parameter. MindSpore hides it from the garbage collector, so `schedule` is a weak reference."""
    return lambda gradient: schedule.gradient_came(number, gradient)
