"""Local values of ranks against the global value of one card, and the kind of a fault. Pure Python."""

from functools import lru_cache

import numpy as np

from mindformers_core.redistribution.arrays import reduce_arrays

SMALL = 2.0**-20  # times the magnitude of terms: below it a tensor may be what is left where they cancel

__all__ = ["SMALL", "TermSums", "close", "expected_part", "gradient_layout"]


def close(found, expected, tolerance, floor=SMALL):
    """Whether two arrays agree, relative to the largest magnitude of the expected one, or to `floor` below that."""
    if found.shape != expected.shape:
        return False
    if expected.dtype.kind != "f":
        return bool((found == expected).all())
    if not found.size:
        return True
    scale = max(np.abs(expected).max(), floor)
    if np.isfinite(scale):
        return bool(np.abs(found - expected).max() <= tolerance * scale)
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return False
    return close(found[finite], expected[finite], tolerance, floor)


def gradient_layout(layout):
    """The layout of a tensor's gradient; None where it isn't determined by the layout (terms of an extreme)."""
    if any(op not in ("sum", "avg") for _, op in layout.partial):
        return None
    return layout.replace(partial=tuple((axis, "sum") for axis in layout.varying), varying=())


def expected_part(value, layout, rank):
    """The part of a global value that a rank holds, of partial tensors the sum of the terms."""
    return value[_slices(layout, value.shape, rank)]


@lru_cache(maxsize=1 << 14)
def _slices(layout, shape, rank):
    return layout.local_slices(shape, rank)


class TermSums:
    """Collects the terms of partial tensors until all ranks have given theirs."""

    def __init__(self):
        self._terms = {}  # key -> rank -> term

    def add(self, key, layout, rank, term):
        """Add the term of a rank; returns the reduced tensor when the last rank has come, else None."""
        axes = tuple(axis for axis, _ in layout.partial)
        group = layout.mesh.group(rank, axes)
        terms = self._terms.setdefault((key, group), {})
        terms[rank] = term
        if len(terms) < len(group):
            return None
        del self._terms[key, group]
        for axis, op in layout.partial:
            members = {each: layout.mesh.group(each, (axis,)) for each in terms}
            terms = {each: reduce_arrays([terms[other] for other in members[each]], op) for each in members}
        return terms[rank]
