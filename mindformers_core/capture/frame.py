"""One call of a Cell while it is captured: the graph that grows, and the names of what it meets."""

from collections import namedtuple

from mindspore import Parameter
from mindspore import dtype as mstype
from mindspore._c_expression import typing

from mindformers_core.capture.traced import Traced
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.program.graph import CellGraph, Constant, FreeVariable, ParameterUse
from mindformers_core.program.structure import DType, Value, tree_map

__all__ = ["Frame", "Held", "Loose", "Made", "plain_leaf"]

Made = namedtuple("Made", "frame value")  # the result of a node, or an argument of the root
Held = namedtuple("Held", "path")  # a parameter or constant that the tree keeps at a path
Loose = namedtuple("Loose", "")  # a plain tensor that comes along


class Frame:
    """One call of a Cell, while it runs.

    Attributes:
        cell, call: which.
        nodes: so far.
    """

    def __init__(self, tree, cell, call):
        self.tree = tree
        self.cell = cell
        self.call = call
        self.nodes = []
        self.arguments = {}
        self._count = 0
        self._known = {}  # id -> (traced tensor from elsewhere, its Value here)
        self._parameters, self._constants, self._outer = [], [], []

    def take_arguments(self, construct, args, kwargs, caller):
        """Bind the arguments, which come from the frame `caller` (None for the root), to their names."""
        try:
            bound = self.tree.signature(construct).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.tree.label(self.cell)}, construct(): {error}") from None
        for name, structure in bound.arguments.items():
            self.arguments[name] = tree_map(lambda leaf, name=name: self._argument(leaf, name, caller), structure)

    def _argument(self, leaf, name, caller):
        if not isinstance(leaf, Traced):
            return plain_leaf(leaf)
        if id(leaf) not in self._known:
            value = self.new_value(leaf, name, caller is not None and caller.value_of(leaf).constant)
            self._known[id(leaf)] = leaf, value
            if caller is None:
                leaf.entry = Made(self, value)
        return self._known[id(leaf)][1]

    def new_value(self, tensor, hint, constant=False):
        """The next Value."""
        self._count += 1
        return Value(self._count - 1, tuple(tensor.shape), dtype_name(tensor.dtype), hint, constant)

    def leaf(self, leaf):
        """A leaf of a structure as the graph has it."""
        return self.value_of(leaf) if isinstance(leaf, Traced) else plain_leaf(leaf)

    def value_of(self, tensor):
        """The Value of a traced tensor in this graph; one from elsewhere is listed as what it is."""
        entry = tensor.entry
        if type(entry) is Made and entry.frame is self:
            return entry.value
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = tensor, self._import(tensor, entry)
        return known[1]

    def _import(self, tensor, entry):
        if type(entry) is Made:
            value = self.new_value(tensor, entry.value.hint, entry.value.constant)
            self._outer.append(FreeVariable(value, self.tree.path(entry.frame.cell), entry.frame.call, entry.value.id))
        elif isinstance(tensor.original, Parameter):
            if entry.path is None:
                raise tensor.recorder.stray(tensor.original)
            local = self.tree.local_path(self.cell, tensor.original)
            value = self.new_value(tensor, entry.path.rpartition(".")[2])
            self._parameters.append(ParameterUse(value, entry.path, local, tensor.original.requires_grad))
        else:
            path = entry.path if type(entry) is Held else None
            value = self.new_value(tensor, path.rpartition(".")[2] if path else "constant", constant=True)
            self._constants.append(Constant(value, self._contents(tensor, path), path, path and self._local(path)))
        return value

    def _local(self, path):
        own = self.tree.path(self.cell)
        if not own:
            return path
        return path.removeprefix(f"{own}.") if path.startswith(f"{own}.") else None

    def _contents(self, tensor, path):
        plain = tensor.original
        if plain.is_meta:
            named = f"'{path}'" if path else f"of shape {tuple(plain.shape)}"
            raise tensor.recorder.error(
                f"the plain tensor {named} was made on the meta device and has no values: make it outside of "
                "DeviceCtx('meta'), inside construct, or as a Parameter (a copy by Tensor(x) is such a one: use x)"
            )
        array = (plain.astype(mstype.float32) if plain.dtype == mstype.bfloat16 else plain).asnumpy()
        return array if path is None else array.copy()  # what a tree keeps may change

    def finish(self, result):
        """The finished graph."""
        structure = tree_map(self.leaf, result)
        kind = self.tree.kind(self.cell)
        return CellGraph(
            path=self.tree.path(self.cell),
            class_name=f"{kind.__module__}.{kind.__qualname__}",
            call=self.call,
            training=self.cell.training,
            custom_gradient=hasattr(kind, "bprop"),
            arguments=self.arguments,
            nodes=tuple(self.nodes),
            result=structure,
            parameters=tuple(self._parameters),
            constants=tuple(self._constants),
            free_variables=tuple(self._outer),
        )


def plain_leaf(leaf):
    """What a graph has in the place of something that is no tensor."""
    return DType(dtype_name(leaf)) if isinstance(leaf, typing.Type) else leaf
