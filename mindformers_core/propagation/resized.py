"""A plan carried over to a graph with the same nodes and other sizes, and to a mesh: `resized`. Pure Python.

Layouts don't depend on sizes, but for the numbers of blocks of strided dims, which come from the factors of operators.
So the new plan consists of the same instructions, in the same order, with the same layouts, steps and algorithms;
nothing is searched, and nothing is decided again. `check_plan` tells whether every rule admits them at the new sizes.
"""

import re
from dataclasses import replace
from itertools import zip_longest

from mindformers_core.layout import Layout
from mindformers_core.placement import merged_entry
from mindformers_core.program.free_variables import lambda_lift
from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import OperatorPlan, Redistribution, captured_graph
from mindformers_core.program.structure import DType, Value, shown
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.redistribution import plan_redistribution


def resized(plan, graph, dropped=frozenset(), mesh=None):
    """A plan carried over to another graph.

    Args:
        plan: the `CellPlan` of a root.
        graph: the captured `CellGraph` of a root with the same nodes, of other shapes. Numbers in the paths of Cells
            may differ.
        dropped: paths of Cells that only the first root calls.
        mesh: a mesh with the same axes. Default: that of the plan.

    Returns:
        A `CellPlan`; plans that calls share in `plan` are shared again.

    Raises:
        ValueError: the graphs differ in more than sizes, or mesh axes don't divide a dim; names the Cell.
    """
    return _Resizing({}, {}, plan, lambda_lift(graph), frozenset(dropped), mesh or plan.mesh).result()


def _below(paths, child):
    """Those of some paths that are below a Cell, from there."""
    return frozenset(path[len(child) + 1 :] for path in paths if path.startswith(f"{child}."))


def _without_calls(graph, dropped):
    """The nodes of a graph without the calls of some Cells, also in called ones, by the identities of its own nodes."""
    nodes = {}
    for node in graph.nodes:
        if not isinstance(node, CallNode) or not dropped:
            nodes[id(node)] = node
        elif node.child not in dropped:
            inner = tuple(_without_calls(node.graph, _below(dropped, node.child)).values())
            nodes[id(node)] = replace(node, graph=replace(node.graph, nodes=inner))
    return nodes


class _Resizing:
    """The plan of one call."""

    def __init__(self, known, entries, plan, graph, dropped, mesh):
        self.known = known  # (`CellPlan`, key of the new graph, paths of dropped Cells) -> the new `CellPlan`
        self.entries = entries  # entry of a strided dim in a layout -> the new entry
        self.plan, self.graph, self.dropped, self.mesh, self.moves = plan, graph, dropped, mesh, set()
        # number of a given Value -> the new Value; several given ones may have become one without dropped calls
        kept, self.values = _without_calls(plan.graph, dropped), {}
        self.given = captured_graph(replace(plan.graph, nodes=tuple(kept.values())))
        for part in ("parameters", "constants", "free_variables"):
            self._pair(*([use.value for use in getattr(each, part)] for each in (self.given, graph)))
        self._pair((self.given.arguments, self.given.result), (graph.arguments, graph.result))
        for old, new in zip_longest(self.given.nodes, graph.nodes):
            if old is None or new is None or _kind(old) != _kind(new):
                self._refuse(new, old)
            self._pair(*((node.args, node.kwargs, node.outputs) for node in (old, new)))
        self.nodes = dict(zip(kept, graph.nodes))  # by the identity of the given one

    def _pair(self, old, new):
        """Record the new Values of a structure."""
        olds, news = (_leaves(structure) for structure in (old, new))
        for one, other in zip_longest(olds, news):
            is_value = type(one) is type(other) is Value and one.dtype == other.dtype
            fixed = type(one) is not type(other) or isinstance(one, (DType, str, bool)) and one != other
            if self.values.setdefault(one.id, other) != other if is_value else fixed:
                self._refuse(new, old)

    def _refuse(self, new, old):
        raise ValueError(f"{self.graph.label} has '{shown(new)}' at the new sizes, where '{shown(old)}' was planned")

    def result(self):
        """The new `CellPlan`; layouts that contradict each other are a fault for `check_plan`."""
        graph = self._with_added_uses()
        made = {old: new for old in self.plan.instructions if (new := self._instruction(old)) is not None}
        known = {number: value.id for number, value in self.values.items()}
        return replace(
            self.plan,
            graph=graph,
            mesh=self.mesh,
            instructions=tuple(made.values()),
            layouts={
                known[number]: self._at(layout) for number, layout in self.plan.layouts.items() if number in known
            },
            results=tuple(map(self._at, self.plan.results)),
            lifted=self._moved(self.plan.lifted),
            gradients=frozenset(known[number] for number in self.plan.gradients & known.keys()),
            keepers={made[old]: keeper for old, keeper in self.plan.keepers.items() if old in made},
        )

    def _instruction(self, entry):
        """The new instruction; None for a dropped call, and for a redistribution that is for one."""
        if isinstance(entry, Redistribution):
            value = self.values.get(entry.value.id)
            if value is None or (value.id, entry.target) in self.moves:
                return None
            self.moves.add((value.id, entry.target))
            source, target, steps = self._at(entry.source), self._at(entry.target), entry.steps
            if any(step.kind == "view" for step in steps):
                steps = plan_redistribution(source, target, value.shape, value.dtype, self.plan.device_model).steps
            else:
                ends = [(self._at(step.source), self._at(step.target)) for step in steps]
                pairs = [(step, *pair) for step, pair in zip(steps, ends)]
                steps = tuple(replace(step, source=at, target=to, shape=value.shape) for step, at, to in pairs)
            return replace(entry, value=value, source=source, target=target, steps=steps)
        node = self.nodes.get(id(entry.node))
        if node is None:
            return None
        if isinstance(entry, OperatorPlan):
            new = self._operator(entry, node, operator_signature(node))
            several = [[[size > 1 for size in shape] for shape in each.local_shapes] for each in (entry, new)]
            differences = {*entry.signature.differences(new.signature)}
            if differences - {"sizes", "part"} or several[0] != several[1]:
                raise ValueError(f"{self.graph.label} has another rule for '{node}', or one local element of a dim")
            return new
        key = entry.plan, node.graph.key, _below(self.dropped, entry.node.child)
        if entry.plan is not None and key not in self.known:
            self.known[key] = _Resizing(self.known, self.entries, entry.plan, node.graph, key[-1], self.mesh).result()
        inputs, outputs = (tuple(map(self._at, layouts)) for layouts in (entry.inputs, entry.outputs))
        lifted, plan = self._moved(entry.lifted), self.known.get(key)
        return replace(entry, node=node, inputs=inputs, outputs=outputs, plan=plan, lifted=lifted)

    def _operator(self, entry, node, signature):
        """The new plan of an operator; enters the strided dims that it makes of several factors."""
        tensors = zip((*signature.inputs, *signature.outputs), (*entry.inputs, *entry.outputs))
        cuts = tuple((factor, self.entries.get(own, own)) for factor, own in entry.choice.cuts)
        choice = replace(entry.choice, cuts=cuts)
        for factors, old, axes in (dim for dims, at in tensors for dim in zip(dims, at.dims, at.axes)):
            if old != axes and len(factors) > 1:
                parts = [(choice.axes_of.get(factor, ()), signature.sizes[factor]) for factor in factors]
                self.entries[old] = merged_entry(self.mesh, *zip(*parts))
        inputs, outputs = (tuple(map(self._at, layouts)) for layouts in (entry.inputs, entry.outputs))
        return replace(entry, node=node, signature=signature, inputs=inputs, outputs=outputs, choice=choice)

    def _at(self, layout):
        """A layout on the new mesh, with the new numbers of blocks."""
        if layout.dims == layout.axes and layout.mesh == self.mesh:
            return layout
        dims = [self.entries.get(entry, entry) for entry in layout.dims]
        return Layout.on(self.mesh, dims, layout.partial, layout.varying)

    def _moved(self, pairs):
        return tuple((self.values[value.id], self._at(layout)) for value, layout in pairs)

    def _with_added_uses(self):
        """The new graph, with parameters and free variables that only callees use."""
        theirs, ours = ([*uses.parameters, *uses.free_variables] for uses in (self.given.uses, self.graph.uses))
        if len(theirs) != len(ours):
            self._refuse(f"{len(ours)} parameters and outer tensors", f"{len(theirs)} of them")
        names, parts = self.graph.uses.in_place_of(self.given.uses), {}
        last = max((value.id for value in self.values.values()), default=-1)
        for part in ("parameters", "free_variables"):
            own, uses = getattr(self.given, part), list(getattr(self.graph, part))
            for use in getattr(self.plan.graph, part):
                name = names.get(use.path if part == "parameters" else (use.call, use.id))
                if use not in own and name is not None:  # else of a call that was dropped
                    last += 1
                    found = getattr(self.graph.uses, part)[name]
                    self.values[use.value.id] = replace(found.value, id=last)
                    uses.append(replace(found, value=self.values[use.value.id]))
            parts[part] = tuple(uses)
        return replace(self.graph, **parts)


def _leaves(structure):
    """The leaves of a structure; a tuple of numbers is one, such as the order of a sequence's chunks on more ranks."""
    if not isinstance(structure, (tuple, list)) or all(type(entry) is int for entry in structure):
        return [structure] if not isinstance(structure, dict) else _leaves([*structure.values()])
    return [leaf for entry in structure for leaf in _leaves(entry)]


def _kind(node):
    """What equal nodes of two sizes have in common, besides their arguments."""
    if isinstance(node, CallNode):
        called, child = node.graph, re.sub(r"\d+", "*", str(node.child))
        return child, called.class_name, called.training, called.custom_gradient
    return node.operator, node.kind, node.attribute, node.primitive and node.primitive.name
