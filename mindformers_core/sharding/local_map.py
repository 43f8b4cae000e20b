"""`local_map`: hand-written local code among global tensors, the *manual* way of writing parallel code."""

from functools import wraps

from mindspore import Tensor

from mindformers_core.capture.traced import Traced
from mindformers_core.dtensor.dtensor import DTensor, distribute_tensor
from mindformers_core.layout import Layout, LayoutSpec, bind_layout

__all__ = ["local_map"]


def local_map(function, in_layouts, out_layouts, mesh=None, varying=None):
    """A function of DTensors that runs `function` on this rank's parts.

    Args:
        function: takes and returns plain local tensors; may communicate with the collectives of
            `mindformers_core.communication`.
        in_layouts: for every tensor argument (in order) the layout that it is moved to first, or `None` to take it as
            it comes. One layout stands for all arguments.
        out_layouts: for every result the layout that it is then understood to have; one layout for a single result.
        mesh: the mesh of layouts that are not bound; default: that of the first DTensor.
        varying: axes along which ranks do different work with the tensors that are whole there, so that the gradients
            of these are summed over them. Default: all axes on which any argument or result is sharded or partial.
            Name them where that is too many, as for a scale that is applied to what `function` has summed with a
            collective of its own.

    A plain tensor is one that all ranks hold alike.

    Raises:
        TypeError: no DTensor among the arguments. ValueError: another number of tensors or results than of layouts.
    """

    @wraps(function)
    def mapped(*args):
        places = [place for place, argument in enumerate(args) if isinstance(argument, Tensor)]
        tensors = [args[place] for place in places]
        for tensor in tensors:
            if isinstance(tensor, Traced):
                raise tensor.by_hand(f"local_map({_name(function)})")
        used = mesh or next((tensor.mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
        if used is None:
            raise TypeError(f"local_map({_name(function)}) was called without any DTensor")
        declared = _one_each(in_layouts, len(tensors), "in_layouts", function)
        needed = [_bound(layout, used, tensor) for layout, tensor in zip(declared, tensors)]
        results = [bind_layout(layout, used) for layout in _as_tuple(out_layouts)]
        used.check_axes(varying or ())
        active = _placing(needed + results) if varying is None else set(varying)
        local = list(args)
        for place, tensor, layout in zip(places, tensors, needed):
            if not isinstance(tensor, DTensor):
                tensor = distribute_tensor(tensor, Layout.on(used, ((),) * tensor.ndim))
            local[place] = tensor.redistribute(_marked(layout, active)).to_local()
        outputs = function(*local)
        produced = _as_tuple(outputs)
        if len(produced) != len(results):
            raise ValueError(
                f"local_map({_name(function)}): {len(produced)} results, but out_layouts has {len(results)}"
            )
        wrapped = tuple(DTensor.from_local(output, layout) for output, layout in zip(produced, results))
        return wrapped if isinstance(outputs, (tuple, list)) else wrapped[0]

    return mapped


def _placing(layouts):
    """All axes on which any of the layouts is something else than replicated."""
    cut = {axis for layout in layouts for axes in layout.dims for axis in axes}
    return cut | {axis for layout in layouts for axis in (*dict(layout.partial), *layout.varying)}


def _name(function):
    return getattr(function, "__name__", type(function).__name__)


def _as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _one_each(layouts, count, what, function):
    layouts = (layouts,) * count if layouts is None or isinstance(layouts, (Layout, LayoutSpec)) else tuple(layouts)
    if len(layouts) != count:
        raise ValueError(
            f"local_map({_name(function)}): {count} tensor arguments, but {what} has {len(layouts)} layouts"
        )
    return layouts


def _bound(declared, mesh, tensor):
    arriving = tensor.layout if isinstance(tensor, DTensor) else Layout.on(mesh, ((),) * tensor.ndim)
    return arriving if declared is None else bind_layout(declared, mesh, tensor.ndim, arriving)


def _marked(layout, active):
    placed = {axis for axes in layout.dims for axis in axes} | set(dict(layout.partial))
    return layout.replace(varying=[axis for axis in layout.mesh.axis_names if axis in active and axis not in placed])
