"""Sizes of dtypes, the dtypes in which tensors are sent, and conversion of floats by their bits. Pure Python."""

from functools import cache

import numpy as np

ITEM_BYTES = {  # name of a dtype -> bytes of an element
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
FLOATS = "float32", "float16", "bfloat16"  # those that `convert` knows
WIRE_DTYPES = {"bool": "int32"}  # dtype -> the dtype in which its tensors are sent: no backend adds Booleans


def wire_dtype(dtype):
    """Name of the dtype in which a tensor is sent, given the name of its own."""
    return WIRE_DTYPES.get(dtype, dtype)


@cache
def dtype_name(dtype):
    """`"float32"` for `mindspore.float32`."""
    return str(dtype).lower()


def convert(array, dtype, wanted):
    """Convert floats to the nearest ones of another dtype, ties to even; NumPy has no bfloat16.

    Args:
        array: of unsigned numbers, the bits of the floats; any array where both dtypes are equal.
        dtype, wanted: float16, bfloat16 or float32.

    Returns:
        An array of unsigned numbers.

    Raises:
        ValueError: a finite number that is infinite as float16.
    """
    if dtype == wanted:
        return array
    if dtype == "bfloat16":
        wide = (array.astype(np.uint32) << 16).view(np.float32)
    else:
        wide = array.view(dtype).astype(np.float32)
    if wanted == "float32":
        return wide.view(np.uint32)
    if wanted == "float16":
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float16)
        if (np.isinf(narrow) & np.isfinite(wide)).any():
            raise ValueError(f"it has {dtype} numbers up to {np.nanmax(np.abs(wide)):g}, which float16 doesn't have")
        return narrow.view(np.uint16)
    bits = wide.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded).astype(np.uint16)
