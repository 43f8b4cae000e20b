"""`local_map`: hand-written local code among global tensors, the *manual* way of writing parallel code."""

from functools import wraps

from mindspore import Tensor

from mindformers_core.capture.traced import Traced
from mindformers_core.communication.world import checks_collectives, process_state, world
from mindformers_core.dtensor.dtensor import DTensor, distribute_tensor
from mindformers_core.layout import Layout, LayoutSpec, bind_layout
from mindformers_core.sharding.replicas import check_result


def local_map(function, in_layouts, out_layouts, mesh=None, varying=None):
    """A function of DTensors that runs `function` on this rank's parts.

    Args:
        function: takes and returns plain local tensors; may communicate with the collectives of
            `mindformers_core.communication`.
        in_layouts: for every tensor argument (in order) the layout that it is redistributed to first, or `None` to keep
            its layout. One layout stands for all arguments.
        out_layouts: for every result its layout; one layout for a single result.
        mesh: the mesh of layouts that are not bound; default: that of the first DTensor.
        varying: axes along which ranks compute differently with tensors that are replicated there, so that gradients
            of these tensors are summed over the axes. Default: all axes on which any argument or result is sharded or
            partial. Fewer are right for example for a scale that `function` applies after a collective of its own.

    A plain tensor is replicated, the same on all ranks; where there is one rank, `function` takes it without DTensors.

    Raises:
        TypeError: no DTensor among the arguments. ValueError: another number of tensors or results than of layouts;
            a result that differs among ranks that have it alike, as they compare (`check_collectives`) at first calls.
    """

    label, compared = f"local_map({getattr(function, '__name__', type(function).__name__)})", set()

    @wraps(function)
    def mapped(*args):
        places = [place for place, argument in enumerate(args) if isinstance(argument, Tensor)]
        for place in places:
            if isinstance(args[place], Traced):
                raise args[place].by_hand(label)
        used = mesh or next((args[place].mesh for place in places if isinstance(args[place], DTensor)), None)
        if used is None:
            if process_state().world is None or world().size == 1:
                return function(*args)
            raise TypeError(f"{label} was called without any DTensor")
        tensors = [_distributed(args[place], used) for place in places]
        is_one = in_layouts is None or isinstance(in_layouts, (Layout, LayoutSpec))
        declared = (in_layouts,) * len(tensors) if is_one else tuple(in_layouts)
        if len(declared) != len(tensors):
            raise ValueError(f"{label}: {len(tensors)} tensor arguments, but in_layouts has {len(declared)} layouts")
        needed = [
            tensor.layout if layout is None else bind_layout(layout, used, tensor.ndim, tensor.layout)
            for layout, tensor in zip(declared, tensors)
        ]
        results = [bind_layout(layout, used) for layout in _as_tuple(out_layouts)]
        used.check_axes(varying or ())
        active = {axis for layout in needed + results for axis in (*layout.placed_axes, *layout.varying)}
        active = active if varying is None else set(varying)
        local = list(args)
        for place, tensor, layout in zip(places, tensors, needed):
            marks = [axis for axis in used.axis_names if axis in active - layout.placed_axes]
            local[place] = tensor.redistribute(layout.replace(varying=marks)).to_local()
        outputs = function(*local)
        if len(produced := _as_tuple(outputs)) != len(results):
            raise ValueError(f"{label}: {len(produced)} results, but out_layouts has {len(results)}")
        wrapped = tuple(DTensor.from_local(output, layout) for output, layout in zip(produced, results))
        _compare(compared, tensors, zip(produced, results), label)
        return wrapped if isinstance(outputs, (tuple, list)) else wrapped[0]

    return mapped


def _compare(compared, tensors, results, label):
    """Compare results with those of other ranks, once for a call's shapes; `compared`: the calls that were."""
    call = world(), *(tensor.shape for tensor in tensors)
    if call not in compared and checks_collectives():
        compared.add(call)
        for place, (output, layout) in enumerate(results):
            check_result(output, layout, f"result {place} of {label}")


def _distributed(tensor, mesh):
    return tensor if isinstance(tensor, DTensor) else distribute_tensor(tensor, Layout.on(mesh, ((),) * tensor.ndim))


def _as_tuple(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
