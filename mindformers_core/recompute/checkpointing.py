"""Compiled Cells that run again in the backward pass: MindSpore's `recompute` around a compiled function."""

from mindspore import Parameter, nn, ops, recompute as mindspore_recompute

from mindformers_core.dtypes import dtype_name
from mindformers_core.mindspore_private import needs_gradient
from mindformers_core.operators.signature import is_float


def checkpoint_call(function, others, tensors):
    """Call a compiled function in PyNative; the backward pass runs it again and saves nothing inside.

    Args:
        function: function of tensors that returns a tuple of tensors.
        others: Parameters with gradients that aren't among its arguments.
        tensors: its arguments.
    """
    # MindSpore's recompute accepts gradients of floating tensors only
    needed = [place for place, each in enumerate(tensors) if needs_gradient(each) and is_float(dtype_name(each.dtype))]

    def run(*given):
        filled = [_plain(tensor) for tensor in tensors]
        for place, tensor in zip(needed, given, strict=True):
            filled[place] = _plain(tensor)
        return function(*filled)

    return mindspore_recompute(_Block(run, others), *[tensors[place] for place in needed])


def _plain(leaf):
    """A Parameter as a plain tensor, which a graph doesn't treat as a weight of its own."""
    return ops.stop_gradient(leaf) if isinstance(leaf, Parameter) else leaf


class _Block(nn.Cell):
    """Argument of MindSpore's `recompute`: a Cell with the Parameters that need gradients."""

    def __init__(self, function, others):
        super().__init__(auto_prefix=False)
        vars(self).update(function=function, others=others)

    def construct(self, *inputs):
        return self.function(*inputs)

    def trainable_params(self, recurse=True):
        return self.others
