"""One call of a Cell during a capture: the growing graph, and the Values of its tensors."""

from collections import namedtuple
from inspect import Parameter as Argument, signature

from mindspore import Parameter, Tensor, dtype as mstype, ops

from mindformers_core.capture.traced import Traced
from mindformers_core.dtypes import dtype_name
from mindformers_core.lowering.aliases import is_view, written_at
from mindformers_core.lowering.in_place import is_in_place
from mindformers_core.mindspore_private import Type
from mindformers_core.operators.signature import is_float
from mindformers_core.padding import narrowed
from mindformers_core.program.graph import CellGraph, Constant, FreeVariable, KeptAttribute, ParameterUse
from mindformers_core.program.structure import DType, Value, call_signature, tree_leaves, tree_map
from mindformers_core.scopes import errors_at, replaced

Made = namedtuple("Made", "call value")  # the result of a node, or an argument of the root
Held = namedtuple("Held", "path")  # a parameter or constant at a path of the tree, or a tensor from elsewhere (None)


class OpenCall:
    """One call of a Cell, while it runs.

    Args:
        tree: the `CapturedTree`.
        cell: the called Cell.
        number: of the call.
        construct, args, kwargs: the bound method, and its arguments.
        caller: the `OpenCall` that the arguments come from, None for the root.

    Attributes:
        nodes, arguments: of the graph so far.
        cast: the dtype to which its operators cast floats, by `Cell.to_float`, or None.
        set_attributes: (id of a Cell, name) -> (the Cell, what its attribute was set to, `file:line`).
    """

    def __init__(self, tree, cell, number, construct, args, kwargs, caller):
        self.tree, self.cell, self.number = tree, cell, number
        self.nodes, self.arguments, self.set_attributes = [], {}, {}
        self.cast = tree.cast_of(cell) or getattr(caller, "cast", None)
        self._count = 0
        self._known = {}  # (id, entry) of a traced tensor from elsewhere -> (the tensor, its Value here)
        self._parameters, self._constants, self._outer = [], [], []
        with errors_at(f"{tree.label(cell)}, construct(): "):
            bound = call_signature(construct).bind(*args, **kwargs)
        for name, structure in bound.arguments.items():
            self.arguments[name] = tree_map(lambda leaf, name=name: self._argument(leaf, name, caller), structure)

    def _argument(self, leaf, name, caller):
        if not isinstance(leaf, Traced):
            return plain_leaf(leaf)
        if (id(leaf), leaf.entry) not in self._known:
            value = self.new_value(leaf, name, caller is not None and caller.value_of(leaf).constant)
            if caller is None:
                leaf.entry = Made(self, value)
            self._known[id(leaf), leaf.entry] = leaf, value
        return self._known[id(leaf), leaf.entry][1]

    def new_value(self, tensor, hint, constant=False):
        """The next Value."""
        self._count += 1
        return Value(self._count - 1, tuple(tensor.shape), dtype_name(tensor.dtype), hint, constant)

    def leaf(self, leaf):
        """The leaf of the graph for a leaf of a structure."""
        return self.value_of(leaf) if isinstance(leaf, Traced) else plain_leaf(leaf)

    def value_of(self, tensor):
        """The Value of a traced tensor in this graph; a tensor from elsewhere is listed as free variable, parameter or
        constant."""
        entry, where = tensor.entry, written_at(tensor)
        if where is not None:
            raise tensor.recorder.error(
                f"a tensor, {tensor!r}, is used after one of the same memory, such as a view of it, was changed in "
                f"place, at {where}: take a copy before, y.copy(), or take the view again"
            )
        if type(entry) is Made and entry.call is self:
            return entry.value
        known = self._known.get((id(tensor), entry))
        if known is None:
            known = self._known[id(tensor), entry] = tensor, self._import(tensor, entry)
        return known[1]

    def _import(self, tensor, entry):
        if "stored" in vars(tensor):
            with replaced(self, cast=None):
                return self.value_of(narrowed(tensor.stored, tensor.part_sizes, ops))
        if type(entry) is Made:
            value = self.new_value(tensor, entry.value.hint, entry.value.constant)
            self._outer.append(FreeVariable(value, self.tree.path(entry.call.cell), entry.call.number, entry.value.id))
        elif isinstance(tensor.original, Parameter):
            if entry.path is None:
                raise tensor.recorder.stray(tensor.original)
            known = next((use.value for use in self._parameters if use.path == entry.path), None)
            if known is not None:
                return known
            local = self.tree.local_path(self.cell, tensor.original)
            value = self.new_value(tensor, entry.path.rpartition(".")[2])
            sizes = getattr(tensor.original, "part_sizes", ())
            self._parameters.append(ParameterUse(value, entry.path, local, tensor.original.requires_grad, sizes))
        else:
            path = entry.path
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
        seen = vars(tensor).get("seen")
        return contents_of(plain).copy() if seen is None else seen  # a copy, for the tensor may change

    def casted(self, name, args, kwargs):
        """The arguments of an operator in a Cell with `to_float`: floats are cast, but where memory is handed on."""
        if self.cast is None or is_in_place(name) or is_view(name, args, kwargs):
            return args, kwargs

        def leaf(each):
            is_other = isinstance(each, Tensor) and is_float(dtype_name(each.dtype)) and each.dtype != self.cast
            return ops.cast(each, self.cast) if is_other else each

        return tree_map(leaf, (tuple(args), kwargs))

    def finish(self, result):
        """The finished graph."""
        structure = tree_map(self.leaf, result)
        computed = [(name, entry) for (_, name), entry in self.set_attributes.items() if computed_in(entry[1])]
        kind = self.tree.kind(self.cell)
        return CellGraph(
            path=self.tree.path(self.cell),
            class_name=f"{kind.__module__}.{kind.__qualname__}",
            call=self.number,
            training=self.cell.training,
            custom_gradient=hasattr(kind, "bprop"),
            arguments=self.arguments,
            nodes=tuple(self.nodes),
            result=structure,
            parameters=tuple(self._parameters),
            constants=tuple(self._constants),
            free_variables=tuple(self._outer),
            kept=tuple(self._kept(name, *entry) for name, entry in computed),
        )

    def _kept(self, name, cell, value, source):
        """The `KeptAttribute` of tensors that `construct` has set an attribute to."""
        local = "." if cell is self.cell else self.tree.local_path(self.cell, cell)
        return KeptAttribute(local, self.tree.path(cell), name, tree_map(self.leaf, value), source)


def computed_in(structure):
    """Whether there are tensors in a structure that depend on arguments or Parameters."""
    return any(tensor.original is None and tensor.deferred is None for tensor in tree_leaves(structure, Traced))


def contents_of(tensor):
    """The array of a plain tensor, often its own memory; bfloat16 as float32."""
    return (tensor.astype(mstype.float32) if tensor.dtype == mstype.bfloat16 else tensor).asnumpy()


def plain_leaf(leaf):
    """The leaf of a graph for a leaf that is no tensor."""
    return DType(dtype_name(leaf)) if isinstance(leaf, Type) else leaf


def count_inputs(primitive, args):
    """How many of a classic primitive's arguments its call takes: its class may have put its attributes behind them."""
    if "__call__" not in vars(type(primitive)):
        return len(args)
    parameters = signature(type(primitive).__call__).parameters.values()
    if not any(parameter.kind is Argument.VAR_POSITIONAL for parameter in parameters):
        return min(len(args), len(parameters) - 1)
    given = max((place + 1 for place, argument in enumerate(args) if tree_leaves(argument, Tensor)), default=0)
    return given if len(args) - given == len(primitive.init_attrs) else len(args)
