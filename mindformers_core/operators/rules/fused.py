"""Rules of fused operators that decoders call on accelerators: gates and rotary embedding."""

from dataclasses import replace

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import as_dim, dim_names, unary
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.saved import INPUTS


@register_operator("Swiglu", operations=5)
@register_operator("GLU", saves=INPUTS, operations=4)
def gated(x, dim=-1):
    """One half of `dim` times a function of the other: the halves of a shard are not shards of the halves."""
    place = as_dim(dim, x.ndim)
    if x.shape[place] % 2:
        raise ValueError(f"dim {place} of {x.shape} can't be halved")
    return unary(x, {place: [("half",)]}, sizes={"half": x.shape[place] // 2}, whole=(place,))


@register_operator("RotaryPositionEmbedding", operations=3)
def rotary_embedding(x, cos, sin, mode=0):
    """Pairs of elements of the last dim, rotated by angles that are broadcast to `x`: linear in `x`."""
    plain = elementwise(x, cos, sin)
    if plain.outputs != (dim_names(x),) or any(angle.shape[-1] != x.shape[-1] for angle in (cos, sin)):
        raise ValueError(f"angles {cos.shape} and {sin.shape} don't fit {x.shape}")
    return replace(plain, whole=frozenset({f"d{x.ndim - 1}"}), linear=({0},))
