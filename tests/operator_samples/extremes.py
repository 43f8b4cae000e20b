"""Rows of extremes: what a kernel gives for infinities, NaN, zeros, denormal and large numbers, against NumPy.

The calls are those of tests/operator_calls, with other floats. NumPy's function is computed in
float64, and in the kernel's own dtype: a kernel is right where it agrees with either.
"""

from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import Tensor
from support.generated_modules import module_source, program_of

__all__ = ["DTYPES", "KINDS", "compared"]

DTYPES = ("float32", "float64", "float16")
KINDS = ("equal", "small", "large", "-inf", "inf", "nan")
_TOLERANCE = {"float32": 1e-3, "float64": 1e-3, "float16": 2e-2}
_DRAWS = 4  # of each kind


def _numbers(kind, dtype):
    info = np.finfo(dtype)
    positive = {
        "equal": (0.0, 1.5), "small": (float(info.tiny), 0.0), "large": (20.0, min(float(info.max) ** 0.5 / 4, 1e18)),
        "inf": (np.inf,), "nan": (np.nan,), "-inf": (),
    }[kind]  # fmt: skip
    return np.array([*positive, *(-x for x in positive)] or [-np.inf])


def _drawn(random, shape, kind, dtype):
    """Numbers of a kind among plain ones; the first row holds one of them alone."""
    numbers = _numbers(kind, dtype)
    plain = random.choice([-2.0, -1.0, -0.5, 0.5, 1.0, 3.0], shape)
    x = np.where(random.random(shape) < 0.4, random.choice(numbers, shape), plain)
    if len(shape):
        x[0] = random.choice(numbers)
    return (np.full(shape, random.choice(numbers)) if kind == "equal" else x).astype(dtype)


def compared(call, function):
    """How a kernel differs from NumPy: `"float32 -inf"` -> a line, for each dtype and kind where it does.

    Args:
        call: a `Call`.
        function: what it computes, in NumPy.
    """
    found = {}
    for dtype in DTYPES:
        for kind in KINDS:
            random = np.random.default_rng(17)
            for _ in range(_DRAWS):
                difference = _one(call, function, random, kind, dtype)
                if difference:
                    found[f"{dtype} {kind}"] = difference
                    break
            if difference == "no kernel":
                del found[f"{dtype} {kind}"]
                break
    return found


def _one(call, function, random, kind, dtype):
    """How one call differs; empty where it doesn't."""

    def other(argument):
        if isinstance(argument, (tuple, list)):
            return type(argument)(map(other, argument))
        is_float = isinstance(argument, np.ndarray) and argument.dtype.kind == "f"
        return _drawn(random, argument.shape, kind, dtype) if is_float else argument

    given = replace(call, args=other(call.args), named=dict(zip(call.named, other([*call.named.values()]))))
    program, _ = program_of(given)
    floats = _floats((given.args, list(given.named.values())))
    values = iter(floats)
    program.values = [next(values) if value.dtype.kind == "f" else value for value in program.values]
    space = {}
    exec(module_source([program]), space)
    inputs = list(map(Tensor, program.values))
    try:
        results = [part.asnumpy() for part in space["call_0"](*inputs)]
    except Exception:
        return "no kernel"
    allowed = []
    for wide in (np.float64, dtype):
        with np.errstate(all="ignore"):
            expected = function(*_cast(given.args, wide), **_cast(given.named, wide))
        allowed.append([np.asarray(part) for part in (expected if isinstance(expected, tuple) else (expected,))])
    for number, found in enumerate(results[: len(allowed[0])]):
        difference = _differs(found, [parts[number] for parts in allowed], floats, dtype)
        if difference:
            return f"result {number}: {difference}" if number else difference
    return _gradient(space["call_0"], inputs, results)


def _floats(structure):
    """The floating arrays in a structure, in order."""
    if isinstance(structure, (tuple, list)):
        return [array for entry in structure for array in _floats(entry)]
    return [structure] if isinstance(structure, (np.ndarray, np.generic)) and structure.dtype.kind == "f" else []


def _cast(structure, dtype):
    if isinstance(structure, dict):
        return {name: _cast(entry, dtype) for name, entry in structure.items()}
    if isinstance(structure, (tuple, list)):
        return type(structure)(_cast(entry, dtype) for entry in structure)
    return structure.astype(dtype) if _floats(structure) else structure


def _differs(found, allowed, inputs, dtype):
    """The first element that none of the allowed arrays has, as text; empty where there is none.

    Positions aren't compared: which ones of equal elements are taken is undefined.
    """
    if found.dtype.kind in "ciu" or any(found.shape != array.shape for array in allowed):
        return ""
    least = 4 * float(np.finfo(dtype).tiny)
    if all(found.shape != x.shape for x in inputs):  # a reduction, whose terms cancel
        finite = [np.abs(x.astype(np.float64)[np.isfinite(x)]).max(initial=0) for x in inputs]
        largest = max(finite, default=0)
        least = max(least, 8 * float(np.finfo(dtype).eps) * largest * max(largest, 1))  # or of products
    close = np.zeros(found.shape, bool)
    with np.errstate(all="ignore"):
        for array in allowed:
            close |= np.isclose(found, array.astype(found.dtype), _TOLERANCE[dtype], least, equal_nan=True)
    if close.all():
        return ""
    place = tuple(np.argwhere(~close)[0])
    return f"{found[place]:.4g}, NumPy {allowed[0][place]:.4g} ({(~close).sum()} of {close.size})"


def _gradient(function, inputs, results):
    """Whether a gradient is NaN where all results and all inputs are finite."""
    floats = [place for place, x in enumerate(inputs) if x.dtype.is_floating_point]
    flowing = [place for place, x in enumerate(results) if x.dtype.kind == "f"]
    finite = all(np.isfinite(x).all() for x in results) and all(np.isfinite(x.asnumpy()).all() for x in inputs)
    if not floats or not flowing or not finite:
        return ""
    try:
        found = ms.grad(lambda *x: sum(function(*x)[place].sum() for place in flowing), tuple(floats))(*inputs)
    except Exception:
        return ""
    count = sum(int(np.isnan(x.asnumpy()).sum()) for x in (found if isinstance(found, tuple) else (found,)))
    return f"gradient NaN at {count} of finite inputs" if count else ""
