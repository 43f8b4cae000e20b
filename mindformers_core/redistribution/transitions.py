"""Every single step that can be taken from a state of the search for a plan. Pure Python."""

from functools import lru_cache
from itertools import combinations, permutations

from mindformers_core.redistribution.steps import EXTREMES

__all__ = ["REPLICATE", "SHARD", "VARYING", "compatible", "transitions"]

# Marks of an axis in a state; a partial axis is marked with its op.
SHARD, REPLICATE, VARYING = "shard", "replicate", "varying"


def compatible(ops):
    """Whether partials of all of `ops` may stand in one layout: sums and averages commute, nothing else does."""
    kinds = {op if op in EXTREMES else "sum" for op in ops}
    return len(kinds) < 2


def transitions(space, dims, marks):
    """Yield `(kind, axes, dim, to_dim, op, state)` for every step from a state `(dims, marks)`.

    Args:
        space: the search space: `axes`, `sizes`, `rooms` (size of each dim before these axes cut it), `twins`
            (for each dim those that may stand for it), `ops` (what may become partial) and `fixed_ops` (what is
            partial on other axes).
        dims: for every tensor dim the axes of `space` that shard it, major to minor.
        marks: for every axis of `space` its mark.
    """
    for mark in dict.fromkeys(marks):
        if mark == SHARD:
            yield from _unshard(space, dims, marks)
            yield from _permute(space, dims, marks)
        else:
            members = tuple(axis for axis, other in zip(space.axes, marks) if other == mark)
            yield from _shard(space, dims, marks, mark, members)
            yield from _remark(space, dims, marks, mark, members)


def _shard(space, dims, marks, mark, members):
    """Steps that cut a dim further, by axes that are all replicated, varying, or partial."""
    kind = {REPLICATE: "slice", VARYING: "slice_varying"}.get(mark, "reduce_scatter")
    op = mark if kind == "reduce_scatter" else None
    usable = _usable_dims(space, dims)
    for axes in _ordered(members):
        marked = _marked(space, marks, axes, SHARD)
        for dim in usable:
            cut = dims[dim] + axes
            if space.rooms[dim] % space.size(cut) == 0:
                yield kind, axes, dim, None, op, (_with(dims, dim, cut), marked)


def _remark(space, dims, marks, mark, members):
    """Steps that shard nothing: reductions, marks, and what makes a whole tensor partial."""
    if mark == REPLICATE:
        kinds = [("mark_varying", None, VARYING)] + [("to_partial", op, op) for op in space.ops]
    elif mark == VARYING:
        kinds = [("unmark_varying", None, REPLICATE)]
        kinds += [("to_partial_varying", "sum", "sum")] if "sum" in space.ops else []
    else:
        kinds = [("all_reduce", mark, REPLICATE)]
        kinds += [] if mark in EXTREMES else [("all_reduce_varying", mark, VARYING)]
    for kind, op, to_mark in kinds:
        if kind.startswith("to_partial") and not _may_be_partial(space, marks, op):
            continue
        for axes in _unordered(members):
            yield kind, axes, None, None, op, (dims, _marked(space, marks, axes, to_mark))


def _unshard(space, dims, marks):
    """Steps on the minor-most axes of a dim: gather them, move them to another dim, or pad what they cut."""
    usable = _usable_dims(space, dims)
    for dim, axes in enumerate(dims):
        for start in range(len(axes)):
            minor, rest = axes[start:], _with(dims, dim, axes[:start])
            yield "all_gather", minor, dim, None, None, (rest, _marked(space, marks, minor, REPLICATE))
            yield "all_gather_varying", minor, dim, None, None, (rest, _marked(space, marks, minor, VARYING))
            if "sum" in space.ops and _may_be_partial(space, marks, "sum"):
                yield "pad", minor, dim, None, "sum", (rest, _marked(space, marks, minor, "sum"))
            for to_dim in usable:
                cut = dims[to_dim] + minor
                if to_dim != dim and space.rooms[to_dim] % space.size(cut) == 0:
                    yield "all_to_all", minor, dim, to_dim, None, (_with(rest, to_dim, cut), marks)


def _usable_dims(space, dims):
    """The dims that a step may shard: of spare dims that are alike, and still whole, only the first."""
    return [dim for dim, axes in enumerate(dims) if axes or all(dims[twin] for twin in space.twins[dim])]


def _permute(space, dims, marks):
    """Steps that give every rank another one's whole local tensor: the same cuts, made by the axes in another way."""
    axes = tuple(axis for axis, mark in zip(space.axes, marks) if mark == SHARD)
    if len(axes) > 1:
        for arranged in _arrangements(axes, tuple(space.size(cut) for cut in dims), space.size):
            if arranged != dims:
                yield "permute", _changed_axes(space, dims, arranged), None, None, None, (arranged, marks)


def _changed_axes(space, dims, arranged):
    """The axes along which a rank and the one it sends to differ: those that count another dim, or in other strides."""
    before, after = _strides(space, dims), _strides(space, arranged)
    return tuple(axis for axis in space.axes if before.get(axis) != after.get(axis))


def _strides(space, dims):
    """For every axis that shards: its dim, and how many slices lie between neighbours along it."""
    places = ((dim, axes, place) for dim, axes in enumerate(dims) for place in range(len(axes)))
    return {axes[place]: (dim, space.size(axes[place + 1 :])) for dim, axes, place in places}


def _arrangements(axes, counts, size):
    """All ways to put all of `axes` on dims so that dim i is cut into `counts[i]`."""
    if not counts:
        if not axes:
            yield ()
        return
    for length in range(len(axes) + 1) if counts[0] > 1 else (0,):
        for cut in permutations(axes, length):
            if size(cut) == counts[0]:
                left = tuple(axis for axis in axes if axis not in cut)
                for rest in _arrangements(left, counts[1:], size):
                    yield (cut, *rest)


def _may_be_partial(space, marks, op):
    held = [mark for mark in marks if mark not in (SHARD, REPLICATE, VARYING)]
    return compatible((op, *held, *space.fixed_ops))


def _marked(space, marks, axes, mark):
    return tuple([mark if axis in axes else old for axis, old in zip(space.axes, marks)])


def _with(dims, dim, axes):
    return dims[:dim] + (axes,) + dims[dim + 1 :]


@lru_cache(maxsize=1024)
def _ordered(members):
    return tuple(axes for length in range(1, len(members) + 1) for axes in permutations(members, length))


@lru_cache(maxsize=1024)
def _unordered(members):
    return tuple(axes for length in range(1, len(members) + 1) for axes in combinations(members, length))
