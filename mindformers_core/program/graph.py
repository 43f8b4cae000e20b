"""The result of `capture`, as plain data: one graph for every call of a Cell. Pure Python, picklable, printable.

A `CellGraph` is in static single assignment form: every tensor is a `Value`, numbered within its graph, and every node
produces new Values. Arguments and results of calls are pytrees of Values (see `structure.py`).
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mindformers_core.program.structure import Node, Value, canonical, described, shown, shown_arguments, tree_leaves


def cell_label(path, cell):
    """The label of a Cell in errors."""
    return class_label(path, type(cell).__name__)


def class_label(path, class_name):
    """The label in errors of a Cell of this class."""
    return f"Cell '{path}' ({class_name})" if path else f"the root Cell ({class_name})"


@dataclass(frozen=True)
class PrimitiveUse:
    """A primitive with attributes, as it was called: `module.name(**attributes)(*args[:inputs])` calls it again.

    Attributes:
        module: of its class.
        name: of its class.
        attributes: the constructor's arguments, by name.
        inputs: the number of the node's arguments that the call takes; the others repeat attributes.
    """

    module: str
    name: str
    attributes: dict
    inputs: int


@dataclass(frozen=True)
class OperatorNode(Node):
    """A call of one operator.

    Attributes:
        operator: its name, that of its rule in `mindformers_core.operators`.
        kind: how it was called, which determines `args`: `"primitive"` (see `PrimitiveUse`), `"function"` (the inputs
            of the operator, then its attributes) or `"method"` (of a tensor, as in the user's code: `x.view(4, 2)`).
        args, kwargs: pytrees.
        outputs: a Value, or a tuple of Values.
        primitive: a `PrimitiveUse` where kind is `"primitive"`, else None.
        attribute: name of the primitive among the attributes of its Cell (`"matmul"` for `self.matmul(x, w)`), or None.
        source: `file:line` of the user's code; None for code outside a file.
    """

    operator: str
    kind: str
    args: tuple
    kwargs: dict
    outputs: object
    primitive: PrimitiveUse | None
    attribute: str | None
    source: str | None

    @property
    def constant(self):
        """Whether all results depend on constants only."""
        return all(value.constant for value in self.made)

    def __str__(self):
        mark = "  (constant)" if self.constant else ""
        named = f"{self.attribute}: " if self.attribute else ""
        attributes = self.primitive.attributes if self.primitive else None
        call = f"{named}{self.operator}({shown_arguments(self.args, self.kwargs)})"
        call += f" with {shown(attributes)}" if attributes else ""
        return f"{described(self.outputs)} = {call}{mark}  # {self.source}"


@dataclass(frozen=True)
class CallNode(Node):
    """A call of another Cell.

    Attributes:
        child: path of the called Cell from the calling one (`"mlp"`, `"layers.0"`); None for a Cell that isn't below.
        args, kwargs: pytrees of the caller's Values.
        outputs: pytree of new Values of the caller.
        graph: the `CellGraph` of this call.
        source: `file:line` of the user's code; None for code outside a file.
    """

    child: str | None
    args: tuple
    kwargs: dict
    outputs: object
    graph: "CellGraph"
    source: str | None

    def __str__(self):
        called = f"self.{self.child}" if self.child is not None else f"<{self.graph.path}>"
        return f"{described(self.outputs)} = {called}({shown_arguments(self.args, self.kwargs)})  # {self.source}"


def match_arguments(node):
    """The callee's argument Value -> the caller's Value, for a `CallNode`; a tensor that is passed twice comes once."""
    arguments, named = node.graph.arguments, node.kwargs
    by_position = [structure for name, structure in arguments.items() if name not in named]
    further = named.keys() - arguments.keys()
    collected = by_position.pop() if further else {}  # by `**kwargs`, which is always the last argument
    assert collected.keys() == further, (collected, named)
    pairs = [(structure, named[name]) for name, structure in (arguments | collected).items() if name in named]
    pairs.append((by_position, node.args))
    return {inner: outer for pair in pairs for inner, outer in zip(*map(tree_leaves, pair), strict=True)}


@dataclass(frozen=True)
class ParameterUse:
    """A parameter that a Cell reads.

    Attributes:
        value: its Value in this graph.
        path: from the root; of a shared parameter the first path at which it is found.
        local: path from this Cell: `"weight"` or `"model.embed_tokens.weight"`; None for one outside this Cell.
        trainable: whether it requires a gradient.
        part_sizes: of a padded one, see `padding`.
    """

    value: Value
    path: str
    local: str | None
    trainable: bool
    part_sizes: tuple = ()


@dataclass(eq=False)
class Constant:
    """A plain tensor among the inputs of traced operators: a rotary table, a mask, a number.

    Attributes:
        value: its Value in this graph.
        array: the contents, a NumPy array (bfloat16 as float32); None after `forget`.
        path, local: of the attribute with the tensor, from the root (`"model.table"`) and from this Cell; or None.
    """

    value: Value
    array: np.ndarray
    path: str | None
    local: str | None

    @cached_property
    def digest(self):
        """Hash of the contents."""
        return hashlib.sha256(np.ascontiguousarray(self.array).view(np.uint8)).hexdigest()

    def forget(self):
        """Drop the contents, of which the digest remains: for plans that no program is made of."""
        assert self.digest
        self.array = None


@dataclass(frozen=True)
class FreeVariable:
    """A tensor that another Cell's call produced, and that this call uses although it is no argument.

    Attributes:
        value: its Value in this graph.
        path, call, id: the producing Cell, the call (`CellGraph.call`), and the number of the Value there.
    """

    value: Value
    path: str
    call: int
    id: int


@dataclass(frozen=True)
class KeptAttribute:
    """Tensors that a call leaves in an attribute of a Cell.

    Attributes:
        local, path: of the Cell, from the one that is called ("." for itself, None outside); and from the root.
        name: of the attribute.
        value: pytree: the last that this call sets.
        source: `file:line` of the user's code.
    """

    local: str | None
    path: str
    name: str
    value: object
    source: str | None


@dataclass(frozen=True, eq=False)
class Uses:
    """Parameters and free variables that a call uses, itself or in called Cells, in order of first use.

    Attributes:
        parameters: path from the root -> `ParameterUse`, whose `local` is the path from this Cell.
        free_variables: (call, number of the Value there) -> `FreeVariable`; only Values of callers.
        places: for every single use its place among all names; a free variable that is a Value of this call or of one
            below has `~number` of the Value. Identical calls share equal Values in equal places.
    """

    parameters: dict
    free_variables: dict
    places: tuple

    def in_place_of(self, other):
        """Name in `other`, the `Uses` of an identical call -> the corresponding name here."""
        theirs, ours = ((*uses.free_variables, *uses.parameters) for uses in (other, self))
        return dict(zip(theirs, ours, strict=True))


@dataclass(frozen=True, eq=False)
class CellGraph:
    """The trace of one call of one Cell.

    Attributes:
        path: of the Cell from the root; "" for the root.
        class_name: `module.Class` of the Cell.
        call: number of this call in the capture, from 0, in the order in which calls begin.
        training: the Cell's flag.
        custom_gradient: whether the Cell defines `bprop`.
        arguments: name of every argument that was passed to `construct` -> pytree; `*args` as a tuple and
            `**kwargs` as a dict.
        nodes: `OperatorNode`s and `CallNode`s, in order.
        result: pytree.
        parameters, constants, free_variables: `ParameterUse`s, `Constant`s, `FreeVariable`s, in order of first use.
        kept: `KeptAttribute`s.
    """

    path: str
    class_name: str
    call: int
    training: bool
    custom_gradient: bool
    arguments: dict
    nodes: tuple
    result: object
    parameters: tuple = ()
    constants: tuple = ()
    free_variables: tuple = ()
    kept: tuple = ()

    @property
    def label(self):
        """The label of the Cell in errors."""
        return class_label(self.path, self.class_name.rpartition(".")[2])

    def calls(self):
        """The graphs of this call and all below, in order."""
        yield self
        for node in self.nodes:
            if isinstance(node, CallNode):
                yield from node.graph.calls()

    @cached_property
    def names(self):
        """Number of a Value -> the path of the parameter, or `(call, number)` of the free variable, that it is."""
        names = {use.value.id: use.path for use in self.parameters}
        return names | {use.value.id: (use.call, use.id) for use in self.free_variables}

    @cached_property
    def uses(self):
        """The `Uses` of the call."""
        parameters = {use.path: use for use in self.parameters}
        free = {(use.call, use.id): use for use in self.free_variables}
        order = list(self.names.values())
        for node in self.nodes:
            if not isinstance(node, CallNode):
                continue
            inner = node.graph.uses
            for path, use in inner.parameters.items():
                below = node.child is not None and use.local is not None
                parameters.setdefault(path, replace(use, local=f"{node.child}.{use.local}" if below else None))
            for name, use in inner.free_variables.items():
                if use.call != self.call:
                    free.setdefault(name, use)
            names = (*inner.parameters, *inner.free_variables)
            order += [place if place < 0 else names[place] for place in inner.places]
        numbers = {name: number for number, name in enumerate((*parameters, *free))}
        numbers = {name: ~name[1] for name in order if isinstance(name, tuple)} | numbers
        return Uses(parameters, free, tuple(numbers.get(name, name) for name in order))

    @cached_property
    def key(self):
        """A string that identical calls share, the same in every process, so that they share generated code.

        The key contains class, training flag, argument structure, shapes, dtypes, operators with their arguments and
        attributes, parameters by their paths from this Cell, contents of constants, and calls of other Cells. It
        doesn't contain the Cell's path, names of Values, source lines, or the producers of free variables.
        """
        parts = (
            self.class_name,
            self.training,
            self.custom_gradient,
            canonical(self.arguments),
            tuple(map(_node_key, self.nodes)),
            canonical(self.result),
            tuple((canonical(use.value), use.local or f"/{use.path}", use.trainable) for use in self.parameters),
            tuple((canonical(constant.value), constant.local, constant.digest) for constant in self.constants),
            tuple(canonical(use.value) for use in self.free_variables),
            tuple((each.local or f"/{each.path}", each.name, canonical(each.value)) for each in self.kept),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def lines(self):
        """The contents of the key as readable lines, without the contents of called Cells."""
        lines = []
        for name, structure in self.arguments.items():
            values = ", ".join(value.described for value in tree_leaves(structure))
            lines.append(f"argument {name} = {shown(structure)}{'  # ' if values else ''}{values}")
        for use in self.parameters:
            frozen = "" if use.trainable else "  # not trained"
            lines.append(f"parameter {use.value.described} = {use.local or f'<{use.path}>'}{frozen}")
        lines += [f"constant {use.value.described} = {use.local or ''} {use.digest[:12]}" for use in self.constants]
        lines += [f"outer {use.value.described}" for use in self.free_variables]
        lines += [*map(str, self.nodes), *(f"self.{each.name} = {shown(each.value)}" for each in self.kept)]
        return [*lines, f"return {shown(self.result)}"]

    def __str__(self):
        return "\n\n".join(_listing(graph) for graph in self.calls())


def _node_key(node):
    if isinstance(node, CallNode):
        called = node.child if node.child is not None else f"/{node.graph.path}"
        return ("call", called, canonical(node.args), canonical(node.kwargs), canonical(node.outputs), node.graph.key)
    primitive = node.primitive and (node.primitive.module, node.primitive.name, canonical(node.primitive.attributes))
    called = (node.operator, node.kind, primitive, node.attribute)
    return (*called, canonical(node.args), canonical(node.kwargs), canonical(node.outputs))


def _listing(graph):
    """The text of one call's graph."""
    mode = "training" if graph.training else "evaluation"
    head = f"{graph.path or '<root>'} ({graph.class_name}, call {graph.call}, {mode})"
    return "\n  ".join([head, *graph.lines()])
