"""Conversion of floats of 16 and 32 bits that are given by their bits; NumPy has no bfloat16. Pure Python."""

import numpy as np


def convert(array, dtype, wanted):
    """Convert floats to the nearest ones of another dtype, ties to even.

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
