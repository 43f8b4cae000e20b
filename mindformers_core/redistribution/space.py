"""What a search for a plan may do: which axes move, on which dims, and what stays as it is. Pure Python."""

from math import gcd, prod
from os.path import commonprefix

from mindformers_core.layout import Layout
from mindformers_core.redistribution.transitions import REPLICATE, SHARD, VARYING

__all__ = ["SearchSpace"]


class SearchSpace:
    """The states that a search visits: the placements of the moving axes; the other axes stay as they are.

    A state is `(dims, marks)`: the moving axes on every tensor dim, and a mark of every moving axis (`transitions`).
    """

    def __init__(self, source, target, shape, itemsize):
        mesh = source.mesh
        kept = [commonprefix(pair) for pair in zip(source.dims, target.dims)]
        still = {axis for axes in kept for axis in axes}
        still |= {axis for axis in mesh.axis_names if axis not in still and _unsharded_alike(source, target, axis)}
        self.mesh, self.kept = mesh, kept
        self.axes = tuple(axis for axis in mesh.axis_names if axis not in still)
        self.sizes = {axis: mesh.axis_size(axis) for axis in self.axes}
        self.rooms = tuple(size // mesh.axis_size(*axes) for size, axes in zip(shape, kept))
        self.whole = prod(self.rooms) * itemsize
        self.twins = _twins(self.rooms, source.dims, target.dims, self.size(self.axes))
        self.fixed_partial = tuple(pair for pair in source.partial if pair[0] in still)
        self.fixed_varying = tuple(axis for axis in source.varying if axis in still)
        self.fixed_ops = tuple(op for _, op in self.fixed_partial)
        moving_ops = [op for axis, op in source.partial + target.partial if axis in self.sizes]
        self.ops = tuple(dict.fromkeys((*moving_ops, "sum")))

    def size(self, axes):
        """Number of shards that `axes` cut a dim into."""
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


def _unsharded_alike(source, target, axis):
    sharded = any(axis in axes for axes in source.dims + target.dims)
    return not sharded and source.placement(axis) == target.placement(axis)
