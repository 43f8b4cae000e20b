"""Checksums of tensors that many ranks hold in parts: that of the whole is the sum of those of the parts. Pure Python.

The bits of every element, as unsigned numbers of at most 32 bits, are multiplied by odd pseudo-random weights, which
depend on the *global* position, and summed modulo 2**64. One changed number always changes the sum; of changes of
several, about one in 2**33 or fewer doesn't. A number in a wrong place is a changed one. (A multilinear hash: Carter
and Wegman, "Universal classes of hash functions", 1979.)
"""

from functools import reduce
from math import prod

import numpy as np

from mindformers_core.splitmix import GOLDEN, mixed

MODULUS = 2**64
_BLOCK = 1 << 16  # elements of a row whose weights are kept at a time


def checksum(array, box, shape):
    """The checksum of a part of a tensor, an int.

    Args:
        array: the part, a NumPy array whose elements have 1, 2, 4, 8 or 16 bytes.
        shape: of the whole tensor.
    """
    if array.dtype.itemsize > 4:  # a change of a 64-bit number's highest bit would have one effect, wherever it is
        words = array.dtype.itemsize // 4
        array, box, shape = np.ascontiguousarray(array)[..., None].view(np.uint32), (*box, (0, words)), (*shape, words)
    if not box:
        array, box, shape = array.reshape(1), ((0, 1),), (1,)
    *outer, (first, last) = box
    columns = last - first
    words = array.reshape(-1, columns).view(f"u{array.dtype.itemsize}") if columns else np.zeros((0, 0), np.uint8)
    strides = [prod(shape[dim + 1 : -1]) for dim in range(len(outer))]
    along = [np.arange(*span, dtype=np.uint64) * np.uint64(step) for span, step in zip(outer, strides)]
    found, of_rows = 0, _weights(reduce(np.add.outer, along, np.zeros(1, np.uint64)).reshape(-1), 1)
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        weights = _weights(np.arange(first + start, first + stop, dtype=np.uint64), 2)
        sums = np.einsum("rc,c->r", words[:, start:stop], weights)
        found += int(np.dot(sums, of_rows))
    return found % MODULUS


def _weights(index, seed):
    return mixed((index + np.uint64(1)) * np.uint64(GOLDEN) ^ np.uint64(seed)) | np.uint64(1)
