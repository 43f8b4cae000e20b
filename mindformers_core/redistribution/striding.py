"""Strided dims as several ordinary dims, so that collectives gather or exchange slices. Pure Python."""

from itertools import accumulate
from math import prod
from operator import mul

from mindformers_core.layout import Layout
from mindformers_core.placement import merged_entry, parts_of, split_entry


def split_dims(source, target, shape):
    """Two layouts and the shape of a tensor after a view in which every dim that differs is ordinary in both.

    A dim is split behind every number of blocks in either of its entries.

    Args:
        source, target: two `Layout`s.
        shape: shape of the global tensor.

    Returns:
        `(source, target, shape)`; None where an axis of one layout spans a place at which the other one is split.
    """
    places, sizes = ([], []), []
    for size, *entries in zip(shape, source.dims, target.dims):
        known = {place for entry in entries for place in _ends_of_blocks(source.mesh, entry)}
        ends = [1, *sorted(known), size] if entries[0] != entries[1] else [1, size]
        if any(end % start for start, end in zip(ends, ends[1:])):
            return None
        parts = [end // start for start, end in zip(ends, ends[1:])]
        sizes += parts
        for found, entry in zip(places, entries):
            split, spanning = ([entry], ()) if len(parts) == 1 else split_entry(source.mesh, entry, parts)
            if spanning:
                return None
            found += split
    one, other = (Layout.on(at.mesh, dims, at.partial, at.varying) for at, dims in zip((source, target), places))
    return one, other, tuple(sizes)


def merge_dims(layout, sizes, shape):
    """The layout of a tensor in dims of `shape`, each of which is one or more dims of `sizes`, placed by `layout`."""
    rest, dims = list(zip(layout.dims, sizes)), []
    for size in shape:
        parts = [rest.pop(0)]
        while prod(part for _, part in parts) < size:
            parts.append(rest.pop(0))
        dims.append(merged_entry(layout.mesh, *zip(*parts)))
    return layout.replace(dims=dims)


def _ends_of_blocks(mesh, entry):
    """The numbers of parts at which an entry of a layout is no longer ordinary."""
    parts = accumulate((parts_of(mesh, (each,)) for each in entry), mul)
    return [count for each, count in zip(entry, parts) if isinstance(each, int)]
