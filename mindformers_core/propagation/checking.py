"""A type checker of plans: every instruction takes tensors in the layouts that they have. Pure Python.

The search for a plan remembers and shares what it found. This asks each rule anew, once for every instruction of every
distinct frame, and knows nothing of the search: what holds here holds of the program that is generated.
"""

from mindformers_core.operators import tensor_meta
from mindformers_core.operators.resolve import checked_outputs
from mindformers_core.operators.signature import is_float
from mindformers_core.program.aliases import match_arguments
from mindformers_core.program.plan import CallPlan, Move
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.boundaries import graph_label
from mindformers_core.propagation.decide import FLOWS, NOTHING, TRAINED
from mindformers_core.propagation.operators import (
    algorithm_of,
    local_call_shapes,
    operator_signature,
    passes_gradient,
)
from mindformers_core.redistribution.transitions import SearchSpace, transitions

__all__ = ["PlanError", "check_plan"]

_SIGNATURE = ("inputs", "outputs", "sizes", "reduced", "whole", "linear", "added", "distributed", "run", "made")


class PlanError(RuntimeError):
    """A plan that contradicts itself or the rules of its operators: a defect of this package, never of a model."""


def check_plan(frame, final=False):
    """Check the plan of a root.

    Args:
        frame: its `CellPlan`.
        final: whether its results must be neither partial nor varying. Default: False.

    Raises:
        PlanError: an instruction takes a tensor in a layout that it doesn't have; an operator's outputs aren't what its
            rule, and its local call, make of its inputs; a redistribution doesn't lead to its target; a call doesn't
            fit the Cell that it calls; something is made twice, or not at all. Names Cell, line, instruction, tensor
            and layouts.
    """
    graph = frame.graph
    flows = {value.id: FLOWS if is_float(value.dtype) else NOTHING for value in tree_leaves(graph.arguments)}
    _check({}, frame, flows)
    for value, layout in zip(tree_leaves(graph.result), frame.results):
        if final and (layout.partial or layout.varying):
            raise PlanError(f"{graph_label(graph)} returns {value.described} as {layout}, which is not reduced")


def _check(known, frame, flows):
    """Check a frame and those below it, each once.

    Args:
        known: identity of a frame that was checked -> (the frame, what flows back through each of its results).
        frame: the `CellPlan`.
        flows: number of every argument's and lifted Value -> what flows back through it.

    Returns:
        What flows back through each result.
    """
    if id(frame) not in known:
        known[id(frame)] = frame, _FrameCheck(known, frame, flows).results()
    return known[id(frame)][1]


class _FrameCheck:
    """One frame while its instructions are checked, one after the other.

    Attributes:
        hand: number of a Value -> the layouts that it has so far.
        flows: number of a Value -> what flows back through it.
        node: what the current instruction carries out; None for a redistribution, and between instructions.
        left: identities of the nodes that no instruction has carried out yet.
    """

    def __init__(self, known, frame, flows):
        self.known, self.frame, self.graph, self.node = known, frame, frame.graph, None
        self.left = {id(node) for node in self.graph.nodes}
        self.flows = {use.value.id: NOTHING for use in self.graph.constants}
        for use in self.graph.parameters:
            trained = TRAINED if use.trainable else FLOWS
            self.flows[use.value.id] = trained if is_float(use.value.dtype) else NOTHING
        self.flows |= flows
        if any(layout.mesh != frame.mesh for layout in frame.layouts.values()):
            self.fault(f"tensors are on another mesh than {frame.mesh!r}")
        stored = [*tree_leaves(self.graph.arguments), *(use.value for use in self.graph.parameters)]
        self.hand = {value.id: {frame.layouts[value.id]} for value in stored}
        for use in self.graph.constants:
            layout = frame.layouts[use.value.id]
            if not layout.is_replicated:
                self.fault(f"the constant {use.value.described} is held as {layout}, not whole")
            self.hand[use.value.id] = {layout}
        for value, layout in frame.lifted:
            self.make(value, layout)

    def results(self):
        """See `_check`."""
        for entry in self.frame.instructions:
            self.node = None if isinstance(entry, Move) else entry.node
            if isinstance(entry, Move):
                self.move(entry)
                continue
            self.take(tree_leaves((self.node.args, self.node.kwargs)), entry.inputs)
            self.call(entry) if isinstance(entry, CallPlan) else self.operate(entry)
        self.node = None
        if self.left:
            self.fault(f"{len(self.left)} operators or calls of it are never carried out")
        results = tree_leaves(self.graph.result)
        self.take(results, self.frame.results)
        for number in self.frame.layouts.keys() & self.flows.keys():
            trained = self.flows[number] == TRAINED
            if trained != (number in self.frame.gradients):
                self.fault(f"gradients of %{number} are planned wrongly")
        return [self.flows[value.id] for value in results]

    def fault(self, text):
        """Raise the `PlanError` of the current instruction."""
        source = "" if self.node is None else f", {self.node.source}: {getattr(self.node, 'operator', 'the call')}"
        raise PlanError(f"the plan of {graph_label(self.graph)}{source}: {text}")

    def take(self, values, layouts):
        """Tensors are taken in layouts that they have."""
        if len(values) != len(layouts):
            self.fault(f"takes {len(values)} tensors, planned are {len(layouts)}")
        for value, layout in zip(values, layouts):
            known = self.hand.get(value.id, ())
            if layout not in known:
                shown = ", ".join(map(str, known)) or "no layout yet"
                self.fault(f"takes {value.described} as {layout}, which isn't available; it is in {shown}")

    def make(self, value, layout):
        """A tensor gets a layout that it didn't have."""
        try:
            layout.local_shape(value.shape, value.described)
        except ValueError as error:
            self.fault(str(error))
        known = self.hand.setdefault(value.id, set())
        if layout in known:
            self.fault(f"makes {value.described} as {layout}, which is available already")
        known.add(layout)

    def produce(self, node, layouts):
        """A node is carried out, and gives its results in these layouts."""
        values = tree_leaves(node.outputs)
        if id(node) not in self.left:
            self.fault("is carried out twice")
        self.left.discard(id(node))
        if len(values) != len(layouts):
            self.fault(f"gives {len(values)} tensors, planned are {len(layouts)}")
        for value, layout in dict(zip(values, layouts)).items():
            self.make(value, layout)
            planned = self.frame.layouts[value.id]
            if layout != planned:
                self.fault(f"gives {value.described} as {layout}, planned is {planned}")

    def move(self, move):
        """Its steps lead from one layout of a tensor to another, each by a step that there is."""
        what = f"the redistribution of {move.value.described} to {move.target}"
        self.take([move.value], [move.source])
        at, shape = move.source, move.value.shape
        for step in move.steps:
            start = (at, at.local_shape(shape))
            if start != (step.source, step.shape):
                self.fault(f"{what} goes on from {step.source}, {step.shape}")
            taken = step.kind, step.axes, step.dim, step.to_dim, step.op
            space = SearchSpace(step.source, step.target, shape, step.itemsize)
            ways = (space.layout(*state) for *way, state in transitions(space, *space.state(at)) if tuple(way) == taken)
            if step.target not in ways:
                self.fault(f"{what} can't take the step {step}")
            at = step.target
        if at != move.target:
            self.fault(f"{what}: its steps lead from {move.source} to {at}")
        trained = self.flows[move.value.id] == TRAINED
        if move.gradient != trained:
            self.fault(f"{what} is planned with{'out' * trained} a gradient")
        self.make(move.value, move.target)

    def operate(self, plan):
        """Its outputs are those of its rule for these inputs, and its local call gives their parts."""
        node, mesh = plan.node, self.frame.mesh
        values = tree_leaves((node.args, node.kwargs))
        flows = [self.flows[value.id] for value in values]
        metas = [
            tensor_meta(value.shape, value.dtype, layout, flow == NOTHING)
            for value, layout, flow in zip(values, plan.inputs, flows)
        ]
        flow = max(flows, default=NOTHING)
        flow = flow if passes_gradient(node.operator) else min(flow, FLOWS)
        try:
            signature = operator_signature(node)
            outputs = checked_outputs(signature, metas, mesh, plan.axes_of)
            shapes = local_call_shapes(plan) if plan.algorithm is None and values else None
        except (ValueError, TypeError) as error:
            self.fault(str(error))
        made = tree_leaves(node.outputs)
        for value, layout, planned in zip(made, outputs, plan.outputs):
            self.flows[value.id] = flow if is_float(value.dtype) and not value.constant else NOTHING
            layout = layout if self.flows[value.id] else layout.replace(varying=())
            if layout != planned:
                self.fault(f"gives {value.described} as {layout}, planned is {planned}")
        self.produce(node, plan.outputs)
        if shapes not in (None, plan.local_shapes):
            self.fault(f"gives local shapes {shapes}, where {plan.local_shapes} are the parts")
        for name in _SIGNATURE:
            if getattr(signature, name) != getattr(plan.signature, name):
                self.fault(f"has another rule: '{name}'")
        runs = algorithm_of(node.operator, signature, plan.axes_of)
        if runs != (plan.algorithm, plan.cut_axes):
            self.fault(f"runs {plan.algorithm}, where {runs[0]} is needed")

    def call(self, call):
        """The called Cell gets what it is planned for, and gives what the caller goes on with."""
        node, inner = call.node, call.frame
        made = tree_leaves(node.outputs)
        if inner is None:
            flows = self.call_whole(call, made)
        else:
            flows = _check(self.known, inner, self.pass_arguments(call))
            for value, given, planned in zip(made, call.outputs, inner.results):
                self.agree(value, given, planned)
        self.flows |= {value.id: flow for value, flow in zip(made, flows)}
        if not call.is_part:
            return self.produce(node, call.outputs)
        self.left -= {id(entry.node) for entry in inner.instructions if not isinstance(entry, Move)}
        for value, layout in zip(made, call.outputs):
            self.make(value, layout)

    def pass_arguments(self, call):
        """What flows back through what a called Cell gets: number of the Value there -> that."""
        passed = dict(zip(tree_leaves((call.node.args, call.node.kwargs)), call.inputs))
        pairs = [(callee, caller, passed[caller]) for callee, caller in match_arguments(call.node).items()]
        for callee, caller, layout in pairs:
            self.agree(caller, layout, call.frame.layouts[callee.id])
        values, layouts = zip(*call.lifted) if call.lifted else ((), ())
        self.take(values, layouts)
        planned = [layout for _, layout in call.frame.lifted]
        if list(layouts) != planned:
            self.fault(f"hands down {list(map(str, layouts))}, not {list(map(str, planned))}")
        pairs += [(callee, caller, layout) for (caller, layout), (callee, _) in zip(call.lifted, call.frame.lifted)]
        return {callee.id: self.flows[caller.id] for callee, caller, _ in pairs}

    def call_whole(self, call, made):
        """A Cell with a `bprop` of its own runs on whole tensors; what flows back through its results."""
        node = call.node
        for value, layout in zip([*tree_leaves((node.args, node.kwargs)), *made], (*call.inputs, *call.outputs)):
            if not layout.is_replicated:
                self.fault(f"has {value.described} as {layout}, a Cell with a bprop has it whole")
        trained = any(use.trainable for graph in node.graph.calls() for use in graph.parameters)
        flows = [self.flows[value.id] for value in tree_leaves((node.args, node.kwargs))]
        flow = max([*flows, TRAINED if trained else NOTHING])
        return [flow if is_float(value.dtype) and not value.constant else NOTHING for value in made]

    def agree(self, value, given, planned):
        """Caller and called Cell say the same of a tensor."""
        if given != planned:
            self.fault(f"has {value.described} as {given}, the Cell in {planned}")
