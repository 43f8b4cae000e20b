"""Compiled Cells that run again in the backward pass: MindSpore's `recompute` around a compiled function."""

from mindspore import Parameter, nn, ops
from mindspore import recompute as mindspore_recompute

from mindformers_core.dtensor.move import dtype_name
from mindformers_core.operators.signature import is_float

__all__ = ["checkpoint_call"]


def checkpoint_call(function, others, tensors):
    """Call a compiled function in PyNative so that nothing in it is kept for the backward pass, where it runs again.

    Args:
        function: of tensors; gives a tuple of tensors.
        others: Parameters besides its arguments that it gives gradients of.
        tensors: what it is called with.
    """
    needed = [place for place, tensor in enumerate(tensors) if _needs_gradient(tensor)]

    def run(*given):
        filled = [_plain(tensor) for tensor in tensors]
        for place, tensor in zip(needed, given, strict=True):
            filled[place] = _plain(tensor)
        return function(*filled)

    return mindspore_recompute(_Block(run, others), *[tensors[place] for place in needed])


def _needs_gradient(tensor):
    """MindSpore takes floating tensors only."""
    return tensor._requires_grad and is_float(dtype_name(tensor.dtype))


def _plain(leaf):
    """A Parameter as any other tensor: a graph would take it for its own."""
    return ops.stop_gradient(leaf) if isinstance(leaf, Parameter) else leaf


class _Block(nn.Cell):
    """What MindSpore's `recompute` takes: a Cell, with the Parameters that it is to give gradients of."""

    def __init__(self, function, others):
        super().__init__(auto_prefix=False)
        vars(self).update(function=function, others=others)

    def construct(self, *inputs):
        return self.function(*inputs)

    def trainable_params(self, recurse=True):
        return self.others
