"""The boundary of a Cell: how arguments arrive; in the eager engine also their redistribution, and that of results."""

from enum import Enum

import numpy as np
from mindspore import Tensor

from mindformers_core.dtensor.dtensor import DTensor, borrowed, wrap
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.lowering.aliases import check_current
from mindformers_core.mindspore_private import Type, needs_gradient
from mindformers_core.operators import TensorMeta, tensor_meta
from mindformers_core.program.structure import call_signature, tree_map
from mindformers_core.propagation.boundaries import Declaration, boundary_target, check_outputs, no_tensor
from mindformers_core.scopes import errors_at


class Boundary:
    """The declared layouts of the arguments and results of one Cell.

    Attributes:
        label: the name of the Cell in error messages.
        mesh: the mesh of all its tensors.
        arguments: names of the arguments of `construct`, in order.
        inputs, outputs: declared layouts, see `Declaration`.
        weight_axes: axes on which a parameter of this Cell or of one below it is sharded. An input that is gathered
            or reduced to be replicated on such an axis arrives *varying*: computation with sharded weights differs
            along the axis, and so the gradient is reduced (or reduce-scattered) once, where it leaves the Cell.
        is_root: whether this is the Cell that `shard()` was called with.
        arriving: name of an argument -> the layout of which plain tensors are this rank's parts; others are global.
    """

    def __init__(self, tree, path):
        cell, declaration = tree.cells[path], tree.declarations.get(path) or Declaration()
        self.label, self.mesh = tree.label(path), tree.mesh
        self.arguments = tuple(call_signature(type(cell).construct).parameters)[1:]
        if "program" in self.arguments:
            raise ValueError(f"{self.label}: construct has an argument 'program', which shard() needs: rename it")
        self.inputs, self.outputs = declaration.inputs, declaration.outputs
        self.weight_axes = frozenset().union(*(parameter.layout.cut_axes for parameter in cell.get_parameters()))
        self.is_root = path == ""
        given = tree.arriving if self.is_root else None
        self.arriving = {} if given is None else self.inputs | given
        if unknown := {*(given or ())} - {*self.arguments}:
            raise ValueError(f"{self.label} has no input '{min(unknown)}': construct takes {', '.join(self.arguments)}")
        self._targets = {}

    def enter(self, args, kwargs):
        """The arguments that `construct` gets."""
        if not self.inputs and not self.is_root:
            return args, kwargs
        names = [*self.arguments, *(f"argument {place}" for place in range(len(self.arguments), len(args)))]
        args = tuple(self._enter(name, value) for name, value in zip(names, args))
        return args, {name: self._enter(name, value) for name, value in kwargs.items()}

    def leave(self, result):
        """The result that the caller gets. Partial or varying results of the root are reduced: a loss is final."""
        if not self.outputs and not self.is_root:
            return result
        if not isinstance(result, (tuple, list, dict)):
            return self.leave((result,))[0]
        results = result if isinstance(result, dict) else dict(enumerate(result))
        check_outputs(self.label, self.outputs, results)
        placed = {
            key: self._place(value, self.outputs.get(key), f"output {key!r} of {self.label}", self._leave_tensor)
            for key, value in results.items()
        }
        if isinstance(result, dict):
            return placed
        return result._make(placed.values()) if hasattr(result, "_make") else type(result)(placed.values())

    def arriving_layout(self, name, ndim):
        """The layout of a plain tensor of `ndim` dims that arrives as input `name`."""
        if name in self.arriving:
            return bind_layout(self.arriving[name], self.mesh, ndim, name=f"input '{name}' of {self.label}")
        return Layout.on(self.mesh, ((),) * ndim)

    def _enter(self, name, value):
        def enter(tensor, declared, label):
            if not isinstance(tensor, DTensor):
                layout = self.arriving_layout(name, tensor.ndim)
                shape, dtype = layout.global_shape(tensor.shape), dtype_name(tensor.dtype)
                tensor = wrap(tensor, tensor_meta(shape, dtype, layout, constant=not needs_gradient(tensor)))
            elif self.is_root:
                tensor = wrap(tensor.to_local(), tensor._meta)  # its redistributions are cached for one pass
            tensor = borrowed(tensor) if self.is_root else tensor
            if declared is None:
                return tensor
            return tensor.redistribute(self._target(tensor, declared, label, self.weight_axes))

        return self._place(value, self.inputs.get(name), f"input '{name}' of {self.label}", enter)

    def _place(self, structure, declared, label, place):
        def place_leaf(leaf):
            if isinstance(leaf, Tensor):
                return place(leaf, declared, label)
            if declared is not None and leaf is not None:
                raise no_tensor(label, declared, leaf)
            return leaf

        return tree_map(place_leaf, structure)

    def _leave_tensor(self, tensor, declared, name):
        if not isinstance(tensor, DTensor):
            return tensor
        check_current(tensor)
        if declared is not None:
            tensor = tensor.redistribute(self._target(tensor, declared, name, ()))
        return tensor.redistribute(tensor.layout.contiguous.replace(partial=(), varying=())) if self.is_root else tensor

    def _target(self, tensor, declared, name, weight_axes):
        """`boundary_target`, computed once for a tensor's name and layout."""
        target = self._targets.get((name, tensor._meta))
        if target is None:
            target = boundary_target(declared, self.mesh, tensor.shape, tensor.layout, weight_axes, name)
            self._targets[name, tensor._meta] = target
        return target


def describe(leaf):
    """The key of a leaf of the arguments: of a tensor its local shape, dtype and, of a DTensor, its layout."""
    if isinstance(leaf, DTensor):
        return tuple(leaf._local.shape), leaf._meta.dtype, leaf.layout
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), dtype_name(leaf.dtype), None
    if isinstance(leaf, TensorMeta):
        return leaf.shape, leaf.dtype, leaf.layout
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, slice, np.generic, Type, Enum)):
        return type(leaf), repr(leaf)  # since 1 == 1.0 == True, and 0.0 == -0.0
    raise TypeError(
        f"a sharded Cell takes tensors, numbers, strings, None, and tuples, lists and dicts of them, not {leaf!r} "
        f"({type(leaf).__name__}), which may change without its program being made anew: keep it in the Cell"
    )


def bind_arguments(tree, path, args, kwargs):
    """Bind the arguments of a call from outside to the parameters of `construct`.

    Returns:
        `(BoundArguments with a TensorMeta of the global shape for every tensor, list of (name of the argument, tensor,
        Layout in which it arrives))`.
    """
    with errors_at(f"{tree.label(path)}, construct(): "):
        bound = call_signature(tree.classes[path].construct).bind(tree.cells[path], *args, **kwargs)
    boundary, arriving = tree.boundaries[path], []

    def enter(leaf, name):
        if not isinstance(leaf, (Tensor, TensorMeta)):
            return leaf
        shape, dtype, layout = describe(leaf)
        layout = boundary.arriving_layout(name, len(shape)) if layout is None else layout
        if layout.mesh != tree.mesh:
            raise ValueError(
                f"input '{name}' of {boundary.label} lives as {layout!r}, which is on another mesh than the Cell's, "
                f"{tree.mesh!r}"
            )
        arriving.append((name, leaf, layout))
        return TensorMeta(layout.global_shape(shape), dtype, None, False)

    for name, value in list(bound.arguments.items())[1:]:
        bound.arguments[name] = tree_map(lambda leaf, name=name: enter(leaf, name), value)
    return bound, arriving


def undeclared_inputs(arriving, boundary):
    """The first sharded input and the first undeclared one, as text: together a frequent reason for shape errors."""
    shapes = [(name, describe(leaf)[0], layout) for name, leaf, layout in arriving]
    sharded = [(name, shape, layout) for name, shape, layout in shapes if any(layout.dims)]
    undeclared = [
        (name, shape) for name, shape, at in shapes if name not in boundary.arriving and shape and at.is_replicated
    ]
    if not sharded or not undeclared:
        return ""
    (name, local, layout), (other, shape) = sharded[0], undeclared[0]
    return (
        f"'{name}' {local}, which is {layout.global_shape(local)} in all, {layout}, but with '{other}' {shape} of no "
        "declared layout, which is taken as whole: declare that, too, if each rank gives its part"
    )
