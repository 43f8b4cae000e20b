"""A function of tensors as one operator, with a rule of its own, as models and algorithms call it."""

from functools import partial

from mindspore import Tensor

from mindformers_core.algorithms.compiled import in_graph


def operator_named(name, function):
    """A function of tensors, in the form in which MindSpore hands operators to `__fallback__`."""
    operator = partial(function)
    operator.name = name
    return operator


def custom_operator(name, function):
    """A function of tensors as one operator, which has a rule of its own: `register_operator(name, source=…)`.

    >>> scale = custom_operator("MyScale", my_package.scale)  # called by models; on one card it is the function

    Args:
        name: of the operator.
        function: the computation of one rank on its parts, of operators of MindSpore; positional arguments only. For
            generated code, also under `jit`, `source` must name this function.

    Returns:
        A function for a Cell's `construct`: a call with plain tensors runs `function`; a call with DTensors, or with
        the traced tensors of a capture, is dispatched as that of an operator.
    """
    operator = operator_named(name, function)

    def call(*args):
        if in_graph():  # of one card: a capture has other programs compiled
            return function(*args)
        for tensor in args:
            if is_dispatched(tensor):
                return tensor.__fallback__(operator, args, {})
        return function(*args)

    return call


def is_dispatched(tensor):
    """Whether a value is a `DTensor`, or a traced tensor of a capture."""
    return isinstance(tensor, Tensor) and "__fallback__" in vars(type(tensor)) and type(tensor) is not Tensor
