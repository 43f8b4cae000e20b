"""Megatron-LM's indexed datasets: token ids in a `.bin` file, documents in the `.idx` beside it. Pure Python."""

import os
import struct

import numpy as np

from mindformers_core.data.mapped import intact
from mindformers_core.scopes import errors_at

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document marks
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def open_megatron(path):
    """`(ids, starts)` of a `.bin` file: both are mapped, whatever their size; see `Tokens`.

    The format is that of `megatron/core/datasets/indexed_dataset.py`, version 1.

    Raises:
        FileNotFoundError: no `.idx` beside it. ValueError: a file of another format, or cut off.
    """
    index = f"{os.path.splitext(path)[0]}.idx"
    if not os.path.exists(index):
        raise FileNotFoundError(f"{path}: there is no {index} beside it")
    with errors_at(f"{index} can't be read: ", kinds=OSError), open(index, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{index} is no index of Megatron's: it doesn't begin with {_MAGIC.rstrip(bytes(1)).decode()}")
    _, version, code, sequences, marks = _HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise ValueError(f"{index} has version {version} and dtype code {code}: version 1 of whole numbers can be read")
    places = _HEADER.size, 4 * sequences, 8 * sequences, 8 * marks  # header, lengths, bytes before, documents
    if os.path.getsize(index) != sum(places) or 0 in (sequences, marks):
        raise ValueError(f"{index} has {os.path.getsize(index)} bytes, not the {sum(places)} of {sequences} sequences")
    lengths = np.memmap(index, "<i4", "r", places[0], (sequences,))
    pointers = np.memmap(index, "<i8", "r", sum(places[:2]), (sequences,))
    documents = np.memmap(index, "<i8", "r", sum(places[:3]), (marks,))
    dtype = np.dtype(_DTYPES[code])
    needed = int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
    if os.path.getsize(path) != needed:
        raise ValueError(f"{path} has {os.path.getsize(path)} bytes, not the {needed} that {index} speaks of")
    return np.memmap(path, dtype, "r"), _Starts(index, lengths, pointers, documents, dtype.itemsize)


class _Starts:
    """Where documents begin, read from an index one by one: a sequence. `ValueError` for what can't be."""

    def __init__(self, index, lengths, pointers, documents, size):
        self._index, self._size, self._arrays = index, size, (lengths, pointers, documents)

    def __len__(self):
        return len(self._arrays[-1]) - 1  # the last mark is the end

    def __getitem__(self, number):
        if not 0 <= number < len(self):
            raise IndexError(number)
        lengths, pointers, documents = map(intact, self._arrays)
        first, before = int(documents[number]), int(documents[number - 1]) if number else 0
        if before <= first <= len(pointers) and (number or first == 0):
            place = int(pointers[first - 1]) + int(lengths[first - 1]) * self._size if first else 0
            if first == len(pointers) or place == pointers[first]:
                return place // self._size
        raise ValueError(f"{self._index} is damaged: document {number} begins at sequence {first} of {len(pointers)}")
