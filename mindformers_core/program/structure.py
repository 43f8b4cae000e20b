"""Pytrees: arguments and results of a Python call as plain data, tensors replaced by `Value`s. Pure Python.

A pytree is a tuple, list or dict of pytrees, or a leaf. Captured graphs consist of pytrees.
"""

from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from inspect import Parameter, signature


@dataclass(frozen=True)
class Value:
    """One tensor of a graph.

    Attributes:
        id: number within its graph, from 0, in the order of first appearance.
        shape: global shape.
        dtype: name, as `"float32"`.
        hint: a name for readers: of the argument or parameter, or of the operator that produces the tensor.
        constant: whether the tensor depends neither on arguments of the root nor on parameters.
    """

    id: int
    shape: tuple
    dtype: str
    hint: str
    constant: bool = False

    def __str__(self):
        return f"%{self.id}"

    @property
    def described(self):
        """The Value with dtype and shape, as `%3: float32[8, 16]`."""
        return f"%{self.id}: {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class DType:
    """A dtype among the arguments of a call, by name: `mindspore.float16` is `DType("float16")`."""

    name: str

    def __str__(self):
        return self.name


def call_signature(function):
    """The signature of a call. Of a decorated function it is the decorator's; where that has `*args` or `**kwargs`, the
    function's own, with `**kwargs` behind if the decorator takes any, which may keep some for itself."""
    outer = signature(function, follow_wrapped=False)
    kinds = {each.kind: each for each in outer.parameters.values()}
    if not {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} & kinds.keys():
        return outer
    inner = signature(function)
    own, any_name = list(inner.parameters.values()), kinds.get(Parameter.VAR_KEYWORD)
    takes_it = any_name is None or own[-1:] and own[-1].kind is Parameter.VAR_KEYWORD
    return inner if takes_it else inner.replace(parameters=[*own, any_name])


def tree_map(function, structure):
    """A pytree of the same structure, with `function` applied to every leaf."""
    if not isinstance(structure, (tuple, list, dict)):
        return function(structure)
    kind = type(structure)
    if isinstance(structure, dict):
        if is_dataclass(kind):  # not by `copy`: a `__post_init__` may look at the tensors
            made = kind.__new__(kind)
            vars(made).update(vars(structure))
        else:
            made = copy(structure)  # of any class, such as a defaultdict
        for name, entry in structure.items():
            made[name] = tree_map(function, entry)
        return made
    entries = [tree_map(function, entry) for entry in structure]
    return kind(*entries) if hasattr(kind, "_fields") else kind(entries)


def tree_leaves(structure, kind=Value):
    """The leaves of a kind in a structure, in order; one that is there twice comes twice."""
    if not isinstance(structure, (tuple, list, dict)):
        return [structure] if isinstance(structure, kind) else []
    entries = structure.values() if isinstance(structure, dict) else structure
    return [leaf for entry in entries for leaf in tree_leaves(entry, kind)]


class Node:
    """Base of the nodes of a graph: the Values that one takes and makes, in order; some may come twice."""

    @cached_property
    def taken(self):
        """Those among the arguments."""
        return tree_leaves((self.args, self.kwargs))

    @cached_property
    def places(self):
        """For each of them the number of the argument that it is in, positional ones first."""
        return [place for place, one in enumerate((*self.args, *self.kwargs.values())) for _ in tree_leaves(one)]

    @cached_property
    def made(self):
        """The outputs."""
        return tree_leaves(self.outputs)


def tree_fill(structure, leaves, kinds=Value):
    """A pytree with `leaves`, in order, in the place of its leaves of some kinds."""
    rest = iter(leaves)
    return tree_map(lambda leaf: next(rest) if isinstance(leaf, kinds) else leaf, structure)


def tree_key(structure, leaf_key):
    """A hashable key of a pytree: tuples, with `leaf_key(leaf)` for every leaf."""
    if isinstance(structure, (tuple, list)):
        return type(structure), *(tree_key(entry, leaf_key) for entry in structure)
    if isinstance(structure, dict):
        return dict, *((name, tree_key(entry, leaf_key)) for name, entry in structure.items())
    return leaf_key(structure)


def canonical(structure):
    """A pytree as tuples and strings whose `repr` is the same in every process."""
    if isinstance(structure, Value):
        return ("%", structure.id, structure.shape, structure.dtype, structure.constant)
    if isinstance(structure, (tuple, list)):
        return (type(structure).__name__, *map(canonical, structure))
    if isinstance(structure, dict):
        return (type(structure).__name__, *((name, canonical(entry)) for name, entry in structure.items()))
    return (type(structure).__name__, repr(structure))


def structure_text(structure, leaf_text):
    """A pytree as Python writes it; `leaf_text` gives the text of a leaf."""
    if isinstance(structure, dict):
        entries = [f"{key!r}: {structure_text(entry, leaf_text)}" for key, entry in structure.items()]
        return f"{{{', '.join(entries)}}}"
    if not isinstance(structure, (tuple, list)):
        return leaf_text(structure)
    entries = ", ".join(structure_text(entry, leaf_text) for entry in structure)
    if isinstance(structure, list):
        return f"[{entries}]"
    return f"({entries}{',' * (len(structure) == 1)})"


def shown(structure):
    """A pytree as text: Values by their numbers."""
    if not isinstance(structure, (tuple, list, dict)):
        return str(structure)
    return structure_text(structure, lambda leaf: str(leaf) if isinstance(leaf, (Value, DType)) else repr(leaf))


def shown_arguments(args, kwargs):
    """The arguments of a call as text."""
    return ", ".join([*map(shown, args), *(f"{name}={shown(value)}" for name, value in kwargs.items())])


def described(structure):
    """A pytree as text: Values with their dtypes and shapes."""
    if isinstance(structure, Value):
        return structure.described
    if isinstance(structure, (tuple, list)):
        return ", ".join(map(described, structure)) or "()"
    return shown(structure)
