"""Boxes of global tensors: their overlaps, their bytes in a row-major file, and the rank that writes each. Pure Python.

A box is a tuple with `(start, stop)` for every dim; that of a scalar is `()`.
"""

from bisect import bisect_left, bisect_right
from itertools import product
from math import prod

from mindformers_core.grouping import grouped


def whole(shape):
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def local_box(layout, shape, rank):
    """The box of a tensor of the global `shape` that `rank` holds in a `Layout`."""
    return tuple((part.start, part.stop) for part in layout.local_slices(shape, rank))


def shape_of(box):
    """Size of every dim of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box):
    """Number of elements of a box."""
    return prod(shape_of(box))


def overlap(one, other):
    """The box of the elements that two boxes of a tensor share; None for none."""
    box = tuple((max(first), min(last)) for first, last in (zip(*dim) for dim in zip(one, other)))
    return box if all(start < stop for start, stop in box) else None


def inside(box, outer):
    """The slices of an array that holds the box `outer` for a `box` in it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer))


def cells(boxes, shape):
    """Disjoint boxes that make up a tensor, and the ranks that hold each: a dict, box -> tuple of ranks.

    Boxes of the result are those of the ranks where these are equal or disjoint, or else their common parts.

    Args:
        boxes: pairs (rank, box).
        shape: of the tensor.

    Raises:
        ValueError: elements that no rank holds.
    """
    held, found = grouped((box, rank) for rank, box in boxes), {}
    edges = [sorted({edge for box in held for edge in box[dim]}) for dim in range(len(shape))]
    for box, ranks in held.items():
        spans = []
        for (start, stop), marks in zip(box, edges):
            marks = marks[bisect_left(marks, start) : bisect_right(marks, stop)]
            spans.append(tuple(zip(marks, marks[1:])))
        for cell in product(*spans):
            found.setdefault(cell, []).extend(ranks)
    missing = prod(shape) - sum(map(volume, found))
    if missing:
        raise ValueError(f"{missing} of the {prod(shape)} elements of shape {tuple(shape)} are on no rank")
    return {cell: tuple(ranks) for cell, ranks in found.items()}


def split(box, most):
    """A list of boxes of at most `most` elements that make up `box`, cut along the first dims."""
    if volume(box) <= most:
        return [box]
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    (start, stop), inner = box[dim], prod(shape_of(box[dim + 1 :]))
    step = max(1, most // inner)
    parts = [(*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]) for first in range(start, stop, step)]
    return [piece for part in parts for piece in split(part, most)]


def runs(box, shape):
    """The contiguous runs of a box in a row-major tensor: `(starts, length)`, in elements, in the order of the box.

    No two runs touch, so a box of whole rows is one run.

    Args:
        box: of the tensor.
        shape: of the tensor.

    Returns:
        `starts`: an iterator of the flat index of each run's first element; `length`: of each run.
    """
    if not volume(box):
        return iter(()), 0
    dim = len(shape)
    while dim > 0 and box[dim - 1] == (0, shape[dim - 1]):
        dim -= 1
    dim = max(dim - 1, 0)  # dims from here on are one run
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    first = sum(start * stride for (start, _), stride in zip(box[dim:], strides[dim:]))
    outer = product(
        *(range(start * stride, stop * stride, stride) for (start, stop), stride in zip(box, strides[:dim]))
    )
    return (first + sum(starts) for starts in outer), volume(box[dim:])


def balanced(sizes, holders):
    """The rank that writes each piece, so that each is written once, and ranks write about as much.

    The largest pieces are given away first, each to that holder which has least so far (Graham, "Bounds on
    multiprocessing timing anomalies", 1969).

    Args:
        sizes: of the pieces.
        holders: of each piece the ranks that hold it.

    Returns:
        A list of ranks, one for every piece.
    """
    written, writers = {}, [None] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        writers[piece] = min(holders[piece], key=lambda rank: (written.get(rank, 0), rank))
        written[writers[piece]] = written.get(writers[piece], 0) + sizes[piece]
    return writers
