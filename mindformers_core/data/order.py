"""The order of an epoch's samples: a bijection of their numbers, computed anew for each. Pure Python."""

from functools import lru_cache

import numpy as np

from mindformers_core.splitmix import GOLDEN, mixed

_ROUNDS = 4  # of which such a network needs as many


def shuffled(places, count, seed, epoch):
    """The samples at these places of an epoch, a bijection of 0 … count-1 that needs no memory of size `count`.

    A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988)
    over the least power of four from `count` on, whose round function is SplitMix64's; a result from `count` on goes
    through it again (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        places: whole numbers from 0 on, below `count`: an array or one number.
        count: number of samples, below 2**62.
        seed, epoch: select the order.

    Returns:
        An int64 array of the shape of `places`.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def network(numbers):
        left, right = numbers >> half, numbers & mask
        for key in _keys(seed, epoch):
            left, right = right, left ^ (mixed(right + key) & mask)
        return left << half | right

    found = network(np.atleast_1d(np.asarray(places)).astype(np.uint64))
    while (outside := found >= count).any():
        found[outside] = network(found[outside])
    return found.astype(np.int64).reshape(np.shape(places))


@lru_cache(maxsize=64)
def _keys(seed, epoch):
    """Arrays of one number, so that sums of them wrap without a warning."""
    start = mixed(mixed(np.array([seed], np.uint64)) + np.array([epoch], np.uint64) * np.uint64(GOLDEN))
    return np.split(mixed(start + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)), _ROUNDS)
