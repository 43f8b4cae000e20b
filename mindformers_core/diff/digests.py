"""Digests of tensors that many ranks hold in parts: the digest of the whole is the sum of those of the parts.

Pure Python. A digest has `PROJECTIONS` linear projections `sum w(i, j, …) x(i, j, …)` with pseudo-random weights of
mean square 1, a function of the *global* position, so that a shard in the wrong place changes it, and terms of a
partial sum add up. The mean square of the difference of two tensors' projections estimates the squared norm of their
difference (Achlioptas, "Database-friendly random projections", 2003; sketches of Alon, Matias, Szegedy, 1996).
Weights are products of one factor for every dim, which makes a projection a few small matrix products.
"""

from functools import lru_cache

import numpy as np

from mindformers_core.splitmix import GOLDEN, mixed

PROJECTIONS = 4
COLUMNS = PROJECTIONS + 3  # and the sum of squares, the largest magnitude, the number of elements that are not finite
_SMALLEST, _LARGEST = 0.6, 1.3523  # magnitudes of a factor: their mean square is 1, and no two factors are equal
_HUGE = 1e30  # counts as infinite: what masks are filled with would hide all else
_BLOCK = 1 << 18  # elements that are converted at once


def digest(array, starts):
    """The digest of a part of a tensor, whose first element has the global position `starts`: `COLUMNS` numbers.

    Where a dim has several runs of elements (it is strided), its entry in `starts` has the first position of each.
    The innermost dim of float32 is projected in float32, with an error of about half its unit of rounding.
    """
    found = np.zeros(COLUMNS)
    if not array.size:
        return found
    dtype = np.float32 if array.dtype in (np.float32, np.float16) else np.float64
    factors = [_factors(dim, start, size) for dim, (start, size) in enumerate(zip(starts, array.shape))]
    *outer, inner = factors or [np.ones((1, PROJECTIONS))]
    rows = array.reshape(-1, len(inner))
    projected, step = np.empty((len(rows), PROJECTIONS)), max(1, _BLOCK // len(inner))
    for first in range(0, len(rows), step):
        block = rows[first : first + step].astype(dtype, copy=False)
        squares = np.vdot(block, block)
        if not squares < _HUGE:
            huge = ~(np.abs(block) < _HUGE)
            found[PROJECTIONS + 2] += huge.sum()
            block = np.where(huge, 0.0, block.astype(np.float64))
            squares = np.vdot(block, block)
        found[PROJECTIONS] += squares
        found[PROJECTIONS + 1] = max(found[PROJECTIONS + 1], block.max(), -block.min())
        projected[first : first + step] = block @ inner.astype(block.dtype)
    for each in reversed(outer):
        projected = np.einsum("rnk,nk->rk", projected.reshape(-1, *each.shape), each)
    found[:PROJECTIONS] = projected[0]
    return found


def distance(one, other):
    """The norm of the difference of two tensors, from their digests, in 98 of 100 cases within a factor of 3."""
    if one[PROJECTIONS + 2] != other[PROJECTIONS + 2]:
        return float("inf")
    return float(np.sqrt(np.mean(np.square(one[:PROJECTIONS] - other[:PROJECTIONS]))))


def norm_of(values):
    """The norm from a digest; of partial sums a bound, the norm of all terms together."""
    return float(np.sqrt(values[PROJECTIONS]))


def sign(shape, starts, seed):
    """An array of pseudo-random signs, a function of the global position; arguments as of `digest`."""
    signs = np.ones((), np.float32)
    for dim, (start, size) in enumerate(zip(starts, shape)):
        signs = np.multiply.outer(signs, np.sign(_factors(dim + seed * 64, start, size)[:, 0]).astype(np.float32))
    return signs


@lru_cache(maxsize=512)
def _factors(dim, start, size):
    """The weights' factors for `size` indices of a dim, from `start` on or in as long runs, (size, PROJECTIONS)."""
    index = np.add.outer(start, np.arange(size // np.size(start))).reshape(-1, 1).astype(np.uint64)
    bits = mixed(index * np.uint64(64) + np.arange(PROJECTIONS, dtype=np.uint64))
    bits = mixed(bits ^ np.uint64((dim + 1) * GOLDEN % 2**64))
    magnitude = _SMALLEST + (_LARGEST - _SMALLEST) * ((bits >> np.uint64(12)).astype(np.float64) / 2.0**52)
    found = np.where(bits & np.uint64(1), magnitude, -magnitude)
    found.flags.writeable = False
    return found
