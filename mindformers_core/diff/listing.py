"""Names of the tensors of a program that do not depend on meshes, and what is known of each. Pure Python.

A tensor is named after the operator of the captured program that makes it: Cell, number of the call, place of the node.
Arguments and results of Cells, which are other names of the same tensor, are traced to that operator.
"""

from mindformers_core.operators.signature import is_float
from mindformers_core.program.graph import CallNode, match_arguments
from mindformers_core.program.plan import joined_path, parameter_path
from mindformers_core.program.structure import tree_leaves

__all__ = ["Listing", "layout_facts"]


class Listing:
    """The named tensors of a program.

    Args:
        program: the `Program`.

    Attributes:
        facts: name of a tensor -> dict: `cell`, `operator`, `source`, `hint`, `shape`, `dtype`, and the names of the
            `inputs` of its operator.
    """

    def __init__(self, program):
        self.facts = {}
        self._names, self._counts, self._path = {}, {}, program.path
        first = _first_cell(program.graph)
        for name, structure in program.graph.arguments.items():
            for place, value in enumerate(tree_leaves(structure)):
                label = f"input {name}.{place}" + f" before {first}" * is_float(value.dtype)
                self._enter(program.graph, value, label, "", "input", None, ())
        self._visit(program.graph)
        for _, frame, graph in program.calls():
            for number, use in enumerate(frame.graph.parameters):
                self._parameter(graph, use.value, parameter_path(frame, graph, number))

    def name(self, graph, value):
        """The name of a Value of a call, by the number that the Value has in all calls that share a plan."""
        return self._names[graph.call, value.id]

    def _enter(self, graph, value, name, cell, operator, source, inputs):
        self._names[graph.call, value.id] = name
        about = {"shape": list(value.shape), "dtype": value.dtype, "hint": value.hint}
        self.facts[name] = {"cell": cell, "operator": operator, "source": source, **about, "inputs": list(inputs)}

    def _parameter(self, graph, value, path):
        path = joined_path(self._path, path)
        self._enter(graph, value, f"parameter {path}", path.rpartition(".")[0], "parameter", None, ())

    def _visit(self, graph):
        """Name all Values of a call whose arguments have names."""
        path, names = joined_path(self._path, graph.path), self._names
        number = self._counts[path] = self._counts.get(path, -1) + 1
        label = f"{path}#{number}"
        for use in graph.parameters:
            self._parameter(graph, use.value, use.path)
        for place, constant in enumerate(graph.constants):
            self._enter(graph, constant.value, f"{label}:constant {place}", path, "constant", None, ())
        for use in graph.free_variables:
            names[graph.call, use.value.id] = names[use.call, use.id]
        for place, node in enumerate(graph.nodes):
            inputs = [names[graph.call, value.id] for value in tree_leaves((node.args, node.kwargs))]
            inner = ()
            if isinstance(node, CallNode):
                for value, outer in match_arguments(node).items():
                    names[node.graph.call, value.id] = names[graph.call, outer.id]
                self._visit(node.graph)
                inner = [names.get((node.graph.call, value.id)) for value in tree_leaves(node.graph.result)]
            for output, value in enumerate(tree_leaves(node.outputs)):
                if output < len(inner) and inner[output] is not None:
                    names[graph.call, value.id] = inner[output]
                else:
                    operator = getattr(node, "operator", "Cell")
                    name = f"{label}:{place}.{output}"
                    self._enter(graph, value, name, path, operator, node.source, inputs)


def _first_cell(graph):
    """The path of the innermost Cell that is called first; stages of a pipeline differ in it."""
    calls = [node.graph for node in graph.nodes if isinstance(node, CallNode)]
    return _first_cell(calls[0]) if calls else graph.path


def layout_facts(layout):
    """A `Layout` as plain data; `Layout.on(DeviceMesh(…), …)` takes it again."""
    mesh = layout.mesh
    return [
        [list(mesh.shape), list(mesh.axis_names), list(mesh.rank_list)],
        layout.dims,
        layout.partial,
        layout.varying,
    ]
