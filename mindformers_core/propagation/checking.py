"""A type checker of plans: every instruction consumes tensors in available layouts. Pure Python.

The search for a plan caches and shares its results. The checker is independent of the search: every rule is evaluated
again, once for every instruction of every distinct plan. What holds here also holds for the generated program.
"""

from mindformers_core.operators import facts_of, tensor_meta
from mindformers_core.operators.resolve import checked_outputs, chosen_algorithm
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.decide import NOTHING, TRAINED, gradient_flow, operator_flow
from mindformers_core.propagation.operators import local_call_shapes, operator_signature
from mindformers_core.redistribution.striding import merge_dims
from mindformers_core.redistribution.transitions import SearchSpace, transitions


class PlanError(RuntimeError):
    """A plan that contradicts itself or the rules of its operators: a defect of this package, never of a model."""


def check_plan(plan, final=False):
    """Check the plan of a root.

    Args:
        final: whether its results must be neither partial nor varying. Default: False.

    Raises:
        PlanError: an instruction consumes a tensor in a layout that isn't available; an operator's outputs differ from
            those of its rule, or of its local call; a redistribution doesn't lead to its target; a call contradicts
            the plan of its callee; a tensor is produced twice, or never. Names Cell, line, instruction, tensor and
            layouts.
    """
    graph = plan.graph
    flows = {value.id: gradient_flow(value) for value in tree_leaves(graph.arguments)}
    _check({}, plan, flows)
    for value, layout in zip(tree_leaves(graph.result), plan.results):
        if final and (layout.partial or layout.varying):
            raise PlanError(f"{graph.label} returns {value.described} as {layout}, which is not reduced")


def _check(known, plan, flows):
    """Check a plan and those below, each once.

    Args:
        known: `CellPlan` that was checked -> gradient flow of each of its results.
        flows: number of every argument's and lifted Value -> gradient flow.

    Returns:
        The gradient flow of each result.
    """
    if plan not in known:
        known[plan] = _PlanCheck(known, plan, flows).results()
    return known[plan]


class _PlanCheck:
    """The check of one plan, instruction by instruction.

    Attributes:
        available: number of a Value -> the available layouts.
        flows: number of a Value -> gradient flow.
        node: the node of the current instruction; None for a redistribution, and between instructions.
        left: identities of the nodes without an instruction so far.
    """

    def __init__(self, known, plan, flows):
        self.known, self.plan, self.graph, self.node = known, plan, plan.graph, None
        self.left = {id(node) for node in self.graph.nodes}
        self.flows = {use.value.id: NOTHING for use in self.graph.constants}
        self.flows |= {use.value.id: gradient_flow(use.value, use=use) for use in self.graph.parameters} | flows
        if any(layout.mesh != plan.mesh for layout in plan.layouts.values()):
            self.fault(f"tensors are on another mesh than {plan.mesh!r}")
        stored = [*tree_leaves(self.graph.arguments), *(use.value for use in self.graph.parameters)]
        self.available = {value.id: {plan.layouts[value.id]} for value in stored}
        for use in self.graph.constants:
            layout = plan.layouts[use.value.id]
            if not layout.is_replicated:
                self.fault(f"the constant {use.value.described} is held as {layout}, not whole")
            self.available[use.value.id] = {layout}
        for value, layout in plan.lifted:
            self.make(value, layout)

    def results(self):
        for entry in self.plan.instructions:
            self.node = None if isinstance(entry, Redistribution) else entry.node
            if isinstance(entry, Redistribution):
                self.move(entry)
                continue
            self.take(self.node.taken, entry.inputs)
            self.call(entry) if isinstance(entry, CallPlan) else self.operate(entry)
        self.node = None
        if self.left:
            self.fault(f"{len(self.left)} operators or calls of it are never carried out")
        results = tree_leaves(self.graph.result)
        self.take(results, self.plan.results)
        for number in self.plan.layouts.keys() & self.flows.keys():
            trained = self.flows[number] == TRAINED
            if trained != (number in self.plan.gradients):
                self.fault(f"gradients of %{number} are planned wrongly")
        return [self.flows[value.id] for value in results]

    def fault(self, text):
        """Raise the `PlanError` of the current instruction."""
        source = "" if self.node is None else f", {self.node.source}: {getattr(self.node, 'operator', 'the call')}"
        raise PlanError(f"the plan of {self.graph.label}{source}: {text}")

    def take(self, values, layouts):
        """Check that tensors are consumed in available layouts."""
        if len(values) != len(layouts):
            self.fault(f"takes {len(values)} tensors, planned are {len(layouts)}")
        for value, layout in zip(values, layouts):
            known = self.available.get(value.id, ())
            if layout not in known:
                shown = ", ".join(map(str, known)) or "no layout yet"
                self.fault(f"takes {value.described} as {layout}, which isn't available; it is in {shown}")

    def make(self, value, layout):
        """Record a new layout of a tensor."""
        try:
            layout.local_shape(value.shape, value.described)
        except ValueError as error:
            self.fault(str(error))
        known = self.available.setdefault(value.id, set())
        if layout in known:
            self.fault(f"makes {value.described} as {layout}, which is available already")
        known.add(layout)

    def produce(self, node, layouts):
        """Record the instruction of a node, which produces its results in these layouts."""
        values = node.made
        if id(node) not in self.left:
            self.fault("is carried out twice")
        self.left.discard(id(node))
        if len(values) != len(layouts):
            self.fault(f"gives {len(values)} tensors, planned are {len(layouts)}")
        for value, layout in dict(zip(values, layouts)).items():
            self.make(value, layout)
            planned = self.plan.layouts[value.id]
            if layout != planned:
                self.fault(f"gives {value.described} as {layout}, planned is {planned}")

    def move(self, move):
        """Check that existing kinds of steps lead from the source of a redistribution to its target."""
        what = f"the redistribution of {move.value.described} to {move.target}"
        self.take([move.value], [move.source])
        at, shape = move.source, move.value.shape
        for step in move.steps:
            if (at, shape) != (step.source, step.shape):
                self.fault(f"{what} goes on from {step.source}, {step.shape}")
            if step.kind == "view":
                ends = (at, shape), (step.target, step.to_shape)
                (whole, sizes), split = sorted(ends, key=lambda end: len(end[1]))
                if merge_dims(*split, sizes) != whole:
                    self.fault(f"{what} can't take the step {step}")
                at, shape = ends[1]
                continue
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
        """Check an operator's outputs against its rule, and the local shapes against its local call."""
        node, mesh = plan.node, self.plan.mesh
        values = node.taken
        flows = [self.flows[value.id] for value in values]
        flows[1:] = [NOTHING] * len(flows[1:]) if facts_of(node.operator).writes else flows[1:]
        metas = [
            tensor_meta(value.shape, value.dtype, layout, flow == NOTHING)
            for value, layout, flow in zip(values, plan.inputs, flows)
        ]
        flow = operator_flow(node, flows)
        try:
            signature = operator_signature(node)
            outputs = checked_outputs(signature, metas, mesh, plan.axes_of)
            shapes = local_call_shapes(plan) if plan.algorithm is None and values else None
        except (ValueError, TypeError) as error:
            self.fault(str(error))
        for value, layout, planned in zip(node.made, outputs, plan.outputs):
            self.flows[value.id] = gradient_flow(value, flow)
            layout = layout if self.flows[value.id] else layout.replace(varying=())
            if layout != planned:
                self.fault(f"gives {value.described} as {layout}, planned is {planned}")
        self.produce(node, plan.outputs)
        if shapes not in (None, plan.local_shapes):
            self.fault(f"gives local shapes {shapes}, where {plan.local_shapes} are the parts")
        for name in signature.differences(plan.signature):
            self.fault(f"has another rule: '{name}'")
        runs = chosen_algorithm(node.operator, signature, plan.axes_of)
        if runs != (plan.algorithm, plan.cut_axes):
            self.fault(f"runs {plan.algorithm}, where {runs[0]} is needed")

    def call(self, call):
        """Check that a call and the plan of the called Cell agree."""
        node, inner = call.node, call.plan
        made = node.made
        if inner is None:
            flows = self.call_whole(call, made)
        else:
            flows = _check(self.known, inner, self.pass_arguments(call))
            for value, given, planned in zip(made, call.outputs, inner.results):
                self.agree(value, given, planned)
        self.flows |= {value.id: flow for value, flow in zip(made, flows)}
        if not call.is_part:
            return self.produce(node, call.outputs)
        self.left -= {id(entry.node) for entry in inner.instructions if not isinstance(entry, Redistribution)}
        for value, layout in zip(made, call.outputs):
            self.make(value, layout)

    def pass_arguments(self, call):
        """Check what a call passes; number of the callee's Value -> gradient flow."""
        values, layouts = zip(*call.lifted) if call.lifted else ((), ())
        self.take(values, layouts)
        planned = [layout for _, layout in call.plan.lifted]
        if list(layouts) != planned:
            self.fault(f"hands down {list(map(str, layouts))}, not {list(map(str, planned))}")
        passed = call.passed
        for callee, caller, layout in passed[: len(passed) - len(planned)]:
            self.agree(caller, layout, call.plan.layouts[callee.id])
        return {callee.id: self.flows[caller.id] for callee, caller, _ in passed}

    def call_whole(self, call, made):
        """Check the call of a Cell with a `bprop` of its own, on whole tensors; gradient flows of its results."""
        node = call.node
        for value, layout in call.consumed + call.produced:
            if not layout.is_replicated:
                self.fault(f"has {value.described} as {layout}, a Cell with a bprop has it whole")
        trained = any(use.trainable for graph in node.graph.calls() for use in graph.parameters)
        flows = [self.flows[value.id] for value, _ in call.consumed]
        flow = max([*flows, TRAINED if trained else NOTHING])
        return [gradient_flow(value, flow) for value in made]

    def agree(self, value, given, planned):
        """Check that caller and callee plan the same layout of a tensor."""
        if given != planned:
            self.fault(f"has {value.described} as {given}, the Cell in {planned}")
