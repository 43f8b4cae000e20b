"""The device mesh: an array of ranks with named axes. Pure Python.

We say *axis* for the mesh and *dim* for a tensor, never the other way round.
"""

import math
import os

from mindformers_core.hints import nearest


def launch_rank():
    """Global rank of this process as its launcher (`msrun`, `mpirun`) set it; 0 where there was none.

    Raises:
        ValueError: `msrun` on several nodes without `--node_rank`: the rank is known only once the ranks have met.
    """
    for variable in ("RANK_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    if os.environ.get("MS_ROLE") == "MS_WORKER":
        raise ValueError(
            "msrun has not set RANK_ID, so this process doesn't know its rank yet: start msrun with --node_rank, or "
            "give the rank: mesh.sub_mesh(axes, rank)"
        )
    return 0


class Immutable:
    """A value whose class and parts, which `__reduce__` gives, say which others it equals; `_hash` is its hash."""

    __slots__ = ()

    def __setattr__(self, name, value):
        raise AttributeError(f"a {type(self).__name__} is immutable; can't set {name}")

    def __eq__(self, other):
        if self is other:
            return True
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._hash == other._hash and self.__reduce__() == other.__reduce__()

    def __hash__(self):
        return self._hash


class DeviceMesh(Immutable):
    """Ranks laid out row-major over named axes: the last axis is the one whose neighbours have adjacent ranks.

    Immutable, hashable, and of constant cost for any number of ranks unless `rank_list` is given.

    Args:
        shape: size of every axis, each at least 1.
        axis_names: one identifier per axis; no two alike.
        rank_list: the global ranks in row-major order; default `range(prod(shape))`.

    Raises:
        TypeError: a size is not an int, or a name not a str.
        ValueError: sizes, names and ranks don't fit each other.
    """

    __slots__ = ("shape", "axis_names", "rank_list", "size", "_sizes", "_strides", "_positions", "_hash")

    def __init__(self, shape, axis_names, rank_list=None):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        axis_names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        _check_axes(shape, axis_names)
        size = math.prod(shape)
        rank_list = range(size) if rank_list is None else _as_ranks(rank_list)
        if len(rank_list) != size:
            raise ValueError(
                f"rank_list has {len(rank_list)} ranks, but a mesh of {_describe(shape, axis_names)} has "
                f"{size}: give {size} ranks, or sizes whose product is {len(rank_list)}"
            )
        positions = rank_list  # of a range from 0 on each entry is its own position
        if not isinstance(rank_list, range):
            positions = {rank: position for position, rank in enumerate(rank_list)}
            if len(positions) != size:
                raise ValueError(f"rank_list names a rank twice: {sorted(rank_list)[:16]}")
        strides = {name: math.prod(shape[index + 1 :]) for index, name in enumerate(axis_names)}
        sizes = dict(zip(axis_names, shape))
        values = shape, axis_names, rank_list, size, sizes, strides, positions, hash((shape, axis_names, rank_list))
        for name, value in zip(self.__slots__, values):
            object.__setattr__(self, name, value)

    def __reduce__(self):
        return DeviceMesh, (self.shape, self.axis_names, self.rank_list)

    @property
    def ndim(self):
        """Number of axes."""
        return len(self.shape)

    def axis_size(self, *axes):
        """Product of the sizes of `axes`: 1 for none.

        Raises:
            ValueError: an axis that this mesh doesn't have.
        """
        self.check_axes(axes)
        return math.prod([self._sizes[axis] for axis in axes])

    def check_axes(self, axes):
        """Raise `ValueError`, with the nearest known name, for the first of `axes` that is not one of ours."""
        for axis in axes:
            if axis not in self._strides:
                raise ValueError(
                    f"unknown mesh axis {axis!r}: the mesh has {_describe(self.shape, self.axis_names)}"
                    + nearest(axis, self.axis_names)
                )

    def __contains__(self, rank):
        return rank in self._positions

    def position(self, rank):
        """Index of `rank` in row-major order.

        Raises:
            ValueError: the rank is not in this mesh.
        """
        if rank not in self:
            raise ValueError(f"rank {rank} is not in {self}")
        return self._positions[rank]

    def coordinate(self, rank, axes=None):
        """Coordinates of `rank`: one int for every axis of `axes` (default: all axes, in order)."""
        position = self.position(rank)
        axes = self.axis_names if axes is None else axes
        return tuple(position // self._strides[axis] % self._sizes[axis] for axis in axes)

    def group_index(self, rank, axes):
        """Place of `rank` in its group over `axes`, the first axis named being the slowest (major)."""
        index = 0
        for axis, coordinate in zip(axes, self.coordinate(rank, axes)):
            index = index * self._sizes[axis] + coordinate
        return index

    def group(self, rank, axes):
        """The ranks that differ from `rank` only along `axes`, in `group_index` order (major to minor)."""
        base = self.position(rank)
        for axis, coordinate in zip(axes, self.coordinate(rank, axes)):
            base -= coordinate * self._strides[axis]
        return tuple(self.rank_list[position] for position in self._span(base, axes))

    def groups(self, axes):
        """All groups over `axes`, as a tuple of tuples of ranks: together they are the mesh, once."""
        self.check_axes(axes)
        others = tuple(name for name in self.axis_names if name not in axes)
        return tuple(
            tuple(self.rank_list[position] for position in self._span(base, axes)) for base in self._span(0, others)
        )

    def sub_mesh(self, axes, rank=None):
        """The mesh of the group over `axes` that `rank` is in; default: this process's rank (`launch_rank`).

        Raises:
            ValueError: an unknown axis, or a rank that is not in this mesh.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        self.check_axes(axes)
        rank = launch_rank() if rank is None else rank
        if rank not in self:
            raise ValueError(
                f"rank {rank} is not in {self!r}, so it has no {axes} group: name one with sub_mesh(axes, rank)"
            )
        return DeviceMesh(tuple(self.axis_size(axis) for axis in axes), axes, self.group(rank, axes))

    def __getitem__(self, axes):
        return self.sub_mesh(axes)

    def split_axis(self, axis, **sizes):
        """The mesh of the same ranks with several axes in the place of one.

        >>> init_device_mesh((8, 2), ("dp", "tp")).split_axis("dp", dp_replicate=2, dp_shard=4)
        DeviceMesh((2, 4, 2), ('dp_replicate', 'dp_shard', 'tp'))

        Args:
            axis: the axis to split.
            sizes: name of each new axis -> its size, major to minor.

        Raises:
            ValueError: an unknown axis, names that the mesh has, or sizes whose product isn't that of the axis.
        """
        size, place = self.axis_size(axis), self.axis_names.index(axis)
        if math.prod(sizes.values()) != size:
            shown = " x ".join(f"{name} {part}" for name, part in sizes.items())
            raise ValueError(f"split_axis('{axis}'): {shown} is not the axis's size {size} in {self}")
        shape = (*self.shape[:place], *sizes.values(), *self.shape[place + 1 :])
        return DeviceMesh(shape, (*self.axis_names[:place], *sizes, *self.axis_names[place + 1 :]), self.rank_list)

    def _span(self, base, axes):
        positions = [base]
        for axis in axes:
            stride = self._strides[axis]
            steps = range(self.axis_size(axis))
            positions = [position + step * stride for position in positions for step in steps]
        return positions

    def __str__(self):
        return f"({_describe(self.shape, self.axis_names)})"

    def __repr__(self):
        ranks = "" if isinstance(self.rank_list, range) else f", rank_list={list(self.rank_list)}"
        return f"DeviceMesh({self.shape}, {self.axis_names}{ranks})"


def init_device_mesh(shape, axis_names, rank_list=None):
    """Make a `DeviceMesh`; see there for arguments and errors.

    >>> mesh = init_device_mesh((2, 4), ("dp", "tp"))
    >>> mesh.coordinate(6), mesh.group(6, ("tp",))
    ((1, 2), (4, 5, 6, 7))
    """
    return DeviceMesh(shape, axis_names, rank_list)


def _as_ranks(rank_list):
    """`rank_list` as a range where it is 0, 1, 2, … (so that equal meshes hash alike), else as a tuple."""
    ranks = tuple(rank_list)
    for rank in ranks:
        if not isinstance(rank, int) or rank < 0:
            raise ValueError(f"a rank is a whole number from 0 up, not {rank!r}")
    return range(len(ranks)) if ranks == tuple(range(len(ranks))) else ranks


def _check_axes(shape, axis_names):
    if len(shape) != len(axis_names):
        raise ValueError(
            f"mesh shape {shape} has {len(shape)} axes, but axis_names {axis_names} names {len(axis_names)}"
        )
    if not shape:
        raise ValueError("a mesh needs at least one axis; a single device is init_device_mesh((1,), ('dp',))")
    for size, name in zip(shape, axis_names):
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"mesh axis {name!r}: {size!r} should be a str and an int")
        if size < 1:
            raise ValueError(f"mesh axis '{name}' has size {size}: an axis has at least 1")
        if not name.isidentifier() or name == "None":
            raise ValueError(f"mesh axis name {name!r} should be an identifier other than 'None'")
        if axis_names.count(name) > 1:
            raise ValueError(f"mesh axis '{name}' is named twice in {axis_names}")


def _describe(shape, axis_names):
    return ", ".join(f"{name}={size}" for name, size in zip(axis_names, shape))
