"""Sizes of dtypes, and the dtypes in which tensors are sent. Pure Python."""

from functools import cache

ITEM_BYTES = {  # name of a dtype -> bytes of an element
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
WIRE_DTYPES = {"bool": "int32"}  # dtype -> the dtype in which its tensors are sent: no backend adds Booleans


def wire_dtype(dtype):
    """Name of the dtype in which a tensor is sent, given the name of its own."""
    return WIRE_DTYPES.get(dtype, dtype)


@cache
def dtype_name(dtype):
    """`"float32"` for `mindspore.float32`."""
    return str(dtype).lower()
