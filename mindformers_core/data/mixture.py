"""Which source a sample of a mixture is from: exact shares after any number of samples. Pure Python."""

import heapq
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd

import numpy as np

LARGEST = 100_000  # sum of weights without a common divisor: as long is the pattern that repeats


@dataclass(frozen=True)
class Mixture:
    """A stream of samples from several sources: sample g is number n of source s, whatever was asked before.

    After any number of samples from `start` on, a source has given its share to within one.

    Attributes:
        weights: positive whole numbers, one a source.
        start: number of the stream's first sample that these weights are for.
        taken: of each source, the samples before `start`.
    """

    weights: tuple
    start: int = 0
    taken: tuple = ()
    _period: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        divisor = gcd(*self.weights)
        reduced = tuple(weight // divisor for weight in self.weights)
        if sum(reduced) > LARGEST:
            raise ValueError(
                f"weights {', '.join(map(str, self.weights))}: without common divisors their sum is {sum(reduced):,}, "
                f"at most {LARGEST:,} is possible: round them"
            )
        object.__setattr__(self, "taken", self.taken or (0,) * len(self.weights))
        object.__setattr__(self, "_period", (*_pattern(reduced), np.array(reduced)))

    def places(self, first, count):
        """Of the samples `first` … `first + count - 1`, from `start` on: `(sources, numbers)`, two arrays."""
        sources, ranks, reduced = self._period
        rounds, places = np.divmod(np.arange(first - self.start, first - self.start + count), len(sources))
        found = sources[places]
        return found, np.array(self.taken)[found] + rounds * reduced[found] + ranks[places]

    def counts(self, end):
        """Of each source, how many of the samples before `end` are its own; `end` is at least `start`."""
        sources, _, reduced = self._period
        rounds, rest = divmod(end - self.start, len(sources))
        part = np.bincount(sources[:rest], minlength=len(self.weights))
        return tuple((np.array(self.taken) + rounds * reduced + part).tolist())

    def changed(self, weights, end):
        """The mixture that goes on with other weights from sample `end` on; sources come and go at the end."""
        taken = (*self.counts(end), *[0] * len(weights))
        return Mixture(tuple(weights), end, taken[: len(weights)])


@lru_cache(maxsize=8)
def _pattern(weights):
    """The sources of a whole period of a mixture, and of each sample its number among those of its source.

    Every source is given when its next sample is due soonest, among those whose share allows one: Tijdeman's solution
    of the chairman assignment problem (Discrete Mathematics 32, 1980), whose shares are right to within one.
    """
    total, slack = sum(weights), max(1, 2 * len(weights) - 2)
    sources, ranks = np.empty(total, np.int64), np.empty(total, np.int64)
    # in units of 1 / slack samples: the n-th is allowed from a share of n - 1 + 1 / slack on, due at n - 1 / slack
    waiting = [(-(-total // (slack * weight)), source, 0) for source, weight in enumerate(weights)]
    allowed = []
    heapq.heapify(waiting)
    for slot in range(total):
        while waiting and waiting[0][0] <= slot + 1:
            _, source, number = heapq.heappop(waiting)
            due = ((number + 1) * slack - 1) * total // (slack * weights[source]) + 1
            heapq.heappush(allowed, (due, source, number))
        _, source, number = heapq.heappop(allowed)
        sources[slot], ranks[slot] = source, number
        heapq.heappush(
            waiting, (-(-(((number + 1) * slack + 1) * total) // (slack * weights[source])), source, number + 1)
        )
    return sources, ranks
