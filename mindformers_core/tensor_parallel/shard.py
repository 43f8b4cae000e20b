"""`shard()`: a single-card Cell tree becomes parallel, in place, from the layouts declared for a few of its tensors."""

import inspect
from functools import cache

from mindspore import DeviceCtx, Parameter, ParameterTuple, mint, nn

from mindformers_core.communication import world
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.tensor_parallel.boundary import Boundary
from mindformers_core.tensor_parallel.declare import cell_label, collect_declarations
from mindformers_core.tensor_parallel.dtensor import parameter_meta, parameter_view, placed_parameter, wrap
from mindformers_core.tensor_parallel.initialize import initializer_of, materialize

__all__ = ["shard"]

_LOCATED = (ValueError, TypeError, IndexError, RuntimeError)


def shard(cell, mesh, config=None, plan=None, seed=0):
    """Distribute `cell` over `mesh`: afterwards it computes, in PyNative, what it computed on one card.

    Every Cell class in the tree may define `shard(self, config)` and return `(input_layout, output_layout,
    weight_layout)`, each a layout, a tuple by position, a dict by argument or parameter name, or `None` to derive it
    (RFC ICY7S6). What nobody declares is derived: parameters are replicated, activations follow their operators.

    The tree stays the user's own: Cells keep their identity, attributes and names. Sharded parameters are replaced by
    `Parameter`s of the same name that hold this rank's part (all have `.layout` and `.global_shape`), so optimizers,
    which are built afterwards, and checkpoints see local tensors; code in `construct` sees global ones. Plain tensors
    passed to `cell` are this rank's parts in the declared input layouts; results are `DTensor`s.

    Args:
        cell: the Cell, built the ordinary way, or under `ms.DeviceCtx("meta")` so that nothing is allocated before its
            part is.
        mesh: a `DeviceMesh`.
        config: passed to the hooks.
        plan: `{"layers.*.mlp.fc1": {"input": …, "output": …, "weight": …}}`, layouts by path pattern (`*` is one
            segment, `**` any number), for Cells that nobody may edit. It wins over hooks.
        seed: of the initial values of parameters built on the meta device: the same global values for any mesh.

    Returns:
        `cell` itself.

    Raises:
        TypeError, ValueError: a declaration that is malformed or doesn't fit; names the Cell's path, the tensor, its
            shape and layout.
    """
    if not isinstance(cell, nn.Cell):
        raise TypeError(f"shard() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"shard() takes a DeviceMesh, as init_device_mesh() makes it, not {mesh!r}")
    if any(isinstance(child, _ShardedCell) for _, child in cell.cells_and_names()):
        raise ValueError(
            f"{type(cell).__name__}, or a Cell in it, is sharded already: call shard() once, with the root Cell"
        )
    declarations = collect_declarations(cell, config, plan)
    _place_parameters(cell, mesh, declarations, seed)
    tree = _Tree()
    for path, child in list(cell.cells_and_names()):
        arguments = tuple(name for name in inspect.signature(type(child).construct).parameters if name != "self")
        boundary = Boundary(
            cell_label(path, child), mesh, arguments, declarations.get(path), _weight_axes(child), child is cell
        )
        child.__dict__["_sharding"] = (tree, boundary)
        child.__class__ = _sharded_class(type(child))
    return cell


class _Tree:
    """What the Cells of one sharded tree share: the views of its parameters while the root runs, and else None."""

    def __init__(self):
        self.views = None


class _ShardedCell:
    """Mixed into the class of every Cell of a sharded tree."""

    def construct(self, *args, **kwargs):
        tree, boundary = self.__dict__["_sharding"]
        outermost = tree.views is None
        if outermost:
            tree.views = {}
        try:
            args, kwargs = boundary.enter(args, kwargs)
            return boundary.leave(super().construct(*args, **kwargs))
        except _LOCATED as error:
            raise _located(error, boundary.label) from error.__cause__
        finally:
            if outermost:
                tree.views = None

    def __getattr__(self, name):
        value = super().__getattr__(name)
        if isinstance(value, Parameter) and hasattr(value, "global_shape"):
            return _view(value, self.__dict__["_sharding"][0])
        if isinstance(value, ParameterTuple):
            return tuple(_view(parameter, self.__dict__["_sharding"][0]) for parameter in value)
        return value


@cache
def _sharded_class(cls):
    """`cls` with parameters seen as DTensors, and the boundary around its `construct`. Called as before."""
    return type(cls.__name__, (_ShardedCell, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _view(parameter, tree):
    """The DTensor of a parameter, one for a whole forward pass, so that all its uses share marks and gathers."""
    if tree.views is None:
        return parameter_view(parameter)
    view = tree.views.get(id(parameter))
    if view is None:
        view = tree.views[id(parameter)] = wrap(parameter, parameter_meta(parameter))
    return view


def _located(error, label):
    """The error with the innermost Cell's name in front, once. A user's own kind of error is left as it is."""
    if type(error) not in _LOCATED or getattr(error, "is_located", False):
        return error
    text = str(error) if label in str(error) else f"in {label}: {error}"
    located = type(error)(text).with_traceback(error.__traceback__)
    located.is_located = True
    return located


def _weight_axes(cell):
    """Axes on which some parameter of the Cell or of one below it is sharded."""
    return frozenset(axis for parameter in cell.get_parameters() for axes in parameter.layout.dims for axis in axes)


def _place_parameters(cell, mesh, declarations, seed):
    """Cut every parameter of the tree to this rank's part; those without values yet draw theirs from the seed.

    In a dry run (the fake backend) these stay without values, on the meta device: nothing is allocated.
    """
    layouts = _parameter_layouts(cell, mesh, declarations)
    named = dict(cell.parameters_and_names())
    shapes = {path: tuple(p.shape) for path, p in named.items() if initializer_of(p) is not None}
    if world().backend == "fake":
        parts = {path: _meta_part(named[path], layouts[path]) for path in shapes}
    else:
        materialize(cell, seed, layouts, world().rank)
        parts = {}
    placed = {id(p): placed_parameter(parts.get(path, p), layouts[path], shapes.get(path)) for path, p in named.items()}
    for _, child in cell.cells_and_names():
        for name, parameter in child._params.items():
            if parameter is not None:
                child._params[name] = placed[id(parameter)]
        for name, value in list(child.__dict__.items()):
            if isinstance(value, (tuple, list)) and value and all(id(entry) in placed for entry in value):
                del child.__dict__[name]  # where it lies from now on, reading it asks `__getattr__`, which gives views
                child._params_list[name] = ParameterTuple([placed[id(parameter)] for parameter in value])
    for _, child in cell.cells_and_names():
        if child._recompute_cell is not None:  # it remembers the parameters that it differentiates by
            object.__setattr__(child._recompute_cell, "internal_params", child.trainable_params())


def _meta_part(parameter, layout):
    """A Parameter on the meta device with the shape of this rank's part."""
    with DeviceCtx("meta"):
        part = mint.zeros(layout.local_shape(parameter.shape), dtype=parameter.dtype)
        return Parameter(part, name=parameter.name, requires_grad=parameter.requires_grad)


def _parameter_layouts(cell, mesh, declarations):
    """Parameter path -> layout, as declared or else replicated."""
    declared = {}
    for path, child in cell.cells_and_names():
        weights = declarations[path].weights if path in declarations else {}
        for name, given in weights.items():
            where = f"parameter '{name}' of {cell_label(path, child)}"
            parameter = child._params[name]
            layout = bind_layout(given, mesh, parameter.ndim, name=where)
            layout.local_shape(parameter.shape, where)
            if declared.setdefault(id(parameter), layout) != layout:
                raise ValueError(
                    f"{where} is declared as {layout}, but it is shared, and elsewhere declared as "
                    f"{declared[id(parameter)]}"
                )
    return {
        path: declared.get(id(parameter), Layout.on(mesh, ((),) * parameter.ndim))
        for path, parameter in cell.parameters_and_names()
    }
