"""What the propagation pass decides, as plain data: a `CellPlan` for every distinct call of a Cell. Pure Python.

A plan is a list of instructions in the order of execution. A tensor is identified by its `Value` and its `Layout`:
the layout in which it arrives or is made, or one that a `Move` took it to earlier in the same frame.
"""

from dataclasses import dataclass, field, replace

from mindformers_core.layout import Layout
from mindformers_core.program.structure import tree_leaves

__all__ = [
    "CallPlan", "CellPlan", "Move", "OperatorPlan", "called_cells", "called_graphs", "called_path", "joined_path",
    "parameter_path",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Move:
    """One redistribution of one tensor, made once and shared by all who need it after.

    Attributes:
        value: the `Value` that moves, of the frame's graph.
        source, target: its layouts before and after.
        steps: the `Step`s of the cheapest plan between them; may be empty.
        reason: who asked first, for a reader: `"input 'x' of Cell 'mlp'"`, `"MatMul"`.
        gradient: whether a gradient flows back through it in training: a trainable parameter is behind the tensor.
            Where it is not, the backward collectives run only if the caller asks for the gradient of an input.
    """

    value: object
    source: Layout
    target: Layout
    steps: tuple
    reason: str
    gradient: bool

    @property
    def undivided(self):
        """Why a dim can't stay sharded, where its size doesn't divide; else an empty string."""
        return self.reason.partition(": ")[2]


@dataclass(frozen=True, eq=False)
class OperatorPlan:
    """How one operator is computed.

    Attributes:
        node: the `OperatorNode`.
        signature: its `Signature`.
        inputs: the layout of every tensor input, in the order of `tree_leaves((node.args, node.kwargs))`; available.
        outputs: the layout of every output, in the order of `tree_leaves(node.outputs)`.
        axes_of: for every factor the axes that cut it (see `Resolution`).
        algorithm: name of the distributed algorithm that runs in its place, or None.
        cut_axes: the axes that the algorithm bridges, major to minor.
    """

    node: object
    signature: object
    inputs: tuple
    outputs: tuple
    axes_of: dict
    algorithm: str | None = None
    cut_axes: tuple = ()

    @property
    def local_shapes(self):
        """The shape of a rank's part of every output."""
        values = tree_leaves(self.node.outputs)
        return [layout.local_shape(value.shape) for value, layout in zip(values, self.outputs, strict=True)]


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How another Cell is called.

    Attributes:
        node: the `CallNode`.
        inputs: the layout of every tensor that is passed, in the order of `tree_leaves((node.args, node.kwargs))`.
        outputs: the layout of every tensor that comes back, in the order of `tree_leaves(node.outputs)`.
        frame: the called Cell's `CellPlan`, the same object for identical calls (its `graph` is then that of the first
            one); None for a Cell with a `bprop` of its own, which runs as it is on whole tensors.
        lifted: pairs (Value of this frame, Layout) that fill the callee's `lifted`, in order.
    """

    node: object
    inputs: tuple
    outputs: tuple
    frame: "CellPlan | None"
    lifted: tuple = ()

    @property
    def is_part(self):
        """Whether it calls no other Cell, but a part of the one that it stands in (see `cut`)."""
        return self.node.child == ""


@dataclass(frozen=True, eq=False)
class CellPlan:
    """One call of one Cell.

    Attributes:
        graph: the `CellGraph`; of identical calls that of the first.
        mesh: the mesh of all layouts.
        layouts: number of every Value in the graph -> the layout in which it is first available: arguments as the
            caller passes them, parameters as they are stored, constants and results as they are made.
        instructions: `Move`s, `OperatorPlan`s and `CallPlan`s, in order.
        results: the layout of every Value in `graph.result`, in order; each is available at the end.
        lifted: pairs (Value of this graph, Layout) that the caller has to pass besides the arguments: a parameter that
            several Cells use in a moved form, moved once above them, or a tensor of another Cell's call.
        gradients: numbers of the Values that a trainable parameter is behind.
        keepers: instruction -> the `Keeper` by which what it makes is kept for the backward pass; others are as usual.
        takes_weights: whether the generated function takes its parameters, and those of what it calls, as arguments.
        compiled: of a function that is compiled by itself (see `cut`) `"once"`, or `"again"` where it also runs again
            in the backward pass; else None.
        cost_model: the `CostModel` by which the redistributions were chosen.
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
    cost_model: object = None

    @property
    def moves(self):
        """The redistributions of this frame alone."""
        return tuple(entry for entry in self.instructions if isinstance(entry, Move))

    @property
    def calls(self):
        """The `CallPlan`s of this frame."""
        return tuple(entry for entry in self.instructions if isinstance(entry, CallPlan))

    def walk(self, path=""):
        """`(path, frame)` of this frame and, call by call, of all below it; shared ones come once for each call."""
        yield path, self
        for call in self.calls:
            if call.frame is not None:
                yield from call.frame.walk(called_path(call, path))


def joined_path(path, inner):
    """The path of what lies at `inner` below the Cell at `path`; both may be empty."""
    return f"{path}.{inner}" if path and inner else path or inner


def called_cells(frame):
    """`(key, path)` of the root, `((), "")`, and of every call of a Cell, in the order of the calls.

    A key is the indices of the calls that lead there, among the `instructions` of each frame, and its own.
    """
    return [((), ""), *_calls_below(frame, (), "")]


def _calls_below(frame, before, path):
    for index, call in enumerate(frame.instructions):
        if isinstance(call, CallPlan):
            key, inner = (*before, index), called_path(call, path)
            yield key, inner
            if call.frame is not None:
                yield from _calls_below(call.frame, key, inner)


def called_path(call, path):
    """The path of the Cell that a call in the Cell at `path` calls."""
    child = call.node.child
    if child is None:
        return call.node.graph.path
    return joined_path(path, child)


def called_graphs(frame, graph):
    """Pairs (`CallPlan`, `CellGraph`): every call of a plan, with the graph of it in one of the calls that share it.

    Args:
        frame: the plan.
        graph: the `CellGraph` of that call.
    """
    places = {id(node): place for place, node in enumerate(frame.graph.nodes)}
    for call in frame.calls:
        if call.is_part:
            yield call, _graph_of_part(frame, graph, call.node.graph, places)
        else:
            yield call, graph.nodes[places[id(call.node)]].graph


def _graph_of_part(frame, graph, part, places):
    """The graph of a part of a Cell's instructions, in another call of such a Cell."""
    numbers = [frame.graph.parameters.index(use) for use in part.parameters]
    uses = [replace(frame.graph.parameters[n], path=parameter_path(frame, graph, n)) for n in numbers]
    nodes = tuple(graph.nodes[places[id(node)]] for node in part.nodes)
    return replace(part, path=graph.path, call=graph.call, nodes=nodes, parameters=tuple(uses))


def parameter_path(frame, graph, number):
    """The path of a parameter of a plan, in one of the calls that share the plan."""
    if number < len(graph.parameters):
        return graph.parameters[number].path
    use = frame.graph.parameters[number]  # moved here for calls further down
    return use.path if use.local is None else joined_path(graph.path, use.local)
