"""Lambda lifting of free variables: tensors that a Cell uses although they are no arguments. Pure Python.

A free variable is returned by the call that produces it, up to the closest common caller, which passes it down.
"""

from collections import defaultdict
from dataclasses import dataclass, fields, replace

from mindformers_core.program.graph import CallNode, CellGraph
from mindformers_core.program.structure import tree_leaves


@dataclass(frozen=True, eq=False)
class ExportingGraph(CellGraph):
    """A graph whose `result` is a pair: the result of the Cell, and a tuple of tensors that other Cells' calls use."""


def own_result(graph):
    """The result of a graph's Cell, without free variables of others."""
    return graph.result[0] if isinstance(graph, ExportingGraph) else graph.result


def lambda_lift(graph):
    """A graph in which every free variable is a Value of a direct or indirect caller.

    Args:
        graph: of the root.
    """
    if not any(call.free_variables for call in graph.calls()):
        return graph
    return _Threading(graph).rebuilt(graph)


class _Threading:
    """The lambda lifting of one tree of calls.

    Attributes:
        chains: number of a call -> the graphs from the root to it.
        exported: number of a call -> the Values that it returns additionally.
        received: (number of a call, number of an exported Value) -> the caller's new Value.
        moved: (number of the using call, number of the Value there) -> the new `FreeVariable`.
    """

    def __init__(self, graph):
        self.chains, self.exported, self.received, self.moved = {}, defaultdict(list), {}, {}
        self.counts = {}
        self._walk(graph, ())
        uses = [(use, chain) for chain in self.chains.values() for use in chain[-1].free_variables]
        # a call that uses a tensor produced below has a number for it already, so it precedes its callers
        uses.sort(key=lambda pair: (pair[1][-1] not in self.chains[pair[0].call], -len(pair[1])))
        for use, chain in uses:
            self.moved[chain[-1].call, use.value.id] = self._reachable(use, chain)

    def _walk(self, graph, above):
        chain = self.chains[graph.call] = (*above, graph)
        for node in graph.nodes:
            if isinstance(node, CallNode):
                self._walk(node.graph, chain)

    def _reachable(self, use, chain):
        """The free variable as a Value of the closest common caller; each call on the way returns it to its caller."""
        maker, number = self.chains[use.call], use.id
        depth = sum(1 for ours, theirs in zip(chain, maker) if ours is theirs)
        for place in range(len(maker) - 1, depth - 1, -1):
            inner, caller = maker[place], maker[place - 1]
            if (inner.call, number) not in self.received:
                here = use.value.id if caller is chain[-1] else self._new_number(caller)
                self.exported[inner.call].append(replace(use.value, id=number))
                self.received[inner.call, number] = replace(use.value, id=here)
            number = self.received[inner.call, number].id
        common = maker[depth - 1]
        return replace(use, path=common.path, call=common.call, id=number)

    def _new_number(self, graph):
        if graph.call not in self.counts:
            numbers = [entry.value.id for entry in (*graph.parameters, *graph.constants, *graph.free_variables)]
            numbers += [value.id for value in tree_leaves([graph.arguments, *(node.outputs for node in graph.nodes)])]
            self.counts[graph.call] = max(numbers, default=-1) + 1
        self.counts[graph.call] += 1
        return self.counts[graph.call] - 1

    def rebuilt(self, graph):
        """The new graph of a call."""
        parts = {part.name: getattr(graph, part.name) for part in fields(CellGraph)}
        parts["nodes"] = tuple(self._node(node) if isinstance(node, CallNode) else node for node in graph.nodes)
        uses = [self.moved[graph.call, use.value.id] for use in graph.free_variables]
        parts["free_variables"] = tuple(use for use in uses if use.call != graph.call)
        exported = self.exported.get(graph.call)
        if exported is None:
            return CellGraph(**parts)
        return ExportingGraph(**parts | {"result": (graph.result, tuple(exported))})

    def _node(self, node):
        outputs = node.outputs
        if node.graph.call in self.exported:
            call = node.graph.call
            outputs = outputs, tuple(self.received[call, value.id] for value in self.exported[call])
        return replace(node, graph=self.rebuilt(node.graph), outputs=outputs)
