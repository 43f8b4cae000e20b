"""Names of the tensors of a program that do not depend on meshes, and what is known of each. Pure Python.

A tensor is named after the operator that makes it: Cell, number of the call, place of the node in the captured program.
"""

from collections import Counter

from mindformers_core.operators.signature import is_float
from mindformers_core.program.graph import CallNode, match_arguments
from mindformers_core.program.plan import joined_path, parameter_path
from mindformers_core.program.structure import tree_leaves


def tensor_facts(cell, operator, hint, shape, dtype, source=None, inputs=()):
    """What is known of a tensor, a dict; `inputs` are the names of those that its operator computes it from."""
    about = {"cell": cell, "operator": operator, "source": source, "hint": hint}
    return about | {"shape": list(shape), "dtype": dtype, "inputs": list(inputs)}


class Listing:
    """The named tensors of a `Program`."""

    def __init__(self, program):
        self.facts = {}  # name of a tensor -> see `tensor_facts`
        self.names = {}  # (call, number of a Value in all calls that share a plan) -> name
        self._calls, self._path = Counter(), program.path
        graphs = program.graph.calls()  # stages of a pipeline differ in the first Cell without inner ones
        first = next(each.path for each in graphs if not any(isinstance(node, CallNode) for node in each.nodes))
        for name, structure in program.graph.arguments.items():
            for place, value in enumerate(tree_leaves(structure)):
                label = f"input {name}.{place}" + f" before {first}" * is_float(value.dtype)
                self._enter(program.graph, value, label, "", "input")
        self._visit(program.graph)
        for _, plan, graph in program.calls():
            for number, use in enumerate(plan.graph.parameters):
                self._parameter(graph, use.value, parameter_path(plan, graph, number))

    def _enter(self, graph, value, name, cell, operator, source=None, inputs=()):
        self.names[graph.call, value.id] = name
        self.facts[name] = tensor_facts(cell, operator, value.hint, value.shape, value.dtype, source, inputs)

    def _parameter(self, graph, value, path):
        path = joined_path(self._path, path)
        self._enter(graph, value, f"parameter {path}", path.rpartition(".")[0], "parameter")

    def _visit(self, graph):
        """Name all Values of a call whose arguments have names."""
        path, names = joined_path(self._path, graph.path), self.names
        label = f"{path}#{self._calls[path]}"
        self._calls[path] += 1
        for use in graph.parameters:
            self._parameter(graph, use.value, use.path)
        for place, constant in enumerate(graph.constants):
            self._enter(graph, constant.value, f"{label}:constant {place}", path, "constant")
        for use in graph.free_variables:
            names[graph.call, use.value.id] = names[use.call, use.id]
        for place, node in enumerate(graph.nodes):
            inner = []
            if isinstance(node, CallNode):
                for value, outer in match_arguments(node).items():
                    names[node.graph.call, value.id] = names[graph.call, outer.id]
                self._visit(node.graph)
                inner = [names.get((node.graph.call, value.id)) for value in tree_leaves(node.graph.result)]
            inputs = [names[graph.call, value.id] for value in tree_leaves((node.args, node.kwargs))]
            for output, value in enumerate(tree_leaves(node.outputs)):
                if output < len(inner) and inner[output] is not None:
                    names[graph.call, value.id] = inner[output]
                else:
                    operator, name = getattr(node, "operator", "Cell"), f"{label}:{place}.{output}"
                    self._enter(graph, value, name, path, operator, node.source, inputs)
