"""One call of one Cell: the layouts in which every operator computes, chosen in the order of execution. Pure Python.

The places of redistributions are chosen later (see `insertion.py`); here only the required layouts are recorded.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from mindformers_core.operators import OperatorCall, facts_of, is_float, tensor_meta
from mindformers_core.operators.resolve import jointly_kept, resolve, resolved, seconds_of, undivided_reason
from mindformers_core.placement import axes_in
from mindformers_core.program.graph import CallNode, match_arguments
from mindformers_core.program.plan import Reason
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.boundaries import boundary_target, declared_inputs, declared_outputs
from mindformers_core.propagation.operators import operator_plan, passes_gradient
from mindformers_core.propagation.required_layouts import RequiredLayouts
from mindformers_core.propagation.strategies import declared_layouts
from mindformers_core.redistribution import FREE, Price

# Gradient flow through a tensor: none; to an input or a frozen parameter; to a trained parameter
NOTHING, FLOWS, TRAINED = 0, 1, 2
_LOCATED = (ValueError, TypeError, IndexError)


def gradient_flow(value, flow=FLOWS, use=None):
    """`flow`, or that of a `ParameterUse`; `NOTHING` for a tensor that is constant or has no float dtype."""
    if value.constant or not is_float(value.dtype):
        return NOTHING
    return TRAINED if use is not None and use.trainable else flow


def operator_flow(node, flows):
    """The gradient flow of an operator's float results, given those of its inputs."""
    flow = max(flows, default=NOTHING)
    return flow if passes_gradient(node.operator) else min(flow, FLOWS)


def _seconds_over(axes, call, found):
    """Seconds of a `Resolution` of an `OperatorCall`, were it cut over these axes alone."""
    cuts = {factor: axes_in(cut) for factor, cut in found.choice.axes_of.items()}
    if axes.issuperset(axis for cut in cuts.values() for axis in cut):
        return found.own.computation
    return seconds_of(call, {factor: tuple(axis for axis in cut if axis in axes) for factor, cut in cuts.items()})


@dataclass(frozen=True, eq=False)
class CallDecision:
    """How a child Cell is called, wherever redistributions are inserted.

    Attributes:
        node: the `CallNode`.
        decision: the `Decision` of its plan; None for a Cell with a `bprop` of its own.
        keys: of every tensor from outside: key in the callee -> key in the caller.
        outputs: the layouts of `node.made`.
    """

    node: CallNode
    decision: "Decision | None"
    keys: dict
    outputs: tuple


@dataclass(eq=False)
class Decision:
    """The decisions for one call of one Cell.

    A tensor's *key* is the number of its Value in the graph; of a parameter the path; of a free variable the number of
    the call that produces the tensor, and the number of the Value there (see `Uses`).

    Attributes:
        entries: `OperatorPlan`s and `CallDecision`s, one for every node.
        calls: for every operator its `OperatorCall`, for every call its arguments (see `decide_plan`).
        values: key -> its Value, of this graph or of one below.
        required: key -> `RequiredLayouts`, of this call and those below.
        used: for every entry, and last for the results, pairs (key, layout) of consumed tensors.
        flows: key -> gradient flow: `NOTHING`, `FLOWS` or `TRAINED`.
        current: key -> the layout in which operators receive the tensor, after redistribution at the boundary.
        weights: keys of the tensors that are computed from declared parameters alone.
        inside: the `Price` without redistributions of arguments and parameters, which callers may share.
        price: the whole `Price`.
        activation_seconds: seconds of computation, were operators cut over `Propagation.activation_axes` alone.
    """

    graph: object
    entries: list = field(default_factory=list)
    calls: list = field(default_factory=list)
    values: dict = field(default_factory=dict)
    required: dict = field(default_factory=dict)
    used: list = field(default_factory=list)
    flows: dict = field(default_factory=dict)
    current: dict = field(default_factory=dict)
    weights: set = field(default_factory=set)
    inside: Price = FREE
    price: Price = FREE
    activation_seconds: float = 0.0


def decide_plan(run, graph, arguments, final=False, wanted=None, choices=None):
    """The `Decision` for a call.

    Args:
        run: the `Propagation` (mesh, device model, parameters, declarations), which decides child calls.
        arguments: key of every argument and of every free variable used here or below -> (layout, gradient flow,
            whether the tensor is available in any layout).
        final: whether partial and varying results are reduced: those of the root.
        wanted: a layout or None for each of `tree_leaves(graph.result)`, for results without a declared layout.
        choices: index of a node -> what is chosen there: for an operator a `Choice`, which holds where it is possible;
            for a call the `wanted` layouts of its results, after lookahead. Default: the cheapest, for all.
    """
    return _OpenCall(run, graph, choices or {}).decide(arguments, final, wanted)


class _OpenCall:
    """One call during its decision."""

    def __init__(self, run, graph, choices):
        self.run = run
        self.graph = graph
        self.choices = choices
        self.label = graph.label
        self.decision = Decision(graph)
        self.free = set()

    def decide(self, arguments, final, wanted):
        declaration = self.run.declaration(self.graph.path)
        uses = self.graph.uses.parameters
        self.free |= {key for key, (_, _, free) in arguments.items() if free} | (self.run.free & uses.keys())
        values = {value.id: value for value in tree_leaves(self.graph.arguments)}
        values |= {key: use.value for key, use in self.graph.uses.free_variables.items()}
        for key, (layout, flow, _) in arguments.items():
            self.enter(key, values[key], layout, flow)
        for path, use in uses.items():
            self.enter(path, use.value, self.run.parameters[path], gradient_flow(use.value, use=use))
            self.decision.weights |= {path} - self.run.free
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
        return self.graph.names.get(value.id, value.id)

    def enter(self, key, value, layout, flow):
        """Enter a tensor that is first available in `layout`; without a gradient no layout is varying."""
        layout = layout if flow or not layout.varying else layout.replace(varying=())
        self.decision.values[key] = value
        self.decision.required[key] = RequiredLayouts(layout)
        self.decision.current[key] = layout
        self.decision.flows[key] = flow

    def take(self, key, target, reason):
        """Record that an operator, or the caller, consumes a tensor in this layout."""
        required = self.decision.required[key]
        required.move(self.decision.current[key], target, reason)
        required.want(target)
        self.decision.used[-1].append((key, target))

    def cross(self, declared, weight_axes):
        """Redistribute tensors at a boundary: later consumers take them in the declared layouts."""
        for value, layout, name in declared:
            key = self.key(value)
            arriving = self.decision.current[key]
            target = boundary_target(layout, self.run.mesh, value.shape, arriving, weight_axes, name)
            target = target if self.decision.flows[key] else target.replace(varying=())
            self.decision.required[key].move(arriving, target, name)
            self.decision.current[key] = target

    def operate(self, node, place):
        """Decide an operator."""
        made, keys = node.made, [self.key(value) for value in node.taken]
        metas = tuple(map(self.meta, node.taken, keys))
        free, trained, kept = self.known_of(keys)
        given, choice = (metas, free, trained, kept), self.choices.get(place)
        key = id(node), *given, choice
        call, plan, reasons, own, alone = self.run.operator(key, lambda: self.planned(node, *given, choice))
        for key, layout, reason in zip(keys, plan.inputs, reasons):
            self.take(key, layout, reason)
        flow = operator_flow(node, [self.decision.flows[key] for key in keys])
        for value, layout in zip(made, plan.outputs, strict=True):
            self.enter(value.id, value, layout, gradient_flow(value, flow))
        if keys and self.decision.weights.issuperset(keys):
            self.decision.weights |= {value.id for value in made}
        outputs = tuple(self.decision.current[value.id] for value in made)  # as entered
        self.decision.entries.append(plan if outputs == plan.outputs else replace(plan, outputs=outputs))
        self.decision.calls.append(call)
        self.decision.inside += own
        self.decision.activation_seconds += alone
        name = f"of operator '{node.attribute}' ({node.operator}) in {self.label}"
        wanted = [(value, layout) for value, layout in zip(made, call.outputs or ()) if layout is not None]
        self.cross([(value, layout, Reason(f"{made.index(value)} {name}", "output")) for value, layout in wanted], ())

    def known_of(self, keys):
        """`free`, `trained` and `kept` of an `OperatorCall` of these tensors."""
        free = frozenset(place for place, key in enumerate(keys) if key in self.free)
        trained = frozenset(place for place, key in enumerate(keys) if self.decision.flows[key] == TRAINED)
        axes = (self.run.weight_axes if key in self.decision.weights else self.run.batch_axes for key in keys)
        return free, trained, tuple(each & self.decision.current[key].cut_axes for each, key in zip(axes, keys))

    def planned(self, node, metas, free, trained, kept, choice):
        """An operator's call, plan, why its inputs have their layouts, its own `Price` and `activation_seconds`."""
        run = self.run
        try:
            signature = run.signature(node)
            declared = self.declared(node, signature, metas)
            given = metas
            if facts_of(node.operator).writes:
                given = metas[0], *(tensor_meta(meta.shape, meta.dtype, meta.layout, True) for meta in metas[1:])
                if 0 not in free:
                    declared = (metas[0].layout, *(None,) * (len(metas) - 1)), None
            dtypes = tuple(value.dtype for value in node.made)
            kept = jointly_kept(signature, given, kept)
            known = *declared, free, trained, kept, partial(run.algorithm_price, node)
            call = OperatorCall(node.operator, signature, given, run.mesh, run.device_model, dtypes, *known)
            found = choice and resolved(call, choice) or resolve(call)
            plan = operator_plan(node, call, found)
        except _LOCATED as error:
            raise type(error)(self.located(node, str(error))) from error
        ways = zip(signature.inputs, metas, plan.inputs)
        whys = [undivided_reason(signature, dims, meta.layout, layout) for dims, meta, layout in ways]
        reasons = [Reason(node.operator, undivided=why) for why in whys]
        return call, plan, reasons, found.own, _seconds_over(run.activation_axes, call, found)

    def located(self, node, text):
        """An error's text, extended by the Cell, the operator and the source line."""
        if self.label in text:
            return f"{node.source}: {text}"
        named = text if f"'{node.operator}'" in text else f"operator '{node.operator}': {text}"
        return f"in {self.label}, {node.source}: {named}"

    def declared(self, node, signature, metas):
        """The layouts declared for an operator's inputs and outputs: see `declared_layouts`."""
        operator = self.run.declaration(self.graph.path).operators.get(node.attribute)
        if operator is None:
            return None, None
        where = f"{self.label}, operator '{node.attribute}' ({node.operator})"
        return declared_layouts(operator, signature, metas, self.run.mesh, where)

    def meta(self, value, key):
        """The `TensorMeta` of a Value as operators receive the tensor."""
        constant = self.decision.flows[key] == NOTHING
        return tensor_meta(value.shape, value.dtype, self.decision.current[key], constant)

    def call(self, node, place):
        """Decide the call of a child Cell."""
        if node.graph.custom_gradient:
            return self.call_whole(node)
        pairs = match_arguments(node)
        keys = {inner.id: self.key(outer) for inner, outer in pairs.items()}
        for call, number in node.graph.uses.free_variables:
            own = call == self.graph.call  # else a caller's
            keys[call, number] = self.graph.names.get(number, number) if own else (call, number)
        arguments = {
            inner: (self.decision.current[outer], self.decision.flows[outer], outer in self.free)
            for inner, outer in keys.items()
        }
        self.decision.calls.append(arguments)
        if place in self.choices:
            callee = self.run.improved(node.graph, arguments, wanted=self.choices[place])
        else:
            callee = self.run.decide(node.graph, arguments)
        keys = self.run.keys_of(callee, node.graph, keys)
        for inner, outer in keys.items():
            self.decision.required[outer].merge(callee.required[inner])
        for outer, inner in dict(zip(node.made, tree_leaves(node.graph.result), strict=True)).items():
            key = callee.graph.names.get(inner.id, inner.id)
            self.enter(outer.id, outer, callee.current[key], callee.flows[key])
        outputs = tuple(self.decision.current[value.id] for value in node.made)
        self.decision.entries.append(CallDecision(node, callee, keys, outputs))

    def call_whole(self, node):
        """Decide the call of a Cell with a `bprop` of its own, which runs unchanged on whole tensors."""
        label = node.graph.label
        uses = node.graph.uses.parameters
        for path in uses:
            layout = self.run.parameters[path]
            if not layout.is_replicated:
                raise ValueError(
                    f"{label} has a bprop of its own and runs on whole tensors, but its parameter '{path}' is sharded "
                    f"as {layout}: leave it whole, or write the Cell without a bprop"
                )
        for value in node.taken:
            self.take(self.key(value), self.run.replicated(value), Reason(f"{label}, which has a bprop of its own"))
        flows = [self.decision.flows[self.key(value)] for value in node.taken]
        flows += [TRAINED for use in uses.values() if use.trainable]
        for value in dict.fromkeys(node.made):
            flow = gradient_flow(value, max(flows, default=NOTHING))
            self.enter(value.id, value, self.run.replicated(value), flow)
        self.decision.calls.append(None)
        self.decision.entries.append(CallDecision(node, None, {}, tuple(map(self.run.replicated, node.made))))

    def leave(self, declared, final, wanted):
        """Decide the layouts of the results."""
        self.cross(declared, ())
        fixed = {value.id for value, _, _ in declared}
        self.decision.used.append([])
        results = tree_leaves(self.graph.result)
        for value, layout in zip(results, wanted or ()):
            if layout is not None and value.id not in fixed:
                self.cross([(value, layout, Reason(f"of {self.label}", "result"))], ())
        for value in results:
            key = self.key(value)
            layout = self.decision.current[key]
            reduced = layout.contiguous.replace(partial=(), varying=())
            if final and layout != reduced:
                self.decision.required[key].move(layout, reduced, Reason(f"of {self.label}", "result"))
                self.decision.current[key] = reduced
            self.take(key, self.decision.current[key], Reason("", "result"))

    def finish(self, outside):
        """Choose the cheapest source of every required layout, and add up prices; callers share the keys `outside`."""
        decision = self.decision
        for entry in decision.entries:
            if isinstance(entry, CallDecision) and entry.decision is not None:
                decision.inside += entry.decision.inside
                decision.activation_seconds += entry.decision.activation_seconds
        shared = FREE
        for key, required in decision.required.items():
            if not required.moves:
                continue
            price = partial(self.run.redistribution_price, decision.values[key], decision.flows[key] == TRAINED)
            required.route(price)
            if key in outside:
                shared += FREE if key in self.free else required.price(price)
            elif key not in self.free:
                decision.inside += required.price(price)
        decision.price = decision.inside + shared
