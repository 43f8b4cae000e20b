"""The result of propagation as plain data: a `CellPlan` for every distinct call of a Cell. Pure Python.

A plan is a list of instructions in the order of execution. A tensor is identified by its `Value` and its `Layout`:
the layout in which the tensor arrives or is produced, or the target of an earlier redistribution of the same plan.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

from mindformers_core.layout import Layout
from mindformers_core.program.graph import match_arguments
from mindformers_core.program.structure import tree_leaves


@dataclass(frozen=True)
class Reason:
    """What a tensor is redistributed for: its first consumer; as text, for a reader.

    Attributes:
        name: `"MatMul"`, `"'x' of Cell 'mlp'"`.
        kind: `"input"`, `"output"` or `"result"` of what is named; "" where that takes the tensor.
        undivided: why a dim can't stay sharded, where the mesh axes don't divide its size; else an empty string.
    """

    name: str
    kind: str = ""
    undivided: str = ""

    def __str__(self):
        return f"{self.kind} {self.name}".strip() + f": {self.undivided}" * bool(self.undivided)


@dataclass(frozen=True, eq=False)
class Redistribution:
    """One redistribution of one tensor, shared by all later consumers.

    Attributes:
        value: the `Value`, of the plan's graph.
        source, target: the layouts before and after.
        steps: the `Step`s of the cheapest way between them; may be empty.
        reason: the `Reason`, the first consumer.
        gradient: whether a gradient flows back through the redistribution in training: the tensor depends on a
            trainable parameter. Otherwise the backward collectives run only if the gradient of an input is requested.
    """

    value: object
    source: Layout
    target: Layout
    steps: tuple
    reason: Reason
    gradient: bool

    plan = None

    @property
    def described(self):
        """Its layouts and steps, for reports."""
        steps = ", ".join(f"{step.kind} over {' and '.join(step.axes)}" for step in self.steps) or "nothing to do"
        return f"{self.source} -> {self.target} by {steps}"

    @property
    def consumed(self):
        """Pairs (Value, Layout) of the tensors that the instruction takes."""
        return [(self.value, self.source)]

    @property
    def produced(self):
        """Pairs (Value, Layout) of the tensors that the instruction makes available."""
        return [(self.value, self.target)]


class _NodePlan:
    """Base of `OperatorPlan` and `CallPlan`: a node, and layouts of its inputs and outputs."""

    plan = None

    @cached_property
    def consumed(self):
        """Pairs (Value, Layout) of the tensor arguments, in order; a `lifted` tensor is none."""
        return tuple(zip(self.node.taken, self.inputs, strict=True))

    @cached_property
    def produced(self):
        """Pairs (Value, Layout) of the outputs, in order."""
        return tuple(zip(self.node.made, self.outputs, strict=True))

    @cached_property
    def local_shapes(self):
        """The local shape of every output."""
        return [layout.local_shape(value.shape) for value, layout in self.produced]


@dataclass(frozen=True, eq=False)
class OperatorPlan(_NodePlan):
    """How one operator is computed.

    Attributes:
        signature: the `Signature` of the node.
        inputs: the layout of every tensor input, in the order of `node.taken`; available.
        outputs: the layout of every output, in the order of `node.made`.
        choice: the `Choice`, with the mesh axes that shard every factor.
        algorithm: name of the distributed algorithm that runs instead of the operator, or None.
        cut_axes: the mesh axes over which the algorithm communicates, major to minor.
        device_model: the `DeviceModel` by which the redistributions of the algorithm are planned.
    """

    node: object
    signature: object
    inputs: tuple
    outputs: tuple
    choice: object
    algorithm: str | None = None
    cut_axes: tuple = ()
    device_model: object = None

    @property
    def axes_of(self):
        """For every factor the mesh axes that shard it."""
        return self.choice.axes_of

    @cached_property
    def local_call(self):
        """The arguments of a rank's call, `(args, kwargs)`: those of the node, or those that its signature gives."""
        args, kwargs, algorithm = self.node.args, self.node.kwargs, self.algorithm
        call = self.signature.local.localized(args, kwargs, self.local_shapes, algorithm is not None)
        is_same = algorithm is None and (*call[0], *call[1].values()) == (*args, *kwargs.values())
        return (args, kwargs) if is_same else call


@dataclass(frozen=True, eq=False)
class CallPlan(_NodePlan):
    """How another Cell is called.

    Attributes:
        node: the `CallNode`.
        inputs: the layout of every tensor argument, in the order of `node.taken`.
        outputs: the layout of every result, in the order of `node.made`.
        plan: the called Cell's `CellPlan`, the same object for identical calls (its `graph` is that of the first
            call); None for a Cell with a `bprop` of its own, which runs unchanged on whole tensors.
        lifted: pairs (Value of the calling plan, Layout) for the callee's `lifted`, in order.
    """

    node: object
    inputs: tuple
    outputs: tuple
    plan: "CellPlan | None"
    lifted: tuple = ()

    @property
    def is_part(self):
        """Whether the function called is not another Cell, but a part of the calling one (see `partition`)."""
        return self.node.child == ""

    @cached_property
    def passed(self):
        """Triples (callee's Value, caller's Value, Layout) of all tensors that a plan is called with, each once."""
        layouts = dict(self.consumed)
        arguments = [(inner, outer, layouts[outer]) for inner, outer in match_arguments(self.node).items()]
        pairs = zip(self.plan.lifted, self.lifted, strict=True)
        return arguments + [(inner, outer, layout) for (inner, _), (outer, layout) in pairs]


@dataclass(frozen=True, eq=False)
class CellPlan:
    """The plan of one call of one Cell.

    Attributes:
        graph: the `CellGraph`; of identical calls that of the first.
        mesh: the mesh of all layouts.
        layouts: number of every Value of the graph -> the layout in which the tensor is first available: arguments as
            the caller passes them, parameters as stored, constants and results as produced.
        instructions: `Redistribution`s, `OperatorPlan`s and `CallPlan`s, in order.
        results: the layout of every Value in `graph.result`, in order; each is available at the end.
        lifted: pairs (Value of this graph, Layout) that the caller passes besides the arguments: a parameter that
            several Cells use after a redistribution, which runs once above them, or a free variable.
        gradients: numbers of the Values that depend on a trainable parameter.
        keepers: instruction -> the `Keeper` of its results; other instructions save theirs as usual.
        takes_weights: whether the generated function takes its parameters, and those of its callees, as arguments.
        compiled: `"once"` for a function that is compiled by itself (see `partition`), `"again"` where that function
            also runs again in the backward pass; else None.
        device_model: the `DeviceModel` by whose prices the layouts were chosen.
        price: the `Price` of a step of the called Cell, before redistributions are shared.
        kept: the mesh axes over which declared cuts come before prices: of the batch, and of weights.
    """

    graph: object
    mesh: object
    layouts: dict
    instructions: tuple
    results: tuple
    lifted: tuple = ()
    gradients: frozenset = field(default=frozenset())
    keepers: dict = field(default_factory=dict)
    takes_weights: bool = False
    compiled: str | None = None
    device_model: object = None
    price: object = None
    kept: tuple = ((), ())

    @property
    def redistributions(self):
        """The redistributions of this plan alone."""
        return tuple(entry for entry in self.instructions if isinstance(entry, Redistribution))

    @property
    def calls(self):
        """The `CallPlan`s of this plan alone."""
        return tuple(entry for entry in self.instructions if isinstance(entry, CallPlan))

    @cached_property
    def returned(self):
        """Pairs (Value, Layout) of the results."""
        return tuple(zip(tree_leaves(self.graph.result), self.results, strict=True))

    def walk(self):
        """`(path, CellPlan)` of this plan and of every call below, in order; a shared plan comes once for each call."""
        yield "", self
        for place in _walk(self, (), ""):
            if place.entry.plan is not None:
                yield place.called_path, place.entry.plan


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction of a program as it runs. Equal layers share a `CellPlan`; their instructions differ in the key.

    Attributes:
        key: the index of every call that leads to the instruction, among the `instructions` of its plan, and the
            instruction's own index.
        path: of the Cell whose `construct` contains the instruction; "" for the root.
        plan: the `CellPlan` that contains the instruction.
        entry: an `OperatorPlan`, a `Redistribution` or a `CallPlan`.
    """

    key: tuple
    path: str
    plan: object
    entry: object

    @property
    def called_path(self):
        """The path of the Cell that a `CallPlan` calls."""
        node = self.entry.node
        return node.graph.path if node.child is None else joined_path(self.path, node.child)


def _walk(plan, before, path):
    """All `Instruction`s in order, a call before those of the called Cell."""
    for index, entry in enumerate(plan.instructions):
        place = Instruction((*before, index), path, plan, entry)
        yield place
        if entry.plan is not None:
            yield from _walk(entry.plan, place.key, place.called_path)


def operators_in_order(plan):
    """All `Instruction`s of a program in the order of execution, without calls of Cells that have a plan."""
    return [place for place in _walk(plan, (), "") if place.entry.plan is None]


def called_cells(plan):
    """`((), "")` of the root, and `(key, path)` of every call of a Cell in order; keys as of `Instruction`."""
    return [((), "")] + [(at.key, at.called_path) for at in _walk(plan, (), "") if isinstance(at.entry, CallPlan)]


def by_call(pairs):
    """Pairs (key of an instruction, anything) -> index of each key's first call -> the same with the keys from there.

    An instruction of the plan itself has the key `()` there; the plan's own key `()` is left out.
    """
    found = {}
    for (index, *below), given in (pair for pair in pairs if pair[0]):
        found.setdefault(index, {})[tuple(below)] = given
    return found


def joined_path(path, inner):
    """The path of the Cell or parameter `inner`, relative to the Cell at `path`; both may be empty."""
    return f"{path}.{inner}" if path and inner else path or inner


def captured_graph(graph):
    """The graph of a `CellPlan` without parameters and free variables that only callees use."""
    used = {value.id for value in tree_leaves([*((node.args, node.kwargs) for node in graph.nodes), graph.result])}
    taken = {part: getattr(graph, part) for part in ("parameters", "free_variables")}
    return replace(graph, **{part: tuple(use for use in uses if use.value.id in used) for part, uses in taken.items()})


def called_graphs(plan, graph):
    """Pairs (`CallPlan`, `CellGraph`): every call in a plan, with its graph in one of the calls that share the plan.

    Args:
        graph: the `CellGraph` of the sharing call.
    """
    places = {id(node): place for place, node in enumerate(plan.graph.nodes)}
    for call in plan.calls:
        if call.is_part:
            yield call, _graph_of_part(plan, graph, call.node.graph, places)
        else:
            yield call, graph.nodes[places[id(call.node)]].graph


def walk_graphs(plan, graph):
    """`(CellPlan, CellGraph)` of a call and all below that have a plan, in order; arguments as of `called_graphs`."""
    yield plan, graph
    for call, inner in called_graphs(plan, graph):
        if call.plan is not None:
            yield from walk_graphs(call.plan, inner)


def _graph_of_part(plan, graph, part, places):
    """The graph of a part (see `partition`) in another call that shares the plan."""
    numbers = [plan.graph.parameters.index(use) for use in part.parameters]
    uses = [replace(plan.graph.parameters[n], path=parameter_path(plan, graph, n)) for n in numbers]
    nodes = tuple(graph.nodes[places[id(node)]] for node in part.nodes)
    return replace(part, path=graph.path, call=graph.call, nodes=nodes, parameters=tuple(uses))


def parameter_path(plan, graph, number):
    """The path of a parameter of a plan, in one of the calls that share the plan."""
    if number < len(graph.parameters):
        return graph.parameters[number].path
    own = plan.graph.parameters[: len(graph.parameters)]  # behind them are those that are redistributed for callees
    names = replace(plan.graph, parameters=own).uses.parameters
    return list(graph.uses.parameters)[list(names).index(plan.graph.parameters[number].path)]
