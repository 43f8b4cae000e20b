"""Tensors of the CPU as bytes and back, for messages: without a copy where MindSpore allows it.

`asnumpy()` gives an array on a contiguous tensor's own memory, and `Tensor.from_numpy` a tensor on an array's memory,
which the tensor keeps alive.
"""

import json
from functools import cache
from types import MappingProxyType

import numpy as np
from mindspore import Tensor, dtype as mstype

HEAD_LENGTH = 4  # bytes before an encoded head that hold its length, little-endian
NOT_OF_NUMPY = (mstype.float8_e4m3fn, mstype.float8_e5m2, mstype.hifloat8, mstype.qint4x2)  # a byte each
DTYPES = MappingProxyType({str(dtype): dtype for dtype in mstype.all_types})  # by their names in a head


def encode_head(head, tensors):
    """The head of a message, a dict, as bytes: its length, then JSON, with the tensors' dtypes and shapes."""
    described = [(str(tensor.dtype), tensor.shape) for tensor in tensors]
    encoded = json.dumps({**head, "tensors": described}, separators=(",", ":")).encode()
    return len(encoded).to_bytes(HEAD_LENGTH, "little") + encoded


def as_bytes(tensor):
    """A tensor's bytes, an array of uint8; the memory of a contiguous tensor itself."""
    return tensor.asnumpy().reshape(-1).view(np.uint8)


def empty_tensor(dtype, shape):
    """A new tensor, and the array of uint8 that is its memory, to be filled."""
    if dtype in NOT_OF_NUMPY:
        tensor = Tensor(np.zeros(shape), dtype)
        return tensor, as_bytes(tensor)
    array = np.empty(shape, numpy_dtype(dtype))
    return Tensor.from_numpy(array), array.reshape(-1).view(np.uint8)


@cache
def numpy_dtype(dtype):
    return Tensor(0, dtype).asnumpy().dtype
