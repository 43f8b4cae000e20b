"""A dataset whose tokens lie in the order of the ranks that share its sequences."""

from math import gcd

import numpy as np

from mindformers_core.batches import area_order, chunk_length, places_of, static_order

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
            ValueError: an array without an entry for each token; a length that ranks can't share.
        """
        arrays = list(self.dataset.batch(first, count))
        (length,) = arrays[0].shape[1:2] or (None,)
        for number, array in enumerate(arrays):
            if array.shape[1:2] != (length,):
                raise ValueError(
                    f"parallelism.context_parallel_balance: array {number} of the dataset has samples of shape "
                    f"{list(array.shape[1:])}, which have no entry for each token"
                    f"{f', of which array 0 has {length},' * bool(number)} so tokens can't be put into another order: use "
                    "context_parallel_balance=contiguous"
                )
        if self.order is not None:
            return [array[:, places_of(self.order, length)] for array in arrays]
        if len(arrays) < 3:
            arrays.append(np.broadcast_to(np.arange(length, dtype=np.int32), (count, length)))
        part = gcd(chunk_length(range(self.ranks), length), _CHUNKS)
        areas = (arrays[2].astype(np.int64) + 1).reshape(count, self.ranks * part, -1).sum(2)
        places = np.stack([places_of(area_order(row, self.ranks), length) for row in areas])
        return [np.stack([row[own] for row, own in zip(array, places)]) for array in arrays] + [places]
