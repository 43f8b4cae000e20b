"""What `capture` sees, as plain data: one graph for every call of a Cell. Pure Python, picklable, printable.

A `CellGraph` is in static single assignment form: every tensor is a `Value`, numbered within its graph, and every node
makes new ones. What calls take and give are structures of them (see `structure.py`).
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mindformers_core.program.structure import (
    Value,
    canonical,
    described,
    shown,
    shown_arguments,
    tree_leaves,
)

__all__ = [
    "CallNode",
    "CellGraph",
    "Constant",
    "OperatorNode",
    "FreeVariable",
    "ParameterUse",
    "PrimitiveUse",
    "structure_key",
]


@dataclass(frozen=True)
class PrimitiveUse:
    """A primitive with attributes, as it was called: `module.name(**attributes)(*args[:inputs])` calls it again.

    Attributes:
        module: where its class lives.
        name: its class.
        attributes: what the constructor was given, by name.
        inputs: how many of the node's arguments the call takes; the others are attributes once more.
    """

    module: str
    name: str
    attributes: dict
    inputs: int


@dataclass(frozen=True)
class OperatorNode:
    """A call of one operator.

    Attributes:
        operator: its name, that of its rule in `mindformers_core.operators`.
        kind: how it was called, and so how `args` are to be read: `"primitive"` (see `PrimitiveUse`), `"function"` (the
            operator's inputs, then its attributes) or `"method"` (of a tensor, as the user wrote them: `x.view(4, 2)`).
        args, kwargs: structures.
        outputs: structure: a Value, or a tuple of them.
        primitive: a `PrimitiveUse` where kind is `"primitive"`, else None.
        attribute: name of the primitive among the attributes of its Cell (`"matmul"` for `self.matmul(x, w)`), or None.
        source: `file:line` of the user's code; None where that is in no file.
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
        """Whether the results depend on constants only."""
        return all(value.constant for value in tree_leaves(self.outputs))

    def __str__(self):
        mark = "  (constant)" if self.constant else ""
        named = f"{self.attribute}: " if self.attribute else ""
        attributes = self.primitive.attributes if self.primitive else None
        call = f"{named}{self.operator}({shown_arguments(self.args, self.kwargs)})"
        call += f" with {shown(attributes)}" if attributes else ""
        return f"{described(self.outputs)} = {call}{mark}  # {self.source}"


@dataclass(frozen=True)
class CallNode:
    """A call of another Cell.

    Attributes:
        child: path of the called Cell, seen from the calling one (`"mlp"`, `"layers.0"`); None if it isn't below it.
        args, kwargs: structures of the caller's Values.
        outputs: structure of new Values of the caller.
        graph: the `CellGraph` of this call.
        source: `file:line` of the user's code; None where that is in no file.
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


@dataclass(frozen=True)
class ParameterUse:
    """A parameter that a Cell reads.

    Attributes:
        value: its Value in this graph.
        path: its path from the root. A shared parameter has one: the first that finds it.
        local: its path from this Cell, as `"weight"` or `"model.embed_tokens.weight"`; None if it isn't in or below it.
        trainable: whether it requires a gradient.
    """

    value: Value
    path: str
    local: str | None
    trainable: bool


@dataclass(frozen=True, eq=False)
class Constant:
    """A plain tensor that meets traced ones: a rotary table, a mask, a number.

    Attributes:
        value: its Value in this graph.
        array: its contents, a NumPy array (bfloat16 as float32).
        path, local: where the tree keeps it, from the root (`"model.table"`) and from this Cell; or None.
    """

    value: Value
    array: np.ndarray
    path: str | None
    local: str | None

    @cached_property
    def digest(self):
        """Hash of the contents."""
        return hashlib.sha256(np.ascontiguousarray(self.array).view(np.uint8)).hexdigest()


@dataclass(frozen=True)
class FreeVariable:
    """A tensor that another Cell's call made, and that this one uses without having been passed it.

    Attributes:
        value: its Value in this graph.
        path, call, id: the Cell that made it, which call (`CellGraph.call`), and the number of its Value there.
    """

    value: Value
    path: str
    call: int
    id: int


@dataclass(frozen=True, eq=False)
class CellGraph:
    """What one call of one Cell does.

    Attributes:
        path: of the Cell from the root; "" for the root.
        class_name: `module.Class` of the Cell.
        call: number of this call among all of the capture, from 0, in the order in which they begin.
        training: the Cell's flag.
        custom_gradient: whether the Cell defines `bprop`.
        arguments: name of every argument that was passed to `construct` -> structure; `*args` as a tuple and
            `**kwargs` as a dict.
        nodes: `OperatorNode`s and `CallNode`s, in order.
        result: structure.
        parameters, constants, outer: `ParameterUse`s, `Constant`s and `FreeVariable`s, in order of first use.
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
    outer: tuple = field(default=())

    def calls(self):
        """The graphs of all calls from here on, this one first, in order."""
        yield self
        for node in self.nodes:
            if isinstance(node, CallNode):
                yield from node.graph.calls()

    @cached_property
    def key(self):
        """See `structure_key`."""
        parts = (
            self.class_name,
            self.training,
            self.custom_gradient,
            canonical(self.arguments),
            tuple(map(_node_key, self.nodes)),
            canonical(self.result),
            tuple((canonical(use.value), use.local or f"/{use.path}", use.trainable) for use in self.parameters),
            tuple((canonical(constant.value), constant.local, constant.digest) for constant in self.constants),
            tuple(canonical(outer.value) for outer in self.outer),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def lines(self):
        """What its key is made of, as lines that a person can compare, save the contents of called Cells."""
        lines = []
        for name, structure in self.arguments.items():
            values = ", ".join(value.described for value in tree_leaves(structure))
            lines.append(f"argument {name} = {shown(structure)}{'  # ' if values else ''}{values}")
        for use in self.parameters:
            frozen = "" if use.trainable else "  # not trained"
            lines.append(f"parameter {use.value.described} = {use.local or f'<{use.path}>'}{frozen}")
        for constant in self.constants:
            lines.append(f"constant {constant.value.described} = {constant.local or ''} {constant.digest[:12]}")
        lines += [f"outer {use.value.described}" for use in self.outer]
        return [*lines, *map(str, self.nodes), f"return {shown(self.result)}"]

    def __str__(self):
        return "\n\n".join(_listing(graph) for graph in self.calls())


def structure_key(graph):
    """What tells a graph from others: equal for identical layers, so that generated code may be shared.

    It says nothing of where in the model the Cell is, of names of Values, of source lines, and of which Cell made an
    outer value. All else is in it: class, training flag, argument structure, shapes, dtypes, operators with their
    arguments and attributes, parameters by their paths from this Cell, contents of constants, and calls of other Cells.

    Returns:
        A string, the same in every process.
    """
    return graph.key


def _node_key(node):
    if isinstance(node, CallNode):
        called = node.child if node.child is not None else f"/{node.graph.path}"
        return ("call", called, canonical(node.args), canonical(node.kwargs), canonical(node.outputs), node.graph.key)
    primitive = node.primitive and (node.primitive.module, node.primitive.name, canonical(node.primitive.attributes))
    called = (node.operator, node.kind, primitive, node.attribute)
    return (*called, canonical(node.args), canonical(node.kwargs), canonical(node.outputs))


def _listing(graph):
    """The text of one call."""
    mode = "training" if graph.training else "evaluation"
    head = f"{graph.path or '<root>'} ({graph.class_name}, call {graph.call}, {mode})"
    return "\n  ".join([head, *graph.lines()])
