"""Plans of Cells for tests: captured, with what is declared for them, propagated on a mesh."""

from types import SimpleNamespace

from mindformers_core.capture.capture import capture
from mindformers_core.layout import bind_layout, layout
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.propagate import propagate
from mindformers_core.redistribution import DeviceModel, Link
from mindformers_core.sharding.declare import collect_declarations

__all__ = ["COUNTING", "captured", "planned", "silent_algorithm"]

COUNTING = DeviceModel("counting", 1.0, 0.0, Link(0.0, 1.0))  # a second for an operation, and for a sent byte


def planned(*call, **settings):
    """`(graph, plan)`: the capture of a call, and its plan; arguments as of `captured`."""
    graph, *given = captured(*call, **settings)
    return graph, propagate(graph, *given)


def captured(cell, mesh, args, named=None, config=None, plan=None, arriving=None):
    """What `propagate` takes, for a call of a Cell.

    Args:
        cell: the Cell.
        mesh: the mesh.
        args, named: of the call.
        config, plan: see `shard`.
        arriving: name of an argument -> the layout in which its tensors arrive; default: whole.
    """
    graph = capture(cell, *args, **(named or {}))
    declarations = collect_declarations(cell, config, plan)
    arguments = {}
    for name, structure in graph.arguments.items():
        for value in tree_leaves(structure):
            arguments[value.id] = bind_layout((arriving or {}).get(name, layout()), mesh, len(value.shape))
    stored = {path: layout() for path in (use.path for call in graph.calls() for use in call.parameters)}
    for path, declared in declarations.items():
        stored |= {f"{path}.{name}" if path else name: given for name, given in declared.weights.items()}
    dims = {use.path: len(use.value.shape) for call in graph.calls() for use in call.parameters}
    parameters = {path: bind_layout(given, mesh, dims.get(path)) for path, given in stored.items()}
    return graph, mesh, arguments, parameters, declarations


def silent_algorithm(plan):
    """In the place of `algorithm_of`: as if the operator itself ran, and nothing were sent."""
    node = plan.node
    arguments, result = tree_leaves((node.args, node.kwargs)), tree_leaves(node.outputs)
    return SimpleNamespace(arguments=arguments, constants=(), nodes=[node], result=result), [None]
