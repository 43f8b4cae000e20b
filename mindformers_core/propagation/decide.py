"""One call of one Cell: the layouts in which every operator computes, chosen in the order of execution. Pure Python.

Where the tensors are moved is decided later (see `insertion.py`): here it is only written down which forms are needed.
"""

from dataclasses import dataclass, field, replace

from mindformers_core.operators import tensor_meta
from mindformers_core.operators.resolve import OperatorCall, undivided
from mindformers_core.operators.signature import is_float
from mindformers_core.program.aliases import match_arguments, match_results
from mindformers_core.program.graph import CallNode
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.boundaries import (
    boundary_target,
    declared_inputs,
    declared_outputs,
    graph_label,
)
from mindformers_core.propagation.costs import NOTHING_PAID, Cost, forms_cost, move_cost, work_of
from mindformers_core.propagation.operators import operator_plan, passes_gradient
from mindformers_core.propagation.required_layouts import RequiredLayouts
from mindformers_core.propagation.strategies import declared_layouts

__all__ = ["FLOWS", "NOTHING", "TRAINED", "CallDecision", "Decision", "decide_frame"]

# What flows back through a tensor: no gradient at all; one for an input or a frozen parameter; one for a trained one
NOTHING, FLOWS, TRAINED = 0, 1, 2
_LOCATED = (ValueError, TypeError, IndexError)


@dataclass(frozen=True, eq=False)
class CallDecision:
    """How a child Cell is called, wherever the moves are made.

    Attributes:
        node: the `CallNode`.
        decision: the `Decision` of its frame; None for a Cell with a `bprop` of its own.
        keys: of every tensor that comes from outside: key in the callee's frame -> key in the caller's.
        outputs: the layouts of `tree_leaves(node.outputs)`.
    """

    node: CallNode
    decision: "Decision | None"
    keys: dict
    outputs: tuple


@dataclass(eq=False)
class Decision:
    """What is decided for one call of one Cell.

    A tensor's *key* is the number of its Value in the graph. What may be used further down only has another: a
    parameter its path, a tensor of a caller the number of the call that made it and that of its Value there.

    Attributes:
        graph: the `CellGraph`.
        entries: `OperatorPlan`s and `CallDecision`s, one for every node.
        asked: for every entry the `OperatorCall`; for a call the arguments as `decide_frame` takes them.
        values: key -> its Value, of this graph or of one below.
        forms: key -> `RequiredLayouts`, as needed here and below.
        used: for every entry, and last for the results, pairs (key, layout) that it takes.
        flows: key -> `NOTHING`, `FLOWS` or `TRAINED`.
        current: key -> the layout in which operators get the tensor: after it was moved at the boundary.
        inside: the `Cost` without moves of arguments and parameters, which the caller may share.
        cost: the whole `Cost`.
    """

    graph: object
    entries: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    values: dict = field(default_factory=dict)
    forms: dict = field(default_factory=dict)
    used: list = field(default_factory=list)
    flows: dict = field(default_factory=dict)
    current: dict = field(default_factory=dict)
    inside: Cost = NOTHING_PAID
    cost: Cost = NOTHING_PAID


def decide_frame(run, graph, arguments, final=False, wanted=None, choices=None):
    """The `Decision` for a call.

    Args:
        run: the `Propagation` (mesh, cost model, parameters, declarations; it decides child calls).
        graph: the `CellGraph`.
        arguments: key of every argument and of every tensor of a caller that is used here or below -> (layout, what
            flows back, whether it may lie in any layout).
        final: whether partial and varying results are reduced: those of the root.
        wanted: a layout or None for each of `tree_leaves(graph.result)`: where nothing is declared, it is returned so.
        choices: place of a node -> what is chosen for it. For an operator a `Resolution`, which is repeated if it can
            be; for a call what it is `wanted` to return, after looking ahead. Default: the cheapest, for all.
    """
    return _Frame(run, graph, choices or {}).decide(arguments, final, wanted)


class _Frame:
    """One frame while it is decided."""

    def __init__(self, run, graph, choices):
        self.run = run
        self.graph = graph
        self.choices = choices
        self.label = graph_label(graph)
        self.decision = Decision(graph)
        self.keys = {use.value.id: use.path for use in graph.parameters}
        self.keys |= {use.value.id: (use.call, use.id) for use in graph.outer}
        self.free = set()

    def decide(self, arguments, final, wanted):
        """See `decide_frame`."""
        declaration = self.run.declaration(self.graph.path)
        uses = self.run.parameter_index.uses(self.graph)
        self.free |= {key for key, (_, _, free) in arguments.items() if free} | (self.run.free & uses.keys())
        values = {value.id: value for value in tree_leaves(self.graph.arguments)}
        values |= {key: use.value for key, use in self.run.outer_index.uses(self.graph).items()}
        for key, (layout, flow, _) in arguments.items():
            self.enter(key, values[key], layout, flow)
        for path, use in uses.items():
            flow = NOTHING if not is_float(use.value.dtype) else TRAINED if use.trainable else FLOWS
            self.enter(path, use.value, self.run.parameters[path], flow)
        for constant in self.graph.constants:
            self.enter(constant.value.id, constant.value, self.run.replicated(constant.value), NOTHING)
        axes = {axis for path in uses for dims in self.run.parameters[path].dims for axis in dims}
        self.cross(declared_inputs(self.graph, declaration), axes)
        for place, node in enumerate(self.graph.nodes):
            self.decision.used.append([])
            self.call(node, place) if isinstance(node, CallNode) else self.operate(node, place)
        self.leave(declared_outputs(self.graph, declaration), final, wanted)
        self.finish({*arguments, *uses})
        return self.decision

    def key(self, value):
        """The key of a Value of this graph."""
        return self.keys.get(value.id, value.id)

    def enter(self, key, value, layout, flow):
        """A tensor is first available in `layout`; marks matter only where there is a gradient."""
        layout = layout if flow or not layout.varying else layout.replace(varying=())
        self.decision.values[key] = value
        self.decision.forms[key] = RequiredLayouts(layout)
        self.decision.current[key] = layout
        self.decision.flows[key] = flow

    def take(self, key, target, reason):
        """An operator, or the caller, takes a tensor in this layout."""
        forms = self.decision.forms[key]
        forms.move(self.decision.current[key], target, reason)
        forms.want(target)
        self.decision.used[-1].append((key, target))

    def cross(self, declared, weight_axes):
        """Tensors cross a boundary: from now on they are taken in the declared layouts."""
        for value, layout, name in declared:
            key = self.key(value)
            arriving = self.decision.current[key]
            target = boundary_target(layout, self.run.mesh, value.shape, arriving, weight_axes, name)
            target = target if self.decision.flows[key] else target.replace(varying=())
            self.decision.forms[key].move(arriving, target, name)
            self.decision.current[key] = target

    def operate(self, node, place):
        """Decide an operator."""
        values = tree_leaves((node.args, node.kwargs))
        keys = [self.key(value) for value in values]
        try:
            signature = self.run.signature(node)
            metas = tuple(map(self.meta, values))
            declared = self.declared(node, signature, metas)
            free = frozenset(place for place, key in enumerate(keys) if key in self.free)
            asked = OperatorCall(signature, metas, self.run.mesh, self.run.cost_model, *declared, free)
            plan = operator_plan(node, signature, self.run.resolve(node, asked, self.choices.get(place)))
        except _LOCATED as error:
            raise type(error)(self.located(node, str(error))) from error
        for key, layout, dims in zip(keys, plan.inputs, signature.inputs):
            why = undivided(signature, dims, self.decision.current[key], layout)
            self.take(key, layout, f"{node.operator}: {why}" if why else node.operator)
        flow = max((self.decision.flows[key] for key in keys), default=NOTHING)
        flow = flow if passes_gradient(node.operator) else min(flow, FLOWS)
        made = tree_leaves(node.outputs)
        for value, layout in zip(made, plan.outputs, strict=True):
            self.enter(value.id, value, layout, flow if is_float(value.dtype) and not value.constant else NOTHING)
        plan = replace(plan, outputs=tuple(self.decision.current[value.id] for value in made))  # without useless marks
        self.decision.entries.append(plan)
        self.decision.asked.append(asked)
        name = f"of operator '{node.attribute}' ({node.operator}) in {self.label}"
        wanted = [(value, layout) for value, layout in zip(made, asked.outputs or ()) if layout is not None]
        self.cross([(value, layout, f"output {made.index(value)} {name}") for value, layout in wanted], ())

    def located(self, node, text):
        """An error's text with the Cell, the operator and the line of the source in it."""
        if self.label in text:
            return f"{node.source}: {text}"
        named = text if f"'{node.operator}'" in text else f"operator '{node.operator}': {text}"
        return f"in {self.label}, {node.source}: {named}"

    def declared(self, node, signature, metas):
        """The layouts that are declared for an operator's inputs and outputs: see `declared_layouts`."""
        declaration = self.run.declaration(self.graph.path)
        operator = declaration.operators.get(node.attribute) if declaration is not None else None
        if operator is None:
            return None, None
        where = f"{self.label}, operator '{node.attribute}' ({node.operator})"
        return declared_layouts(operator, signature, metas, self.run.mesh, where)

    def meta(self, value):
        """The `TensorMeta` of a Value as operators get it."""
        key = self.key(value)
        constant = self.decision.flows[key] == NOTHING
        return tensor_meta(value.shape, value.dtype, self.decision.current[key], constant)

    def call(self, node, place):
        """Decide the call of a child Cell."""
        if node.graph.custom_gradient:
            return self.call_whole(node)
        pairs = match_arguments(node)
        keys = {inner.id: self.key(outer) for inner, outer in pairs.items()}
        keys |= {key: self.outer_key(key) for key in self.run.outer_index.uses(node.graph)}
        arguments = {
            inner: (self.decision.current[outer], self.decision.flows[outer], outer in self.free)
            for inner, outer in keys.items()
        }
        self.decision.asked.append(arguments)
        if place in self.choices:
            callee = self.run.improved(node.graph, arguments, wanted=self.choices[place])
        else:
            callee = self.run.decide(node.graph, arguments)
        keys = self.run.keys_of(callee, node.graph, keys)
        for inner, outer in keys.items():
            self.decision.forms[outer].merge(callee.forms[inner])
        inner_keys = {use.value.id: use.path for use in callee.graph.parameters}
        inner_keys |= {use.value.id: (use.call, use.id) for use in callee.graph.outer}
        for outer, inner in match_results(node).items():
            key = inner_keys.get(inner.id, inner.id)
            self.enter(outer.id, outer, callee.current[key], callee.flows[key])
        outputs = tuple(self.decision.current[value.id] for value in tree_leaves(node.outputs))
        self.decision.entries.append(CallDecision(node, callee, keys, outputs))

    def outer_key(self, key):
        """The key here of what a child takes from a caller: perhaps it is this one."""
        call, number = key
        return self.keys.get(number, number) if call == self.graph.call else key

    def call_whole(self, node):
        """Decide the call of a Cell with a `bprop` of its own: it runs as it is, on whole tensors."""
        label = graph_label(node.graph)
        uses = self.run.parameter_index.uses(node.graph)
        for path in uses:
            layout = self.run.parameters[path]
            if not layout.is_replicated:
                raise ValueError(
                    f"{label} has a bprop of its own and runs on whole tensors, but its parameter '{path}' is sharded "
                    f"as {layout}: leave it whole, or write the Cell without a bprop"
                )
        values = tree_leaves((node.args, node.kwargs))
        for value in values:
            self.take(self.key(value), self.run.replicated(value), f"{label}, which has a bprop of its own")
        flows = [self.decision.flows[self.key(value)] for value in values]
        flows += [TRAINED for use in uses.values() if use.trainable]
        outputs = tree_leaves(node.outputs)
        for value in dict.fromkeys(outputs):
            differentiable = is_float(value.dtype) and not value.constant
            flow = max(flows, default=NOTHING) if differentiable else NOTHING
            self.enter(value.id, value, self.run.replicated(value), flow)
        self.decision.asked.append(None)
        self.decision.entries.append(CallDecision(node, None, {}, tuple(map(self.run.replicated, outputs))))

    def leave(self, declared, final, wanted):
        """Decide the layouts of the results."""
        self.cross(declared, ())
        fixed = {value.id for value, _, _ in declared}
        self.decision.used.append([])
        results = tree_leaves(self.graph.result)
        for value, layout in zip(results, wanted or ()):
            if layout is not None and value.id not in fixed:
                self.cross([(value, layout, f"result of {self.label}")], ())
        for value in results:
            key = self.key(value)
            layout = self.decision.current[key]
            if final and (layout.partial or layout.varying):
                reduced = layout.replace(partial=(), varying=())
                self.decision.forms[key].move(layout, reduced, f"result of {self.label}")
                self.decision.current[key] = reduced
            self.take(key, self.decision.current[key], "result")

    def finish(self, outside):
        """Find the best way to each form, and sum the costs up; `outside` are the keys of what the caller has, too."""
        decision, model = self.decision, self.run.cost_model
        for key, forms in decision.forms.items():
            value, trained = decision.values[key], decision.flows[key] == TRAINED
            forms.route(lambda *way, v=value, t=trained: move_cost(*way, v.shape, v.dtype, t, model))
            cost = NOTHING_PAID if key in self.free else forms_cost(forms, value, trained, model)
            decision.cost += cost
            decision.inside += cost if key not in outside else NOTHING_PAID
        for entry in decision.entries:
            if isinstance(entry, CallDecision):
                below = NOTHING_PAID if entry.decision is None else entry.decision.inside
            else:
                below = Cost(0, 0.0, work_of(entry, self.run.mesh))
            decision.cost += below
            decision.inside += below
