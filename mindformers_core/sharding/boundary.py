"""What a sharded Cell does at its boundary: arriving tensors are moved to the layouts that were declared for them."""

from mindspore import Tensor

from mindformers_core.dtensor.dtensor import DTensor, wrap
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.operators import tensor_meta
from mindformers_core.propagation.boundaries import boundary_target, check_outputs, no_tensor

__all__ = ["Boundary"]


class Boundary:
    """The declared layouts of one Cell's arguments and results.

    Attributes:
        label: how errors call the Cell.
        mesh: the mesh of all its tensors.
        arguments: names of the arguments of `construct`, in order.
        inputs, outputs: declared layouts, see `Declaration`.
        weight_axes: axes on which a parameter of this Cell or of one below it is sharded. An input that is gathered
            or reduced to be whole on such an axis arrives *varying*: work with sharded weights differs along the
            axis, and so the gradient is reduced (or reduce-scattered) once, where it leaves the Cell.
        is_root: whether this is the Cell that `shard()` was called with.
        takes_parts: whether plain tensors are this rank's parts of what is declared; else they are whole.
    """

    def __init__(self, label, mesh, arguments, declaration, weight_axes, is_root, takes_parts):
        self.label = label
        self.mesh = mesh
        self.arguments = arguments
        self.inputs = declaration.inputs if declaration else {}
        self.outputs = declaration.outputs if declaration else {}
        self.weight_axes = weight_axes
        self.is_root, self.takes_parts = is_root, takes_parts
        self.targets = {}

    def enter(self, args, kwargs):
        """The arguments as `construct` gets them."""
        if not self.inputs and not self.is_root:
            return args, kwargs
        args = tuple(
            self._place(argument, self.inputs.get(name), f"input '{name}'", self._enter_tensor)
            for name, argument in zip(self._names(len(args)), args)
        )
        kwargs = {
            name: self._place(value, self.inputs.get(name), f"input '{name}'", self._enter_tensor)
            for name, value in kwargs.items()
        }
        return args, kwargs

    def leave(self, result):
        """The result as the caller gets it. A root's partial or varying results are reduced: a loss is final."""
        if not self.outputs and not self.is_root:
            return result
        many = isinstance(result, (tuple, list))
        results = result if isinstance(result, dict) else dict(enumerate(result if many else (result,)))
        check_outputs(self.label, self.outputs, results)
        placed = {
            key: self._place(value, self.outputs.get(key), f"output {key!r}", self._leave_tensor)
            for key, value in results.items()
        }
        if isinstance(result, dict):
            return placed
        return _rebuilt(result, placed.values()) if many else placed[0]

    def _names(self, count):
        return [*self.arguments, *(f"argument {place}" for place in range(len(self.arguments), count))][:count]

    def _place(self, value, declared, what, place):
        if isinstance(value, Tensor):
            return place(value, declared, f"{what} of {self.label}")
        if isinstance(value, (tuple, list)):
            return _rebuilt(value, [self._place(entry, declared, what, place) for entry in value])
        if isinstance(value, dict):
            return {key: self._place(entry, declared, what, place) for key, entry in value.items()}
        if declared is not None and value is not None:
            raise no_tensor(f"{what} of {self.label}", declared, value)
        return value

    def _enter_tensor(self, tensor, declared, name):
        if not isinstance(tensor, DTensor):
            tensor = self._adopt(tensor, declared, name)
        elif self.is_root:
            tensor = wrap(tensor.to_local(), tensor._meta)  # what it is moved to in this pass is kept for this pass
        if declared is None:
            return tensor
        return tensor.redistribute(self._target(tensor, declared, name, self.weight_axes))

    def _leave_tensor(self, tensor, declared, name):
        if not isinstance(tensor, DTensor):
            return tensor
        if declared is not None:
            tensor = tensor.redistribute(self._target(tensor, declared, name, ()))
        if self.is_root and (tensor.layout.partial or tensor.layout.varying):
            tensor = tensor.redistribute(tensor.layout.replace(partial=(), varying=()))
        return tensor

    def _adopt(self, tensor, declared, name):
        """A plain tensor: this rank's part of what is declared, at the root; else the same on all ranks."""
        layout = Layout.on(self.mesh, ((),) * tensor.ndim)
        if self.takes_parts and declared is not None:
            layout = bind_layout(declared, self.mesh, tensor.ndim, name=name)
        shape = layout.global_shape(tensor.shape)
        return wrap(tensor, tensor_meta(shape, dtype_name(tensor.dtype), layout, constant=not tensor._requires_grad))

    def _target(self, tensor, declared, name, weight_axes):
        """See `boundary_target`. Remembered, for it is asked at every pass."""
        target = self.targets.get((name, tensor._meta))
        if target is None:
            target = boundary_target(declared, self.mesh, tensor.shape, tensor.layout, weight_axes, name)
            self.targets[name, tensor._meta] = target
        return target


def _rebuilt(like, entries):
    """A tuple, named tuple or list of the kind of `like`."""
    return like._make(entries) if hasattr(like, "_make") else type(like)(entries)
