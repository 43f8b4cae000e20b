"""Rules of operators that draw random numbers: an algorithm always runs in their place; any mesh draws alike."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.elementwise import elementwise, tensors_in
from mindformers_core.operators.saved import SECOND_RESULT, UNMEASURED
from mindformers_core.operators.signature import Signature

__all__ = []


@register_operator("Dropout", saves=SECOND_RESULT, operations=10)  # most of them for the random number
def dropout(x, keep_prob=0.5, seed0=0, seed1=0):
    """The tensor with some elements zeroed and the others scaled, and the mask, of the same shape."""
    plain = elementwise(x)
    return Signature(plain.inputs, plain.outputs * 2, plain.sizes, run="dropout")


@register_operator("FuncDropoutExt", saves=UNMEASURED, operations=10)
def functional_dropout(x, p=0.5, training=True, inplace=False, seed=None, offset=None):
    """As `Dropout`, without the mask: what `mint` calls. `seed` and `offset` are scalar tensors."""
    if inplace:
        raise ValueError("dropout in place is not available for a distributed tensor: use its result")
    plain = elementwise(x)
    scalars = ((),) * len(tensors_in((seed, offset)))
    if not training:
        return Signature((*plain.inputs, *scalars), plain.outputs, plain.sizes, linear=({0},))
    return Signature((*plain.inputs, *scalars), plain.outputs, plain.sizes, run="func_dropout")
