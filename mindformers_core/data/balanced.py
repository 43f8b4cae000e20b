"""A dataset whose tokens lie in the order of the ranks that share its sequences."""

from math import gcd

import numpy as np

from mindformers_core.batches import BLOCK, area_order, chunk_length, places_of, static_order

_CHUNKS = 16  # of a rank, at most, where the documents of a row say which


class Balanced:
    """The samples of a dataset with their tokens in the order in which ranks that share a sequence have them.

    All arrays of a sample have one entry for each token. Labels are those of the dataset, of the next token in its
    order. Where rows have orders of their own (`area`), two more arrays follow, if they aren't there: `positions` of
    tokens in their documents, and `places` in the row.

    Args:
        dataset: an object with `batch(first, count)`, see `dataset_of`.
        balance, ranks: see `static_order`.
    """

    def __init__(self, dataset, balance, ranks):
        self.dataset, self.ranks = dataset, ranks
        self.order = static_order(balance, ranks)

    def batch(self, first, count):
        """Samples `first` … `first + count - 1`: arrays (count, length, …).

        Raises:
            ValueError: an array without an entry for each token, or with one for each pair; a length that ranks can't
                share; with `area`, arrays behind those of positions.
        """
        arrays = list(self.dataset.batch(first, count))
        (length,) = arrays[0].shape[1:2] or (0,)
        for number, array in enumerate(arrays):
            if array.shape[1:2] != (length,) or length in array.shape[2:]:  # pairs of tokens would need two orders
                raise ValueError(
                    f"parallelism.context_parallel_balance: array {number} of the dataset has samples of shape "
                    f"{list(array.shape[1:])}, of which dim 0, and no other, should have an entry for each of the "
                    f"{length} tokens of array 0 to be put into another order: use context_parallel_balance=contiguous"
                )
        if self.order is not None:
            return [array[:, places_of(self.order, length)] for array in arrays]
        if len(arrays) > 3:
            raise ValueError(
                f"parallelism.context_parallel_balance: area takes a dataset of ids, labels and positions, behind "
                f"which it puts places, but this one has {len(arrays)} arrays: use zigzag or contiguous"
            )
        if len(arrays) < 3:
            arrays.append(np.broadcast_to(np.arange(length, dtype=np.int32), (count, length)))
        part = gcd(chunk_length(range(self.ranks), length), _CHUNKS)
        while part > 4 and length < self.ranks * part * BLOCK:  # a block would be of two chunks
            part //= 2
        areas = _areas(arrays[2], self.ranks * part)
        places = np.stack([places_of(area_order(row, self.ranks), length) for row in areas])
        return [np.stack([row[own] for row, own in zip(array, places)]) for array in arrays] + [places]


def _areas(positions, count):
    """Of each of `count` equal chunks, the pairs of a query and a key that blocks of `BLOCK` queries compute.

    Args:
        positions: (rows, length), of tokens in their documents.
    """
    rows, length = positions.shape
    size, places = gcd(length // count, BLOCK), np.arange(length)
    starts = np.maximum(places - positions, 0).reshape(rows, -1, size).min(2)
    return ((places[size - 1 :: size] + 1 - starts) * size).reshape(rows, count, -1).sum(2)
