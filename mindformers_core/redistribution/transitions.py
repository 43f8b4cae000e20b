"""The states of the search for a plan, and every single step that leads from one to another. Pure Python."""

from functools import lru_cache
from itertools import combinations, permutations, product
from math import gcd, prod
from os.path import commonprefix

from mindformers_core.layout import Layout
from mindformers_core.placement import axes_in, parts_of
from mindformers_core.redistribution.steps import EXTREMES, STEP_KINDS

# Marks of an axis in a state; a partial axis is marked with its op.
SHARD, REPLICATE, VARYING = "shard", "replicate", "varying"


def compatible(ops):
    """Whether partials of all of `ops` may stand in one layout: sums and averages commute, nothing else does."""
    kinds = {op if op in EXTREMES else "sum" for op in ops}
    return len(kinds) < 2


class SearchSpace:
    """The states of a search: the placements of the moving axes; the other axes keep theirs.

    A state is `(dims, marks)`: for every tensor dim the moving axes that shard it, major to minor, and for every moving
    axis its mark.

    Attributes:
        axes, sizes: the moving axes, and the size of each.
        rooms: size of each tensor dim per rank before the moving axes shard it.
        twins: for each dim the earlier dims that are interchangeable with it.
        ops: partial ops that a step may introduce.
        fixed_ops: partial ops of the other axes.
    """

    def __init__(self, source, target, shape, itemsize):
        mesh = source.mesh
        kept = [commonprefix(pair) for pair in zip(source.dims, target.dims)]
        sharding = {axis for axes in source.dims for axis in axes}
        still = {axis for axis in mesh.axis_names if source.placement(axis) == target.placement(axis)} - sharding
        still |= {axis for axes in kept for axis in axes}
        self.mesh, self.kept = mesh, kept
        self.axes = tuple(axis for axis in mesh.axis_names if axis not in still)
        self.sizes = {axis: mesh.axis_size(axis) for axis in self.axes}
        self.rooms = tuple(size // parts_of(mesh, entry) for size, entry in zip(shape, kept))
        self.whole = prod(shape) // mesh.axis_size(*(axis for entry in kept for axis in axes_in(entry))) * itemsize
        self.twins = _twins(self.rooms, source.dims, target.dims, self.size(self.axes))
        self.fixed_partial = tuple(pair for pair in source.partial if pair[0] in still)
        self.fixed_varying = tuple(axis for axis in source.varying if axis in still)
        self.fixed_ops = tuple(op for _, op in self.fixed_partial)
        moving_ops = [op for axis, op in source.partial + target.partial if axis in self.sizes]
        self.ops = tuple(dict.fromkeys((*moving_ops, "sum")))

    def size(self, axes):
        """Number of shards of a dim that is sharded over `axes`."""
        return prod([self.sizes[axis] for axis in axes])

    def state(self, layout):
        """The state of a layout of this space."""
        dims = tuple(axes[len(kept) :] for axes, kept in zip(layout.dims, self.kept))
        marks = dict(layout.partial) | dict.fromkeys(layout.varying, VARYING)
        marks |= {axis: SHARD for axes in dims for axis in axes}
        return dims, tuple(marks.get(axis, REPLICATE) for axis in self.axes)

    def layout(self, dims, marks):
        """The layout of a state."""
        marked = list(zip(self.axes, marks))
        partial = tuple(pair for pair in marked if pair[1] not in (SHARD, REPLICATE, VARYING))
        varying = tuple(axis for axis, mark in marked if mark == VARYING)
        whole_dims = [kept + axes for kept, axes in zip(self.kept, dims)]
        return Layout.on(self.mesh, whole_dims, self.fixed_partial + partial, self.fixed_varying + varying)

    def local_bytes(self, marks):
        """Bytes of a rank's tensor in a state with these marks."""
        return self.whole // self.size([axis for axis, mark in zip(self.axes, marks) if mark == SHARD])


def _twins(rooms, dims, to_dims, parts):
    """For every dim the earlier ones that may stand for it: no layout shards either, and both take the same slices."""
    spare = [gcd(room, parts) if not any(used) else None for room, used in zip(rooms, zip(dims, to_dims))]
    return tuple(
        tuple(other for other in range(dim) if spare[dim] and spare[other] == spare[dim]) for dim in range(len(rooms))
    )


def transitions(space, dims, marks):
    """Yield `(kind, axes, dim, to_dim, op, state)` for every step from the state `(dims, marks)` of a `SearchSpace`."""
    held = [mark for mark in marks if mark not in (SHARD, REPLICATE, VARYING)]
    usable = [dim for dim, axes in enumerate(dims) if axes or all(dims[twin] for twin in space.twins[dim])]
    for mark in dict.fromkeys(marks):
        changes = [
            change
            for change in _mark_changes(mark, space.ops)
            if change[1] in (None, mark) or compatible((change[1], *held, *space.fixed_ops))
        ]
        if mark == SHARD:
            yield from _unshard(space, dims, marks, changes, usable)
            yield from _permute(space, dims, marks)
            continue
        members = tuple(axis for axis, other in zip(space.axes, marks) if other == mark)
        for kind, op, to_mark in changes:
            for axes in _selections(permutations if to_mark == SHARD else combinations, members):
                after = _marked(space, marks, axes, to_mark)
                if to_mark != SHARD:
                    yield kind, axes, None, None, op, (dims, after)
                    continue
                for dim in usable:
                    sharding = dims[dim] + axes
                    if space.rooms[dim] % space.size(sharding) == 0:
                        yield kind, axes, dim, None, op, (_with(dims, dim, sharding), after)


@lru_cache(maxsize=1024)
def _mark_changes(mark, ops):
    """`(kind, op, mark after)` of every row of `STEP_KINDS` that changes `mark`; partials by `ops`."""
    return [(kind, op, after) for kind, op, before, after in changes_by_kind((SHARD,), ops) if before == mark]


def changes_by_kind(shards, ops):
    """`(kind, op, mark before, mark after)` of every row of `STEP_KINDS`.

    `shards` are the marks of axes that shard, `ops` those of partial ones.
    """
    marks = {"shard": shards, "replicate": (REPLICATE,), "varying": (VARYING,), "partial": ops, "": ()}
    for kind, row in STEP_KINDS.items():
        for before, after in product(marks[row.source], marks[row.target]):
            op = next((mark for mark in (before, after) if mark in ops), None)
            if before != after and op in (None, *row.ops):
                yield kind, op, before, after


def _unshard(space, dims, marks, changes, usable):
    """Steps on the minor-most axes of a dim: change their mark, or move them to another dim."""
    for dim, axes in enumerate(dims):
        for start in range(len(axes)):
            minor, rest = axes[start:], _with(dims, dim, axes[:start])
            for kind, op, to_mark in changes:
                yield kind, minor, dim, None, op, (rest, _marked(space, marks, minor, to_mark))
            for to_dim in usable:
                sharding = dims[to_dim] + minor
                if to_dim != dim and space.rooms[to_dim] % space.size(sharding) == 0:
                    yield "all_to_all", minor, dim, to_dim, None, (_with(rest, to_dim, sharding), marks)


def _permute(space, dims, marks):
    """Steps that exchange whole local tensors: every dim has as many shards as before, over other axes."""
    axes = tuple(axis for axis, mark in zip(space.axes, marks) if mark == SHARD)
    if len(axes) > 1:
        for arranged in _arrangements(axes, tuple(space.size(cut) for cut in dims), space.size):
            if arranged != dims:
                yield "permute", _changed_axes(space, dims, arranged), None, None, None, (arranged, marks)


def _changed_axes(space, dims, arranged):
    """The axes along which a rank and the one it sends to differ: those that count another dim, or in other strides."""
    before, after = (
        {axis: (dim, space.size(axes[place + 1 :])) for dim, axes in enumerate(each) for place, axis in enumerate(axes)}
        for each in (dims, arranged)
    )
    return tuple(axis for axis in space.axes if before.get(axis) != after.get(axis))


def _arrangements(axes, counts, size):
    """All assignments of `axes` to dims such that dim i has `counts[i]` shards."""
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


def _marked(space, marks, axes, mark):
    return tuple([mark if axis in axes else old for axis, old in zip(space.axes, marks)])


def _with(dims, dim, axes):
    return dims[:dim] + (axes,) + dims[dim + 1 :]


@lru_cache(maxsize=1024)
def _selections(select, members):
    return tuple(axes for length in range(1, len(members) + 1) for axes in select(members, length))
