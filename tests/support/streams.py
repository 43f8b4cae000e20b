"""Streams of tokens for tests, and arrays that count what is read of them."""

import numpy as np

from mindformers_core.data.mixture import Mixture
from mindformers_core.data.sources import Tokens
from mindformers_core.data.streams import Sequences, Stream


def token_stream(ids, seq_length, seed, vocab_size=256):
    """The `Stream` of an array of token ids, one document."""
    return Stream((Sequences(Tokens(ids, (0,), "ids"), seq_length, vocab_size),), Mixture((1,)), seed)


class CountedRow:
    """A row of numbers that keeps in a list, `read`, how many of them are read."""

    def __init__(self, numbers, read):
        self.numbers, self.dtype, self.read = numbers, numbers.dtype, read

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, places):
        found = self.numbers[places]
        self.read.append(found.size)
        return found


class Counted(np.memmap):
    """A mapped file that counts the bytes that `np.stack` copies of it, in a list that all its views have."""

    def __array_finalize__(self, obj):
        super().__array_finalize__(obj)
        self.copied = getattr(obj, "copied", [])

    def __array_function__(self, function, types, args, kwargs):
        if function is np.stack:
            self.copied += [part.nbytes for part in args[0]]
        return super().__array_function__(function, types, args, kwargs)
