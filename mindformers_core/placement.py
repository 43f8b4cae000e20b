"""Placements of a tensor on one mesh axis: sharded, replicated, varying or partial. Pure Python.

The *entry* of a tensor dim in a layout has the axes that shard it, major to minor, and among them numbers of blocks
that lie whole on each rank: see `Layout.dims`.
"""

from dataclasses import dataclass
from math import prod

from mindformers_core.hints import nearest

PARTIAL_OPS = ("sum", "max", "min", "avg")


@dataclass(frozen=True)
class Shard:
    """The local tensor is a slice of the global one along tensor dim `dim`."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """The local tensor is the whole tensor, equal on all ranks along the axis."""


@dataclass(frozen=True)
class Varying:
    """As `Replicate`, but consumers differ along the axis: the gradient is a partial sum."""


@dataclass(frozen=True)
class Partial:
    """The local tensor is one term of a reduction along the axis: `op` is `sum`, `max`, `min` or `avg`."""

    op: str = "sum"

    def __post_init__(self):
        if self.op not in PARTIAL_OPS:
            raise ValueError(
                f"Partial({self.op!r}): a partial is one of {', '.join(PARTIAL_OPS)}{nearest(self.op, PARTIAL_OPS)}"
            )


def axes_in(entry):
    """The axes of an entry of `Layout.dims`, without numbers of blocks."""
    return tuple([each for each in entry if not isinstance(each, int)])


def parts_of(mesh, entry):
    """The number of equal parts that an entry of `Layout.dims` divides a dim into: those of ranks times blocks."""
    return prod([each if isinstance(each, int) else mesh.axis_size(each) for each in entry])


def entry_of(entry, axes):
    """An entry of `Layout.dims` without axes that aren't among `axes`, and with as few numbers as possible."""
    found = []
    for each in entry:
        if isinstance(each, int) and found and isinstance(found[-1], int):
            found[-1] *= each
        elif each in axes or isinstance(each, int) and each > 1:
            found.append(each)
    return tuple(found[:-1] if found and isinstance(found[-1], int) else found)


def split_entry(mesh, entry, sizes):
    """The entries of some factors of a dim, of these sizes, major to minor; and what spans two of them, if anything."""
    rest, found = list(entry), []
    for room in sizes:
        own = []
        while rest and room > 1:
            count = parts_of(mesh, rest[:1])
            if isinstance(rest[0], int) and count % room == 0:  # blocks over this factor and the next
                own, rest[:1], room = [*own, room], [count // room] * (count > room), 1
            elif room % count == 0:
                own, room = [*own, rest.pop(0)], room // count
            else:
                break
        found.append(entry_of(own, mesh.axis_names))
        if room != 1:
            break
    return found + [()] * (len(sizes) - len(found)), rest


def merged_entry(mesh, entries, sizes):
    """The entry of a dim that merges factors of these entries and sizes, major to minor."""
    if not any(entries):
        return ()
    parts = ((*own, size // parts_of(mesh, own)) for own, size in zip(entries, sizes))
    return entry_of([each for part in parts for each in part], mesh.axis_names)


def entries_shown(dims):
    """The entries of all dims as text: `[dp, -, (4, tp)]`."""
    shown = [entry if isinstance(entry, str) else ", ".join(map(str, entry)) for entry in dims]
    return "[" + ", ".join(f"({each})" if "," in each else each or "-" for each in shown) + "]"


def runs_of(mesh, entry, size, rank):
    """The slices of a dim of this size that `rank` holds by its entry, in ascending order."""
    starts = [0]
    for each in entry:
        size //= parts_of(mesh, (each,))
        places = range(each) if isinstance(each, int) else mesh.coordinate(rank, (each,))
        starts = [start + place * size for start in starts for place in places]
    return tuple(slice(start, start + size) for start in starts)


def open_mesh(runs):
    """The index of NumPy for some `slice`s of every dim: nested lists of positions, one dim each."""
    index = []
    for after, slices in enumerate(reversed(runs)):
        positions = [place for each in slices for place in range(each.start, each.stop)]
        for _ in range(after):
            positions = [[place] for place in positions]
        index.insert(0, positions)
    return tuple(index)
