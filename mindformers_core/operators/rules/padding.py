"""Rules of padding: a dim that grows or shrinks is whole, any other stays parallel."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import dim_names, dim_sizes, integers
from mindformers_core.operators.rules.elementwise import tensors_in
from mindformers_core.operators.saved import NOTHING, UNMEASURED
from mindformers_core.operators.signature import Signature

__all__ = []


@register_operator("ConstantPadND", saves=UNMEASURED)
@register_operator("PadV3", saves=NOTHING)
def pad(x, padding, value=0.0):
    """`x` with `padding`, pairs (before, behind) from the last dim on: linear where what is added is 0, or from `x`."""
    padding = integers((padding,), "a padding")
    if len(padding) % 2 or len(padding) > 2 * x.ndim:
        raise ValueError(f"padding {padding} is not made of at most {x.ndim} pairs, for the dims of {x.shape}")
    names, sizes, output, whole = dim_names(x), dim_sizes(x), list(dim_names(x)), set()
    for pair, (before, behind) in enumerate(zip(padding[::2], padding[1::2])):
        dim = x.ndim - 1 - pair
        if before or behind:
            whole |= {f"d{dim}", f"padded{dim}"}
            output[dim] = (f"padded{dim}",)
            sizes[f"padded{dim}"] = x.shape[dim] + before + behind
        if x.shape[dim] + before + behind < 0:
            raise ValueError(f"padding {padding} takes more from dim {dim} of {x.shape} than there is")
    values = tensors_in([value])
    linear = () if values or value not in (None, 0) else ({0},)
    scalars = ((),) * len(values)
    return Signature((names, *scalars), (tuple(output),), sizes, whole=frozenset(whole), linear=linear)
