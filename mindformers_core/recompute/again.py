"""Compiled Cells that run again in the backward pass: MindSpore's `recompute` around a compiled function."""

from mindspore import Parameter, Tensor, nn, ops
from mindspore import recompute as mindspore_recompute

from mindformers_core.operators.signature import is_float
from mindformers_core.tensor_parallel.capturing.structure import map_leaves
from mindformers_core.tensor_parallel.move import dtype_name

__all__ = ["call_again"]


def call_again(function, others, args, kwargs):
    """Call a compiled function in PyNative so that nothing in it is kept for the backward pass, where it runs again.

    Args:
        function: of tensors, and structures of them; gives a tensor, or a tuple of them.
        others: Parameters besides its arguments that it gives gradients of.
        args, kwargs: what it is called with.
    """
    needed = []  # a gradient of

    def taken(leaf):
        if isinstance(leaf, Tensor) and leaf._requires_grad and is_float(dtype_name(leaf.dtype)):
            needed.append(leaf)
            return _Place(len(needed) - 1)
        return leaf

    held = map_leaves(taken, (args, kwargs))

    def run(*given):
        inner, named = map_leaves(lambda leaf: _plain(given[leaf.number] if isinstance(leaf, _Place) else leaf), held)
        return function(*inner, **named)

    return mindspore_recompute(_Block(run, others), *needed)


def _plain(leaf):
    """A Parameter as any other tensor: a graph would take it for its own."""
    return ops.stop_gradient(leaf) if isinstance(leaf, Parameter) else leaf


class _Place:
    """Stands for a tensor that needs a gradient: MindSpore takes these one by one, and floating ones only."""

    def __init__(self, number):
        self.number = number


class _Block(nn.Cell):
    """What MindSpore's `recompute` takes: a Cell, with the Parameters that it is to give gradients of."""

    def __init__(self, function, others):
        super().__init__(auto_prefix=False)
        vars(self).update(function=function, others=others)

    def construct(self, *inputs):
        return self.function(*inputs)

    def trainable_params(self, recurse=True):
        return self.others
