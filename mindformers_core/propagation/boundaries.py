"""What a Cell's declarations ask of the tensors that cross its boundary. Pure Python."""

from mindformers_core.hints import nearest
from mindformers_core.layout import bind_layout
from mindformers_core.program.free_variables import own_result
from mindformers_core.program.labels import class_label
from mindformers_core.program.structure import Value, tree_leaves, tree_map

__all__ = [
    "boundary_target",
    "check_outputs",
    "declared_inputs",
    "declared_outputs",
    "graph_label",
    "no_tensor",
]


def boundary_target(declared, mesh, shape, arriving, weight_axes, name):
    """The layout that a tensor of global `shape` is moved to at a boundary, as it arrives in layout `arriving`.

    That is the declared layout, bound; and marked varying where it is whole and was marked before, or is now gathered
    or reduced over an axis of `weight_axes`: work with sharded weights differs along such an axis, and so the gradient
    is reduced (or reduce-scattered) once, where it leaves the Cell.

    Args:
        declared: whatever says a layout, see `bind_layout`.
        weight_axes: axes on which a parameter of the Cell or of one below it is sharded; none for a result.
        name: what errors call the tensor.

    Raises:
        TypeError, ValueError: no layout, or one that doesn't fit.
    """
    target = bind_layout(declared, mesh, len(shape), arriving, name)
    target.local_shape(shape, f"{name}, which arrives as {arriving},")
    gathered = () if target.partial else [axis for axis in weight_axes if not _is_whole(arriving, axis)]
    marks = {axis for axis in (*gathered, *arriving.varying) if _is_whole(target, axis)}
    return target.replace(varying={*target.varying, *marks})


def check_outputs(label, declared, outputs):
    """Raise a ValueError where a Cell (`label`) declares a layout for an output that isn't among its `outputs`."""
    for key in declared:
        if key not in outputs:
            known = ", ".join(map(repr, outputs)) or "none"
            raise ValueError(
                f"{label} declares a layout for output {key!r}, but its outputs are {known}" + nearest(key, outputs)
            )


def no_tensor(name, declared, value):
    """The error of a layout that is declared for something else than a tensor."""
    return TypeError(f"{name} has a declared layout, {declared}, but is {value!r}, which is no tensor")


def declared_inputs(graph, declaration):
    """Pairs (Value, declared layout, name of the tensor) of a call's arguments; the first that is declared counts."""
    if declaration is None:
        return []
    return _declared(
        graph, [(name, graph.arguments.get(name)) for name in declaration.inputs], declaration.inputs, "input"
    )


def declared_outputs(graph, declaration):
    """Pairs (Value, declared layout, name of the tensor) of a call's results; the first that is declared counts.

    Raises:
        ValueError: a layout is declared for an output that there isn't.
    """
    if declaration is None or not declaration.outputs:
        return []
    result = own_result(graph)
    if not isinstance(result, dict):
        result = dict(enumerate(result if isinstance(result, (tuple, list)) else (result,)))
    check_outputs(graph_label(graph), declaration.outputs, result)
    return _declared(graph, result.items(), declaration.outputs, "output")


def graph_label(graph):
    """How errors call the Cell of a graph."""
    return class_label(graph.path, graph.class_name.rpartition(".")[2])


def _declared(graph, structures, layouts, what):
    found = {}
    for key, structure in structures:
        declared = layouts.get(key)
        if declared is None:
            continue
        shown = f"'{key}'" if what == "input" else repr(key)
        name = f"{what} {shown} of {graph_label(graph)}"
        tree_map(lambda leaf, declared=declared, name=name: _check_tensor(leaf, declared, name), structure)
        for value in tree_leaves(structure):
            found.setdefault(value.id, (value, declared, name))
    return list(found.values())


def _check_tensor(leaf, declared, name):
    if leaf is not None and not isinstance(leaf, Value):
        raise no_tensor(name, declared, leaf)


def _is_whole(layout, axis):
    return not any(axis in axes for axes in layout.dims) and axis not in dict(layout.partial)
