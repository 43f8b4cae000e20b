"""Rules of Fourier transforms: the transformed dims are whole, and the others stay cut."""

from functools import partial

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import as_dims, bound, parameters, unary

# Prefix of an operator's name -> the number of elements that the last transformed dim gets, from that of its input or
# the one asked for. The other transformed dims keep theirs, or get the one asked for.
_LAST = {
    **dict.fromkeys(("FFT", "IFFT"), lambda size, asked: asked or size),
    **dict.fromkeys(("RFFT", "IHFFT"), lambda size, asked: (asked or size) // 2 + 1),
    **dict.fromkeys(("IRFFT", "HFFT"), lambda size, asked: asked or 2 * (size - 1)),
}
_DIMS = {"": -1, "2": (-2, -1), "N": None}  # ending of the name -> the dims that are transformed by default
_TO_REAL = ("IRFFT", "HFFT")


def _transform(kind, ending, x, *args, **named):
    """A result that is complex where the input is real takes no partial sums: terms would be twice as large."""
    given, _ = bound(parameters("sizes dim norm"), args, named, {"s": "sizes", "n": "sizes"})
    asked, dim = given["sizes"], given["dim"]
    asked = () if asked is None else asked if isinstance(asked, (tuple, list)) else (asked,)
    if dim is None:
        dim = tuple(range(-len(asked), 0)) if asked and ending == "N" else _DIMS[ending]
    dims = as_dims(dim, x.ndim)
    if asked and len(asked) != len(dims):
        raise ValueError(f"{len(asked)} sizes are asked for {len(dims)} dims of {x.shape}")
    sizes = {f"f{place}": asked[number] if asked else x.shape[place] for number, place in enumerate(dims)}
    sizes[f"f{dims[-1]}"] = _LAST[kind](x.shape[dims[-1]], asked[-1] if asked else None)
    output = {place: [(f"f{place}",)] for place in dims}
    passes = kind in _TO_REAL or "complex" in x.dtype
    return unary(x, output, sizes=sizes, whole=dims, linear=({0},) if passes else ())


for _kind in _LAST:
    for _ending in _DIMS:
        register_operator(_kind + _ending, operations=10)(partial(_transform, _kind, _ending))


@register_operator("FFTShift", "IFFTShift")
def shifted(x, dim=None):
    """The zero frequency in the middle, or back."""
    return unary(x, whole=as_dims(dim, x.ndim), linear=({0},))
