"""A plan carried over to a graph with the same nodes and other sizes: `resized`. Pure Python.

Layouts don't depend on sizes. So the new plan consists of the same instructions, in the same order, with the same
layouts, steps and algorithms; nothing is searched, and nothing is decided again. `check_plan` tells whether every rule
admits them at the new sizes.
"""

import re
from dataclasses import replace

from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, OperatorPlan, Redistribution, captured_graph, joined_path
from mindformers_core.program.structure import DType, Value, tree_leaves
from mindformers_core.propagation.operators import operator_signature

__all__ = ["resized", "without_calls"]


def resized(frame, graph):
    """The plan `frame` for another graph.

    Args:
        frame: the `CellPlan` of a root, or what `without_calls` makes of it.
        graph: the captured `CellGraph` of a root with the same nodes, of other shapes. Numbers in the paths of Cells
            may differ.

    Returns:
        A `CellPlan`; plans that calls share in `frame` are shared again.

    Raises:
        ValueError: the graphs differ in more than sizes, or mesh axes don't divide a dim; names the Cell.
    """
    try:
        return _Resizing({}, frame, lambda_lift(graph)).plan()
    except (LookupError, TypeError) as error:
        raise ValueError(f"{graph.label} has another structure at the new sizes: {error!r}") from error


def without_calls(frame, dropped):
    """A plan without the calls of some Cells, for `resized`: as such it is incomplete, since their results are missing.

    Args:
        frame: the `CellPlan` of a root.
        dropped: paths of the Cells.
    """
    prefixes = {path[:end.start()] for path in dropped for end in re.finditer(r"\.|$", path)} | {""}

    def visit(frame, path):
        if path not in prefixes:
            return frame
        nodes, entries, keepers = {id(node): node for node in frame.graph.nodes}, [], {}
        for entry in frame.instructions:
            new = entry
            if isinstance(entry, CallPlan):
                called = joined_path(path, entry.node.child) if entry.node.child is not None else entry.node.graph.path
                if called in dropped:
                    del nodes[id(entry.node)]
                    continue
                inner = None if entry.frame is None else visit(entry.frame, called)
                if inner is not entry.frame:
                    node = replace(entry.node, graph=captured_graph(inner.graph))
                    nodes[id(entry.node)], new = node, replace(entry, node=node, frame=inner)
            entries.append(new)
            if entry in frame.keepers:
                keepers[new] = frame.keepers[entry]
        graph = replace(frame.graph, nodes=tuple(nodes.values()))
        return replace(frame, graph=graph, instructions=tuple(entries), keepers=keepers)

    return visit(frame, "") if dropped else frame


class _Resizing:
    """The plan of one call.

    Attributes:
        known: (`CellPlan`, key of the new graph) -> the new `CellPlan`.
        values: number of a Value of the given plan -> the new Value. Where calls were dropped, several Values may have
            become one.
        nodes: identity of a node of the given plan -> the new node.
    """

    def __init__(self, known, frame, graph):
        self.known, self.frame, self.graph = known, frame, graph
        self.values, self.nodes = {}, {}
        self.given = captured_graph(frame.graph)
        self._match()

    def plan(self):
        """The new `CellPlan`."""
        frame, entries, keepers, made = self.frame, [], {}, set()
        graph = self._with_added_uses()
        for entry in frame.instructions:
            if isinstance(entry, Redistribution):
                new = self._redistribution(entry)
                if new is None or (new.value.id, new.target) in made:  # for a call that was dropped
                    continue
                made.add((new.value.id, new.target))
            else:
                new = self._node_plan(entry)
            entries.append(new)
            if entry in frame.keepers:
                keepers[new] = frame.keepers[entry]
        return replace(
            frame,
            graph=graph,
            layouts=self._layouts(),
            instructions=tuple(entries),
            lifted=self._moved(frame.lifted),
            gradients=frozenset(self.values[number].id for number in frame.gradients if number in self.values),
            keepers=keepers,
        )

    def _layouts(self):
        found = {}
        for number, layout in self.frame.layouts.items():
            new = self.values.get(number)
            if new is not None and found.setdefault(new.id, layout) != layout:
                raise ValueError(f"{self.graph.label} has {new.described} as {found[new.id]}, and as {layout}")
        return found

    def _redistribution(self, entry):
        value = self.values.get(entry.value.id)
        if value is None:
            return None
        steps = (replace(step, shape=step.source.local_shape(value.shape)) for step in entry.steps)
        return replace(entry, value=value, steps=tuple(steps))

    def _node_plan(self, entry):
        node = self.nodes[id(entry.node)]
        if isinstance(entry, OperatorPlan):
            return replace(entry, node=node, signature=operator_signature(node))
        inner = entry.frame
        if inner is not None:
            key = inner, node.graph.key
            if key not in self.known:
                self.known[key] = _Resizing(self.known, inner, node.graph).plan()
            inner = self.known[key]
        return replace(entry, node=node, frame=inner, lifted=self._moved(entry.lifted))

    def _moved(self, pairs):
        return tuple((self.values[value.id], layout) for value, layout in pairs)

    def _match(self):
        """Fill `values` and `nodes`; raise `ValueError` where the graphs differ in more than sizes."""
        given, graph = self.given, self.graph
        self._pair(given.arguments, graph.arguments)
        for part in ("parameters", "constants", "free_variables"):
            self._pair([use.value for use in getattr(given, part)], [use.value for use in getattr(graph, part)])
        if len(given.nodes) != len(graph.nodes):
            self._refuse(f"{len(graph.nodes)} operators and calls", len(given.nodes))
        for old, new in zip(given.nodes, graph.nodes):
            if _kind(old) != _kind(new):
                self._refuse(new, old)
            self._pair(*((node.args, node.kwargs, node.outputs, _attributes(node)) for node in (old, new)))
            self.nodes[id(old)] = new
        self._pair(given.result, graph.result)

    def _pair(self, old, new):
        pairs = tree_leaves(old, object), tree_leaves(new, object)
        if list(map(type, pairs[0])) != list(map(type, pairs[1])):
            self._refuse(new, old)
        for one, other in zip(*pairs):
            if isinstance(one, (DType, str, bool)) and one != other:
                self._refuse(new, old)
            if not isinstance(one, Value):
                continue
            if one.dtype != other.dtype or self.values.setdefault(one.id, other) != other:
                self._refuse(other.described, one.described)

    def _refuse(self, new, old):
        raise ValueError(f"{self.graph.label} has '{new}' at the new sizes, where '{old}' was planned")

    def _with_added_uses(self):
        """The new graph, with parameters and free variables that only callees use."""
        names, parts = self.graph.uses.in_place_of(self.given.uses), {}
        last = max((value.id for value in self.values.values()), default=-1)
        for part in ("parameters", "free_variables"):
            own = {use.value.id for use in getattr(self.given, part)}
            uses = list(getattr(self.graph, part))
            for use in getattr(self.frame.graph, part):
                name = names.get(use.path if part == "parameters" else (use.call, use.id))
                if use.value.id in own or name is None:  # of a call that was dropped
                    continue
                last += 1
                found = getattr(self.graph.uses, part)[name]
                self.values[use.value.id] = replace(found.value, id=last)
                uses.append(replace(found, value=self.values[use.value.id]))
            parts[part] = tuple(uses)
        return replace(self.graph, **parts)


def _attributes(node):
    primitive = getattr(node, "primitive", None)
    return primitive and primitive.attributes


def _kind(node):
    """What equal nodes of two sizes have in common, besides their arguments."""
    if isinstance(node, CallNode):
        child = None if node.child is None else re.sub(r"\d+", "*", node.child)
        return "call", child, node.graph.class_name, node.graph.training, node.graph.custom_gradient
    primitive = node.primitive and (node.primitive.name, node.primitive.inputs)
    return node.operator, node.kind, node.attribute, primitive
