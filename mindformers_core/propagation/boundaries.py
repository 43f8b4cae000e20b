"""Declared layouts of Cells and operators, and the layouts of tensors at a Cell's boundary. Pure Python."""

from dataclasses import dataclass, field

from mindformers_core.hints import nearest
from mindformers_core.layout import bind_layout
from mindformers_core.program.free_variables import own_result
from mindformers_core.program.plan import Reason
from mindformers_core.program.structure import Value, tree_leaves


@dataclass(frozen=True)
class OperatorDeclaration:
    """The declared layouts of one operator: of a primitive that is an attribute of its Cell (`self.matmul`).

    Attributes:
        inputs, outputs: None, or a tuple with one entry for every input or output tensor: None to derive the
            layout, a layout (`LayoutSpec`, `Layout`, `mindspore.Layout`), or a *strategy*, a tuple with the number of
            shards of every dim.
    """

    inputs: tuple | None = None
    outputs: tuple | None = None


@dataclass(frozen=True)
class Declaration:
    """The declared layouts of one Cell.

    Attributes:
        inputs: argument name of `construct` -> layout.
        outputs: position (or key, where `construct` returns a dict) -> layout.
        weights: name of one of the Cell's own parameters -> layout.
        operators: name of a primitive among the Cell's attributes -> `OperatorDeclaration`.
    """

    inputs: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    operators: dict = field(default_factory=dict)


def boundary_target(declared, mesh, shape, arriving, weight_axes, name):
    """The layout to which a tensor of global `shape`, in layout `arriving`, is redistributed at a Cell's boundary.

    The target is the declared layout, bound. The target is varying over an axis over which the tensor is whole, if the
    tensor was varying before, or is gathered or reduced here over an axis of `weight_axes`. Computation with sharded
    weights differs along such an axis, so the gradient is reduced (or reduce-scattered) once, where it leaves the Cell.

    Args:
        declared: a layout in any form that `bind_layout` accepts.
        weight_axes: axes over which parameters of the Cell, or of one below it, are sharded; none for a result.
        name: the tensor's label in errors.

    Raises:
        TypeError, ValueError: `declared` is no layout, or doesn't fit the tensor.
    """
    target = bind_layout(declared, mesh, len(shape), arriving, name)
    target.local_shape(shape, f"{name}, which arrives as {arriving},")
    gathered = () if target.partial else arriving.placed_axes.intersection(weight_axes)
    marks = {*gathered, *arriving.varying} - target.placed_axes
    return target.replace(varying={*target.varying, *marks})


def activation_axes(graph, declaration_of, mesh, states):
    """The mesh axes over which called Cells declare inputs or outputs cut; all, where one gives operators strategies.

    Those of the root aren't among them where they cut a state, too: an axis of data parallelism cuts none.

    Args:
        graph: the `CellGraph` of the root.
        declaration_of: path of a Cell -> its `Declaration`.
        states: the axes that cut parameters which operators write.

    Raises:
        TypeError, ValueError: a declared layout is none, or doesn't fit its tensor.
    """
    found, known = frozenset(), {}
    for called in graph.calls():
        declaration = declaration_of(called.path)
        if known.get(called.key) == declaration:  # of an equal layer
            continue
        known[called.key] = declaration
        if declaration.operators:
            return frozenset(mesh.axis_names)
        for value, given, name in (*declared_inputs(called, declaration), *declared_outputs(called, declaration)):
            axes = bind_layout(given, mesh, len(value.shape), None, name).cut_axes
            found |= axes - states if called is graph else axes
    return found


def check_outputs(label, declared, outputs):
    """Raise `ValueError` where a Cell (`label`) declares a layout for an output that isn't among its `outputs`."""
    for key in declared:
        if key not in outputs:
            known = ", ".join(map(repr, outputs)) or "none"
            raise ValueError(
                f"{label} declares a layout for output {key!r}, but its outputs are {known}" + nearest(key, outputs)
            )


def no_tensor(name, declared, value):
    """The error for a layout that is declared for an argument or result that is no tensor."""
    return TypeError(f"{name} has a declared layout, {declared}, but is {value!r}, which is no tensor")


def declared_inputs(graph, declaration):
    """`(Value, declared layout, Reason that names it)` of a call's arguments; a tensor's first declaration counts."""
    arguments = [(name, graph.arguments.get(name)) for name in declaration.inputs]
    return _declared(graph, arguments, declaration.inputs, "input")


def declared_outputs(graph, declaration):
    """`(Value, declared layout, Reason that names it)` of a call's results; a tensor's first declaration counts.

    Raises:
        ValueError: a layout is declared for an output that doesn't exist.
    """
    result = own_result(graph)
    if not isinstance(result, dict):
        result = dict(enumerate(result if isinstance(result, (tuple, list)) else (result,)))
    check_outputs(graph.label, declaration.outputs, result)
    return _declared(graph, result.items(), declaration.outputs, "output")


def _declared(graph, structures, layouts, what):
    found = {}
    for key, structure in structures:
        declared = layouts.get(key)
        if declared is None:
            continue
        shown = f"'{key}'" if what == "input" else repr(key)
        name = Reason(f"{shown} of {graph.label}", what)

        for leaf in tree_leaves(structure, object):
            if isinstance(leaf, Value):
                found.setdefault(leaf.id, (leaf, declared, name))
            elif leaf is not None:
                raise no_tensor(name, declared, leaf)
    return list(found.values())
