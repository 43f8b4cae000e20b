"""The one place where we hook into MindSpore, so that operators which meet a `DTensor` come to our dispatcher.

MindSpore asks a Tensor subclass for `__fallback__` at every operator call. Two gaps are closed here: a call whose
first tensor is a plain one looks for `__fallback__` on `Tensor` itself; and a few primitives do not ask at all.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mindspore import Parameter, Tensor, ops

from mindformers_core.dtensor.dispatch import Dispatcher
from mindformers_core.dtensor.dtensor import DTensor

__all__ = ["custom_operator", "intercept_operators"]

# Primitives that don't ask for `__fallback__`, with those of their attributes that their rule takes as arguments.
_SILENT = (
    (ops.Stack, ("axis",)),
    (ops.auto_generate.StackExt, ("dim",)),
    (ops.AddN, ()),
    (ops.auto_generate.FullLike, ()),
    (ops.auto_generate.RandLikeExt, ()),
)


class _PlainTensorFallback:
    """Gives plain tensors the dispatcher, and Parameters none: with one, every optimizer would be slower."""

    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    def __get__(self, tensor, owner):
        if issubclass(owner, Parameter):
            raise AttributeError("__fallback__")
        return self.dispatcher


@dataclass(eq=False)
class _Operator:
    """A function of tensors, in the form in which MindSpore hands operators to `__fallback__`."""

    name: str
    function: Callable

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def custom_operator(name, function):
    """A function of tensors as one operator, which has a rule of its own: `register_operator(name, source=…)`.

    >>> scale = custom_operator("MyScale", my_package.scale)  # called by models; on one card it is the function

    Args:
        name: of the operator.
        function: what one rank computes on its parts, from operators of MindSpore, by positional arguments. Generated
            code, also under `jit`, calls what `source` says: this function.

    Returns:
        A function that a Cell's `construct` calls: with plain tensors it calls `function`; distributed ones, and those
        of a capture, go where operators go.
    """
    operator = _Operator(name, function)

    def call(*args):
        for tensor in args:
            if isinstance(tensor, Tensor) and "__fallback__" in vars(type(tensor)) and type(tensor) is not Tensor:
                return tensor.__fallback__(operator, args, {})
        return function(*args)

    return call


def intercept_operators():
    """Send operators on DTensors to a new `Dispatcher`. Called once, when the package is imported."""
    dispatcher = Dispatcher()
    DTensor.__fallback__ = dispatcher
    Tensor.__fallback__ = _PlainTensorFallback(dispatcher)
    for primitive, attributes in _SILENT:
        primitive.__call__ = _asking(primitive.__call__, attributes, dispatcher)


def _asking(call, attributes, dispatcher):
    """A `__call__` that hands calls with DTensors to the dispatcher, and leaves others alone."""

    def asking_call(self, *args):
        if not _has_dtensor(args):
            return call(self, *args)
        more = [getattr(self, name) for name in attributes]
        operator = _Operator(self.name, lambda *local: call(self, *local[: len(args)]))
        return dispatcher(operator, (*args, *more))

    return asking_call


def _has_dtensor(args):
    return any(type(entry) is DTensor or (isinstance(entry, (tuple, list)) and _has_dtensor(entry)) for entry in args)
