"""`shard()`: a single-card Cell tree becomes parallel, in place, from the layouts declared for a few of its tensors."""

from collections import Counter
from dataclasses import dataclass

from mindspore import DeviceCtx, Parameter, ParameterTuple, mint, nn, ops

from mindformers_core.algorithms.redistribute import model_of_device, redistribute_local
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture
from mindformers_core.communication import process_state, world
from mindformers_core.dtensor.dtensor import placed_parameter
from mindformers_core.dtensor.interception import intercept_operators
from mindformers_core.hints import nearest
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.mindspore_private import parameter_lists_of, parameters_of, recompute_cell_of
from mindformers_core.padding import narrowed, sizes_of_parts, stored_shape
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.propagate import derive_parameters
from mindformers_core.redistribution import DeviceModel
from mindformers_core.sharding.declare import cell_label, collect_declarations, eager_cells
from mindformers_core.sharding.initialize import initializers, materialize
from mindformers_core.sharding.optimizers_before import refuse_optimizers_of
from mindformers_core.sharding.sharded_cells import ShardedCell, computing_parameters, tree_of
from mindformers_core.sharding.sharded_tree import ShardedTree

MODES = ("generated", "eager")
FULL_BATCH = "full_batch"


@dataclass(frozen=True)
class ShardConfig:
    """What the hooks of our models and layers ask for. Hooks of others may want more: any object will do as well.

    Attributes:
        batch_axes: mesh axes that cut the samples of a batch, a name or a tuple. Default: as the arguments arrive.
        sequence_axes: mesh axes that cut every sequence (context parallelism), likewise.
        sequence_parallel: whether norms compute with the sequence dim cut over axis tp. Default: no.
    """

    batch_axes: str | tuple | None = None
    sequence_axes: str | tuple | None = None
    sequence_parallel: bool = False


def shard(
    cell, mesh, config=None, plan=None, seed=0, mode="generated", inputs=None, check_inputs=True, device_model=None
):
    """Distribute `cell` over `mesh`: in PyNative and under `jit` it then computes the results of one card.

    Every Cell class in the tree may define `shard(self, config)` and return `(input_layout, output_layout,
    weight_layout)`, each a layout, a tuple by position, a dict by argument or parameter name, or `None` to derive it
    (RFC ICY7S6). Undeclared layouts of activations are derived by propagation, and with `inputs` those of parameters,
    too; without `inputs` undeclared parameters are replicated.

    The first call with inputs of new shapes captures the Cell, propagates the layouts, generates a program of plain
    code on local tensors, and runs it; `explain`, `prepare` and `programs` show the program and its file. Cells that
    need the values of tensors in Python are marked, by `cell.net.gate.eager()`: they run operator by operator.

    Cells keep their identity, attributes and names. Parameters are replaced by `Parameter`s of the same name that hold
    this rank's shard (all have `.layout` and `.global_shape`), so optimizers, built afterwards, and checkpoints see
    local tensors. Plain tensors passed to `cell` are this rank's shards in the declared input layouts; results are
    `DTensor`s in PyNative, and shards inside compiled functions. Hooks on Cells see local tensors where a program runs,
    and global tensors where a Cell runs eagerly.

    Args:
        cell: the Cell, built the ordinary way, or under `ms.DeviceCtx("meta")`: then only this rank's shards are
            allocated.
        mesh: a `DeviceMesh`.
        config: passed to the hooks, such as `ShardConfig(batch_axes="dp")`, or a recipe's section `parallelism`.
        plan: `{"layers.*.mlp.fc1": {"input": …, "output": …, "weight": …}}`, layouts by path pattern (`*` is one
            segment, `**` any number), for Cells whose source can't be edited; `"eager": True` marks a Cell. It has
            precedence over hooks; beside it a method `shard` with other parameters than `(self, config)` is none. A
            path may end in a primitive, `{"dense1.matmul": {"input": (…, …)}}`, as by `primitive.shard(in_strategy)`.
        seed: of initial values of parameters built on the meta device: the same global values for any mesh.
        mode: `"generated"`, or `"eager"`: operators are dispatched one by one, in PyNative only.
        inputs: arguments of one call, as a tuple, with global tensors or `TensorMeta`s (only shapes and dtypes are
            used): undeclared parameters are stored in the layouts that their operators take. Or `"full_batch"`: plain
            tensors passed to `cell` are global, the same on all ranks, and each rank slices its shard. Or a dict, name
            of an argument -> the layout in which plain tensors come, to be redistributed to the declared one.
        check_inputs: whether ranks compare the shapes of inputs before the first computation with new shapes, and warn
            where ranks that should have different shards of the batch have equal ones, or the other way round; and
            `check_replicas` before the first call.
        device_model: a `DeviceModel`, by whose prices layouts are derived. Default: that of the device.

    Returns: `cell` itself.

    Raises:
        TypeError, ValueError: a declaration that doesn't fit; names the Cell's path, tensor, shape and layout. Later,
            of a call: ranks have parts of different shapes, or other initial weights.
    """
    device_model = _check_arguments(cell, mesh, mode, inputs, device_model)
    arriving = None if isinstance(inputs, str) else inputs if isinstance(inputs, dict) else {}
    declarations = collect_declarations(cell, config, plan)
    layouts = _declared_layouts(cell, mesh, declarations)
    whole = {path: Layout.on(mesh, ((),) * p.ndim) for path, p in cell.parameters_and_names() if path not in layouts}
    if not isinstance(inputs, (str, dict, type(None))):
        layouts = _derived_layouts(cell, mesh, declarations, layouts | whole, frozenset(whole), inputs, device_model)
    _place_parameters(cell, whole | layouts, seed)
    intercept_operators()
    tree = ShardedTree(cell, mesh, declarations, arriving, check_inputs, device_model)
    for path in tree.cells if mode == "eager" else eager_cells(cell, plan):
        _check_eager(tree.label(path), declarations.get(path))
        tree.mark_eager(path)
    return cell


def _check_eager(label, declaration):
    if declaration is not None and declaration.operators:
        raise ValueError(
            f"{label} declares layouts for its operators {', '.join(declaration.operators)}, which the eager engine "
            'can\'t honour: use mode="generated", or declare the layouts of tensors'
        )


def _check_arguments(cell, mesh, mode, inputs, device_model):
    """Raise what `shard` raises of its arguments; else the `DeviceModel` that layouts are chosen by."""
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"shard() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"shard() takes a DeviceMesh, as init_device_mesh() makes it, not {mesh!r}")
    for _, child in cell.cells_and_names():
        if isinstance(child, ShardedCell):
            is_hsdp = tree_of(child).storage.settings is not None
            how = "by hsdp(): call shard() first, then hsdp()" if is_hsdp else "already: call shard() once"
            raise ValueError(f"{type(cell).__name__}, or a Cell in it, is sharded {how}, with the root Cell")
    if mode not in MODES:
        raise ValueError(f"shard(mode={mode!r}): choose one of {', '.join(MODES)}{nearest(str(mode), MODES)}")
    if isinstance(inputs, str) and inputs != FULL_BATCH:
        raise ValueError(f"shard(inputs={inputs!r}): give the arguments of one call as a tuple, or {FULL_BATCH!r}")
    if device_model is not None and not isinstance(device_model, DeviceModel):
        raise TypeError(f"shard(device_model={device_model!r}): use CPU, GPU, ASCEND, or one made from these")
    return model_of_device(mesh) if device_model is None else device_model.on_mesh(mesh)


def _place_parameters(cell, layouts, seed):
    """Replace every parameter of the tree by this rank's shard; parameters without values draw theirs from the seed.

    The statistics of `SyncBatchNorm` are those of the whole batch, as on one card, without its own collectives.
    In a dry run (the fake backend) these stay without values, on the meta device: nothing is allocated.
    """
    named = dict(cell.parameters_and_names())
    counts = Counter(parameter.name for parameter in named.values())
    for path, parameter in named.items():
        if counts[parameter.name] > 1:  # optimizers refuse equal names, and a dict by name has one of them
            parameter.name = path
    refuse_optimizers_of(cell, "shard", {path for path in named if any(layouts[path].dims)})
    shapes = {path: tuple(p.shape) for path, p, initializer in initializers(cell) if initializer is not None}
    parts = {}
    if world().backend == "fake":
        for path in shapes:
            with DeviceCtx("meta"):  # while it is open, other threads' tensors have no values either
                parameter = named[path]
                part = mint.zeros(layouts[path].local_shape(stored_shape(parameter)), dtype=parameter.dtype)
                parts[path] = Parameter(part, name=parameter.name, requires_grad=parameter.requires_grad)
                if hasattr(parameter, "part_sizes"):
                    parts[path].part_sizes = parameter.part_sizes
    else:
        materialize(cell, seed, layouts, world().rank)
    placed = {id(p): placed_parameter(parts.get(path, p), layouts[path], shapes.get(path)) for path, p in named.items()}
    replace_parameters(cell, process_state().instrumentation.placed(cell, placed))
    process_state().observer.sharded(cell)
    for _, child in cell.cells_and_names():
        if isinstance(child, mint.nn.SyncBatchNorm):
            child.world_size = 1


def replace_parameters(cell, placed):
    """Replace the Parameters of a Cell and of all below; `placed`: id of a present Parameter -> the new one."""
    for _, child in cell.cells_and_names():
        for name, parameter in parameters_of(child).items():
            if parameter is not None:
                parameters_of(child)[name] = placed[id(parameter)]
        for name, value in list(child.__dict__.items()):
            if isinstance(value, (tuple, list)) and value and all(id(entry) in placed for entry in value):
                del child.__dict__[name]  # so that reading it calls `__getattr__`, which returns views
                parameter_lists_of(child)[name] = ParameterTuple([placed[id(parameter)] for parameter in value])
    for _, child in cell.cells_and_names():
        if recompute_cell_of(child) is not None:  # it remembers the parameters that it differentiates by
            trained = [parameter for parameter in computing_parameters(child) if parameter.requires_grad]
            object.__setattr__(recompute_cell_of(child), "internal_params", trained)


def _declared_layouts(cell, mesh, declarations):
    """Parameter path -> layout, where one is declared; or of a Parameter with dims of its Cell's declared one, as of an
    adapter: its attribute `cut_like` is the name of that one, and a number of a dim of it, or None, for every dim.
    """
    declared = {}
    for parameter in cell.get_parameters():
        vars(parameter).pop("part_sizes", None)  # of another mesh
    for path, child in cell.cells_and_names():
        weights = declarations[path].weights if path in declarations else {}
        for name, given in weights.items():
            where = f"parameter '{name}' of {cell_label(path, child)}"
            parameter = parameters_of(child)[name]
            layout = bind_layout(given, mesh, parameter.ndim, name=where)
            pad = getattr(given, "pad", False)
            if pad and (sizes := sizes_of_parts(layout, tuple(parameter.shape), pad, where)):
                parameter.part_sizes = sizes
            elif not hasattr(parameter, "part_sizes"):
                layout.local_shape(parameter.shape, where, "other axes, or store zeros behind it, layout(…, pad=True)")
            if declared.setdefault(id(parameter), layout) != layout:
                raise ValueError(
                    f"{where} is declared as {layout}, but it is shared, and elsewhere declared as "
                    f"{declared[id(parameter)]}"
                )
    for _, child in cell.cells_and_names():
        for parameter in parameters_of(child).values():
            name, dims = getattr(parameter, "cut_like", ("", ()))
            base = parameters_of(child).get(name)
            known, padded = declared.get(id(base)), getattr(base, "part_sizes", ())
            if known is not None:
                cuts = tuple(() if dim is None else known.dims[dim] for dim in dims)
                declared.setdefault(id(parameter), Layout.on(mesh, cuts))
                sizes = tuple(None if dim is None else padded[dim] for dim in dims) if padded else ()
                if any(sizes):
                    parameter.part_sizes = sizes
    return {path: declared[id(p)] for path, p in cell.parameters_and_names() if id(p) in declared}


def _derived_layouts(cell, mesh, declarations, layouts, free, inputs, device_model):
    """Parameter path -> layout, after one propagation in which some are free.

    Args:
        cell: not sharded yet.
        mesh, declarations: as in `shard`.
        layouts: of all parameters.
        free: paths of the undeclared ones.
        inputs: arguments of one call, with global tensors.
        device_model: by which layouts are chosen.
    """
    graph = capture(cell, *inputs)
    declared = declarations[""].inputs if "" in declarations else {}
    arriving = {}
    for name, structure in graph.arguments.items():
        for value in tree_leaves(structure):
            layout = declared.get(name, Layout.on(mesh, ((),) * len(value.shape)))
            arriving[value.id] = bind_layout(layout, mesh, len(value.shape), name=f"input '{name}' of the root Cell")
    return derive_parameters(graph, mesh, arriving, layouts, declarations, device_model, free, algorithm_of)


def full_parameters(cell):
    """The gathered parameters, on every rank, of a Cell after `shard()` or `hsdp()`; all ranks call this.

    `mindspore.save_checkpoint(full_parameters(net), "net.ckpt")` on one rank writes the checkpoint of one card. All
    parameters have to fit into the memory of a rank.

    Returns:
        A dict: name of the parameter -> `Parameter` of its global shape, since MindSpore skips plain tensors.
    """
    whole = {}
    for parameter in cell.get_parameters():
        target = Layout.on(parameter.layout.mesh, ((),) * len(parameter.global_shape))
        values = redistribute_local(parameter, parameter.layout, target, stored_shape(parameter))
        values = narrowed(values, getattr(parameter, "part_sizes", ()), ops)
        whole[parameter.name] = Parameter(values, name=parameter.name, requires_grad=parameter.requires_grad)
    return whole
