"""Which Value of a called Cell is which of the caller's, and which parameters a call uses. Pure Python."""

from dataclasses import replace

from mindformers_core.program.graph import CallNode
from mindformers_core.program.structure import tree_leaves

__all__ = ["UseIndex", "match_arguments", "match_results", "outer_index", "parameter_index"]


def match_arguments(node):
    """The callee's argument Value -> the caller's Value, for a `CallNode`; a tensor that is passed twice comes once."""
    named, by_position, pairs = dict(node.kwargs), [], []
    for name, structure in node.graph.arguments.items():
        if name in named:
            pairs += zip(tree_leaves(structure), tree_leaves(named.pop(name)), strict=True)
        else:
            by_position.append(structure)
    if named:  # what `**kwargs` takes: always the last
        collected = by_position.pop()
        assert collected.keys() == named.keys(), (collected, named)
        for name, structure in collected.items():
            pairs += zip(tree_leaves(structure), tree_leaves(named[name]), strict=True)
    pairs += zip(tree_leaves(by_position), tree_leaves(node.args), strict=True)
    return dict(pairs)


def match_results(node):
    """Pairs (the caller's Value, the callee's Value) of what a `CallNode` returns, each of the caller's once."""
    return dict(zip(tree_leaves(node.outputs), tree_leaves(node.graph.result), strict=True))


class UseIndex:
    """What a call takes from elsewhere than its arguments, itself or further down, by name, in order of first use.

    Remembered for each graph.

    Args:
        own: graph -> pairs (name, use) of what it takes itself.
        above: (node, use, graph of the caller) -> the use as the caller sees it, or None if it made it.
    """

    def __init__(self, own, above):
        self._own, self._above = own, above
        self._known = {}  # id of a graph -> (graph, uses, places)

    def uses(self, graph):
        """Name -> use, as seen from this graph's Cell; its Value may be one of a call further down."""
        return self._of(graph)[1]

    def places(self, graph):
        """For every use, in order, which of `uses` it is: tells who shares what with whom."""
        return self._of(graph)[2]

    def in_place_of(self, graph, other):
        """Name in `other`, an identical graph -> the name in its place in `graph`."""
        return dict(zip(self.uses(other), self.uses(graph), strict=True))

    def _of(self, graph):
        known = self._known.get(id(graph))
        if known is None:
            known = self._known[id(graph)] = self._collect(graph)
        return known

    def _collect(self, graph):
        found, order = {}, []
        for name, use in self._own(graph):
            found.setdefault(name, use)
            order.append(name)
        for node in graph.nodes:
            if not isinstance(node, CallNode):
                continue
            for name, use in self.uses(node.graph).items():
                seen = self._above(node, use, graph)
                if seen is not None:
                    found.setdefault(name, seen)
            inner = list(self.uses(node.graph))
            order += [inner[place] for place in self.places(node.graph)]
        numbers = {name: number for number, name in enumerate(found)}
        return graph, found, tuple(numbers.get(name) for name in order)


def parameter_index():
    """The `UseIndex` of parameters: path from the root -> `ParameterUse`, its `local` as seen from the graph's Cell."""

    def above(node, use, graph):
        below = node.child is not None and use.local is not None
        return replace(use, local=f"{node.child}.{use.local}" if below else None)

    return UseIndex(lambda graph: [(use.path, use) for use in graph.parameters], above)


def outer_index():
    """The `UseIndex` of tensors of open calls: (call, number of the Value there) -> `FreeVariable`."""

    def above(node, use, graph):
        return None if use.call == graph.call else use

    return UseIndex(lambda graph: [((use.call, use.id), use) for use in graph.outer], above)
