"""Rules of operators that draw random numbers, the same ones on any mesh: algorithms by global position."""

from functools import partial

from mindformers_core.operators.registry import NO_GRADIENT, register_operator
from mindformers_core.operators.signature import LocalCall, Signature, TensorMeta, tensors_in

_FACTS = {"draws": True, "gradient": NO_GRADIENT, "operations": 20}


def _drawn(run, shape, seed, offset, dtype, *bounds):
    """The `Signature` of a draw: of the shape of the tensor `shape`, or of a shape.

    Args:
        run: name of the distribution.
        shape: a tensor, or sizes.
        seed, offset: scalar tensors.
        dtype: of the result.
        bounds: further arguments of the distribution.
    """
    like, scalars = tensors_in([shape]), ((),) * len(tensors_in((seed, offset)))
    sizes = {f"d{dim}": size for dim, size in enumerate(like[0].shape if like else shape)}
    names = tuple((name,) for name in sizes)
    made = frozenset(() if like or run == "permutation" else sizes)
    local = LocalCall((like[0] if like else None, seed, offset, dtype, *bounds))
    return Signature((*[names] * len(like), *scalars), (names,), sizes, run=run, local=local, made=made)


def _fraction(run, shape, seed, offset, dtype=None, device=None):
    like = shape.dtype if isinstance(shape, TensorMeta) else "float32"
    return _drawn(run, shape, seed, offset, like if dtype is None else dtype)


register_operator("RandExt", "RandLikeExt", algorithms=("uniform",), **_FACTS)(partial(_fraction, "uniform"))
register_operator("Randn", "RandnLike", algorithms=("normal",), **_FACTS)(partial(_fraction, "normal"))


@register_operator("RandInt", algorithms=("integers",), **_FACTS)
def _integers(low, high, shape, seed, offset, dtype=None, device=None):
    if not 0 < high - low <= 2**31:
        raise ValueError(f"integers from {low} to below {high} can't be drawn: 1 to 2**31 of them can")
    return _drawn("integers", shape, seed, offset, "int64" if dtype is None else dtype, low, high)


@register_operator("RandIntLike", algorithms=("integers",), **_FACTS)
def _integers_like(x, low, high, seed, offset, dtype=None, device=None):
    return _integers(low, high, x, seed, offset, x.dtype if dtype is None else dtype)


@register_operator("RandpermExt", algorithms=("permutation",), **_FACTS)
def _permutation(n, seed, offset, dtype="int64"):
    return _drawn("permutation", (n,), seed, offset, dtype)
