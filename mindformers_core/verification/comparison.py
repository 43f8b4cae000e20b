"""Local values of ranks against the global value of one card, and the kind of a fault. Pure Python."""

from functools import lru_cache

import numpy as np

from mindformers_core.layout import Layout
from mindformers_core.redistribution.arrays import reduce_terms

_MASKS = 1e3  # numbers from here on stand for masked elements, and say nothing about the others
_slices = lru_cache(maxsize=1 << 14)(Layout.local_slices)


def close(found, expected, tolerance, rounding=0.0):
    """Whether two arrays agree, relative to the largest magnitude of the expected one.

    Args:
        found, expected: the arrays.
        tolerance: largest relative difference.
        rounding: absolute difference that is always allowed: rounding errors of larger numbers that cancel. Infinite
            where rounding decides integers.
    """
    if found.shape != expected.shape:
        return False
    if expected.dtype.kind == "c":
        found, expected = (np.stack([array.real, array.imag]) for array in (found, expected))
    if expected.dtype.kind != "f":
        return rounding == np.inf or bool((found == expected).all())
    with np.errstate(invalid="ignore"):  # infinities, which are compared below
        difference = np.abs(found - expected).max(initial=0.0)
    size = 0.0 if difference <= rounding else _peak(expected)
    if size < _MASKS:
        return bool(difference <= tolerance * size + rounding)
    finite, sizes = np.isfinite(expected), np.abs(expected)
    if not np.array_equal(found[~finite], expected[~finite], equal_nan=True):
        return False
    found, expected, sizes = found[finite], expected[finite], sizes[finite]
    scale = np.where(sizes < _MASKS, sizes.max(initial=1e-30, where=sizes < _MASKS), sizes)
    return bool((np.abs(found - expected) <= tolerance * scale + rounding).all())


def largest(arrays):
    """The largest magnitude in floating arrays, masks left out; 0 where there is none."""
    found = 0.0
    for array in arrays:
        array = np.abs(array) if array.dtype.kind == "c" else array
        if array.dtype.kind == "f":
            size = _peak(array)
            found = max(found, float(size if size < _MASKS else _peak(array[np.abs(array) < _MASKS])))
    return found


def _peak(array):
    """The largest magnitude in an array; NaN where it has one."""
    return max(array.max(initial=0.0), -array.min(initial=0.0))


@lru_cache(maxsize=1 << 12)
def gradient_layout(layout):
    """The layout of a tensor's gradient; None where it isn't determined by the layout (terms of an extreme)."""
    if any(op not in ("sum", "avg") for _, op in layout.partial):
        return None
    return layout.replace(partial=tuple((axis, "sum") for axis in layout.varying), varying=())


@lru_cache(maxsize=1 << 12)
def gradient_terms(layout):
    """The number of terms of an average, each of which gets as small a part of its gradient; else 1."""
    return layout.mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])


def is_tie(value, found, inputs):
    """Whether other indices than those of `value` point to equal numbers: which one is taken isn't defined.

    Args:
        value, found: global arrays of indices along a dim; a reduction drops that dim.
        inputs: the global arrays that the operator has taken.
    """
    for array in inputs if value.dtype.kind == "i" else ():
        for dim in range(array.ndim if array.ndim - value.ndim in (0, 1) else 0):
            pair = [each if each.ndim == array.ndim else np.expand_dims(each, dim) for each in (value, found)]
            shape = (*array.shape[:dim], pair[0].shape[dim], *array.shape[dim + 1 :])
            if shape == pair[0].shape and all(((each >= 0) & (each < array.shape[dim])).all() for each in pair):
                taken = [np.take_along_axis(array, each, dim) for each in pair]
                if np.array_equal(*taken):
                    return True
    return False


def expected_part(value, layout, rank):
    """The part of a global value that a rank holds, of partial tensors the sum of the terms; all without a layout."""
    # an array, of no dims, too
    return value if layout is None else value[(*_slices(layout, value.shape, rank), ...)]


def summed(waiting, key, layout, rank, term):
    """The reduced tensor of a partial one when the last rank has given its term, else None.

    Args:
        waiting: a dict for the terms that have come: (key, ranks) -> rank -> term.
        key: of the tensor.
        layout, rank, term: of the tensor; a rank, and its term.
    """
    group = layout.mesh.group(rank, tuple(axis for axis, _ in layout.partial))
    terms = waiting.setdefault((key, group), {})
    terms[rank] = term
    if len(terms) < len(group):
        return None
    return reduce_terms(waiting.pop((key, group)), layout)[rank]
