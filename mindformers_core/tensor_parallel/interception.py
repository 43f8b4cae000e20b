"""The one place where we hook into MindSpore, so that operators which meet a `DTensor` come to our dispatcher.

MindSpore asks a Tensor subclass for `__fallback__` at every operator call. Three gaps are closed here: a call whose first tensor
is a plain one looks for `__fallback__` on `Tensor` itself; and `Stack` does not ask at all.
"""

from mindspore import Parameter, Tensor, ops

from mindformers_core.tensor_parallel.dispatch import Dispatcher
from mindformers_core.tensor_parallel.dtensor import DTensor

__all__ = ["intercept_operators"]


class _PlainTensorFallback:
    """Gives plain tensors the dispatcher, and Parameters none: asked of a Parameter, it would slow every optimizer down."""

    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    def __get__(self, tensor, owner):
        if issubclass(owner, Parameter):
            raise AttributeError("__fallback__")
        return self.dispatcher


def intercept_operators():
    """Send operators on DTensors to a new `Dispatcher`, which is returned. Called once, when the package is imported."""
    dispatcher = Dispatcher()
    DTensor.__fallback__ = dispatcher
    Tensor.__fallback__ = _PlainTensorFallback(dispatcher)
    for primitive in (ops.Stack, ops.auto_generate.StackExt):
        primitive.__call__ = _stack_by_concat(primitive.__call__)
    return dispatcher


def _stack_by_concat(stack):
    """A `__call__` of a stacking primitive that joins DTensors as a concatenation of expanded tensors, and leaves others alone."""

    def call(self, tensors):
        if any(type(tensor) is DTensor for tensor in tensors):
            dim = self.dim if hasattr(self, "dim") else self.axis
            ndim = tensors[0].ndim + 1
            if not -ndim <= dim < ndim:
                raise ValueError(f"stack along dim {dim} of tensors that then have {ndim} dims")
            return ops.concat([ops.expand_dims(tensor, dim % ndim) for tensor in tensors], dim % ndim)
        return stack(self, tensors)

    return call
