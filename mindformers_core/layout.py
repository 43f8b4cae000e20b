"""Layouts of tensors on a mesh: placements, the mesh-free `layout(...)` specification, bound `Layout`s. Pure Python.

A `Layout` gives one tensor a placement on **every** axis of a mesh. `Varying` is the whole tensor, alike on all ranks,
but consumed by work that differs along the axis, so that its gradient is `Partial("sum")`; the idea is that of JAX's
`shard_map` (`pvary`) and of Megatron-LM's *f* function.

A dim is *strided* where axes shard it below a part that they don't shard: a batch that is merged behind a sequence.
PyTorch's DTensor knows such cuts as `_StridedShard`.
"""

from dataclasses import dataclass
from functools import lru_cache

from mindformers_core.hints import near_multiples
from mindformers_core.mesh import DeviceMesh, Immutable
from mindformers_core.placement import (
    PARTIAL_OPS,
    Partial,
    Replicate,
    Shard,
    Varying,
    axes_in,
    entries_shown,
    entry_of,
    open_mesh,
    parts_of,
    runs_of,
)  # fmt: skip
from mindformers_core.scopes import errors_at

__all__ = ["Shard", "Replicate", "Partial", "Varying", "LayoutSpec", "layout", "Layout", "bind_layout", "PARTIAL_OPS"]


@dataclass(frozen=True, repr=False)
class LayoutSpec:
    """The result of `layout(...)`: entries for tensor dims, not yet bound to a mesh.

    `entries[i]` is a tuple of axis names, major to minor, empty where the dim isn't sharded; at most one entry is
    `...`, which stands for all dims that the others leave over, as they arrive. `pad`: see `layout`.
    """

    entries: tuple
    pad: bool | tuple = False

    def bind(self, mesh, ndim=None, arriving=None, name="tensor"):
        """The `Layout` of a tensor of `ndim` dims on `mesh`.

        Dims past the last entry are not sharded. The dims of `...` keep the sharding that they have in `arriving`
        (default: none), save for axes that another entry names.

        Raises:
            ValueError: an axis that the mesh doesn't have, an axis used twice, or more entries than dims.
        """
        with errors_at(f"{name}: layout {self}: ", kinds=(ValueError,)):
            return Layout.on(mesh, self._dims(mesh, ndim, arriving))

    def _dims(self, mesh, ndim, arriving):
        dims = [entry if entry is ... else _resolve_axes(entry, mesh) for entry in self.entries]
        named = len(dims) - (... in dims)
        ndim = named if ndim is None else ndim
        if named > ndim:
            raise ValueError(f"it has {named} entries, but the tensor has {ndim} dims: drop {named - ndim}")
        if ... in dims:
            place = dims.index(...)
            used = {axis for entry in dims if entry is not ... for axis in entry}
            left_over = range(place, place + ndim - named)
            kept = [arriving.dims[dim] if arriving is not None else () for dim in left_over]
            dims[place : place + 1] = [tuple(axis for axis in entry if axis not in used) for entry in kept]
        return dims + [()] * (ndim - len(dims))

    def __repr__(self):
        return f"layout{self}" + " padded" * bool(self.pad)

    def __str__(self):
        return entries_shown(["..." if entry is ... else entry for entry in self.entries])


def layout(*entries, pad=False):
    """A mesh-free layout, one entry per tensor dim, as `shard()` hooks write it (RFC ICY7S6).

    An entry is an axis name; a tuple of axis names, major to minor; `"cp_dp"`, which means `("cp", "dp")` where no axis
    is called `cp_dp`; `"None"` or `None` for a dim that isn't sharded; or (once) `...` for all remaining dims as
    they arrive: `layout(..., "tp")` speaks of the last dim alone.

    With `pad=True`, of a weight only, ranks store zeros behind the end of a dim that its axes don't divide, so that
    all parts are equal; with the sizes of the parts, `pad=(10, 20, 30, 4)`, behind each part, where one dim is cut.
    Code and files have the weight without them; see `tensor_parallel.with_padding` and `manual_split`.

    Raises:
        TypeError: an entry, or `pad`, of another type.
        ValueError: `...` more than once.
    """
    cleaned = tuple(_clean_entry(entry) for entry in entries)
    if cleaned.count(...) > 1:
        raise ValueError(f"layout{entries}: '...' may stand once")
    if not isinstance(pad, (bool, tuple, list)):
        raise TypeError(f"layout{entries}: pad={pad!r} should be True, or the sizes of the parts, as (10, 20, 30, 4)")
    return LayoutSpec(cleaned, pad if isinstance(pad, bool) else tuple(pad))


class Layout(Immutable):
    """The placement of one tensor on every axis of a mesh. Immutable and hashable; equal layouts are interchangeable.

    `Layout((2, 4), ("dp", "tp"))` is the layout of a scalar on that mesh, and calling it gives that of a tensor:
    `Layout((2, 4), ("dp", "tp"))("dp", "None", "tp")`. `Layout.on(mesh, …)` takes a mesh that exists.
    Axes of size 1 place nothing, so a bound layout leaves them out.

    Attributes:
        mesh: the `DeviceMesh`.
        dims: for every tensor dim the axes that shard it, major to minor. A number among them is one of blocks that
            lie whole on each rank: of `(4, "dp")`, a rank holds its part of each quarter. None stands at the end.
        axes: the same, without the numbers.
        cut_axes: the set of all of these.
        placed_axes: the set of these and of the partial axes.
        partial: pairs `(axis, op)`, in mesh order.
        varying: axes marked varying, in mesh order.
    """

    __slots__ = ("mesh", "dims", "partial", "varying", "axes", "cut_axes", "placed_axes", "_hash")

    def __new__(cls, device_matrix, alias_name, rank_list=None):
        return cls.on(DeviceMesh(device_matrix, alias_name, rank_list))

    @staticmethod
    def on(mesh, dims=(), partial=(), varying=()):
        """The layout on `mesh` with axes `dims[i]` on tensor dim i, `partial` a dict or pairs, `varying` axes.

        Raises:
            ValueError: an unknown axis, or one that is used twice.
        """
        pairs = partial.items() if isinstance(partial, dict) else partial
        return _make_layout(mesh, tuple(map(tuple, dims)), tuple(map(tuple, pairs)), tuple(varying))

    def __call__(self, *entries):
        return layout(*entries).bind(self.mesh)

    def __reduce__(self):
        return Layout.on, (self.mesh, self.dims, self.partial, self.varying)

    def replace(self, dims=None, partial=None, varying=None):
        """This layout with some of its parts exchanged."""
        if dims is None and partial is None and varying == self.varying:
            return self
        parts = zip((dims, partial, varying), (self.dims, self.partial, self.varying))
        return Layout.on(self.mesh, *(own if given is None else given for given, own in parts))

    @property
    def ndim(self):
        """Number of tensor dims."""
        return len(self.dims)

    @property
    def is_replicated(self):
        """Whether every rank holds the whole tensor, with no marks: nothing sharded, partial or varying."""
        return not self.partial and not self.varying and not any(self.dims)

    def placement(self, axis):
        """The placement on `axis`: `Shard(dim)`, `Partial(op)`, `Varying()` or `Replicate()`."""
        self.mesh.check_axes((axis,))
        for dim, axes in enumerate(self.axes):
            if axis in axes:
                return Shard(dim)
        if axis in self.varying:
            return Varying()
        op = dict(self.partial).get(axis)
        return Replicate() if op is None else Partial(op)

    @property
    def placements(self):
        """One placement for every axis of the mesh, in mesh order."""
        return tuple(self.placement(axis) for axis in self.mesh.axis_names)

    def divisor(self, dim):
        """Number of shards of tensor dim `dim`."""
        return self.mesh.axis_size(*self.axes[dim])

    @property
    def contiguous(self):
        """This layout with one run of elements of each dim on each rank: no dim is strided."""
        return self.replace(dims=self.axes)

    def local_shape(self, global_shape, name="tensor", cure="other axes"):
        """Shape of every rank's part of a tensor of `global_shape`.

        Raises:
            ValueError: another number of dims, or a dim that its axes don't divide; `cure`: what else would do.
        """
        if len(global_shape) != len(self.dims):
            raise ValueError(
                f"{name} of shape {tuple(global_shape)} has {len(global_shape)} dims, but layout {self} has {self.ndim}"
            )
        local = []
        for dim, (size, entry, axes) in enumerate(zip(global_shape, self.dims, self.axes)):
            count = self.mesh.axis_size(*axes)
            parts = count if entry == axes else parts_of(self.mesh, entry)
            if size % parts:
                raise ValueError(
                    f"{name} of shape {tuple(global_shape)}: dim {dim} has size {size}, which axes {', '.join(axes)} "
                    f"of {self.mesh} would cut into {parts} parts: choose a size that {parts} divides, "
                    f"{near_multiples(size, parts)}, or {cure}"
                )
            local.append(size // count)
        return tuple(local)

    def global_shape(self, local_shape):
        """Shape of the whole tensor of which every rank holds a part of `local_shape`."""
        if len(local_shape) != len(self.dims):
            raise ValueError(
                f"a local tensor of shape {tuple(local_shape)} doesn't fit layout {self} of {self.ndim} dims"
            )
        return tuple(size * self.divisor(dim) for dim, size in enumerate(local_shape))

    def local_runs(self, global_shape, rank):
        """For every dim the slices of the global tensor that `rank` holds: one, or several of a strided dim."""
        self.local_shape(global_shape)
        return tuple(runs_of(self.mesh, *dim, rank) for dim in zip(self.dims, global_shape))

    def local_slices(self, global_shape, rank):
        """The part of the global tensor that `rank` holds: one `slice` a dim; lists of `numpy.ix_` if strided."""
        runs = self.local_runs(global_shape, rank)
        return tuple(run for (run,) in runs) if self.dims == self.axes else open_mesh(runs)

    @property
    def device_matrix(self):
        """Shape of the mesh, as `mindspore.Layout` calls it."""
        return self.mesh.shape

    @property
    def alias_name(self):
        """Axis names, as `mindspore.Layout` calls them."""
        return self.mesh.axis_names

    @property
    def tensor_map(self):
        """For every tensor dim the axis that shards it, counted from the right of `device_matrix`; -1 for none.

        A tuple where several axes do. This is the notation of MindSpore's distributed-training design.
        """
        names = self.mesh.axis_names
        numbers = [tuple(len(names) - 1 - names.index(axis) for axis in axes) for axes in self.axes]
        return tuple(axes if len(axes) > 1 else axes[0] if axes else -1 for axes in numbers)

    def __repr__(self):
        return f"{self} on {self.mesh}"

    def __str__(self):
        marks = [f"partial {op}: {axis}" for axis, op in self.partial]
        marks += [f"varying: {', '.join(self.varying)}"] if self.varying else []
        return entries_shown(self.dims) + (f" ({'; '.join(marks)})" if marks else "")


def bind_layout(declared, mesh, ndim=None, arriving=None, name="tensor"):
    """A `Layout` on `mesh` from any form of declaration.

    Args:
        declared: a `LayoutSpec`, a `Layout`, a `mindspore.Layout`, or a tuple or list of entries for `layout(...)`.
        mesh: the mesh to bind to; `None` takes the one that `declared` brings.
        ndim: number of tensor dims, to check against and to fill up.
        arriving: the layout that the dims of a `...` entry keep.
        name: what to call the tensor in errors.

    Raises:
        TypeError: not a layout. ValueError: a layout on another mesh, or one that doesn't fit.
    """
    if isinstance(declared, (tuple, list)):
        declared = layout(*declared)
    if hasattr(declared, "to_dict") and not isinstance(declared, Layout):
        declared = _from_mindspore(declared)
    if isinstance(declared, Layout):
        if mesh is not None and declared.mesh != mesh:
            raise ValueError(f"{name}: layout {declared!r} is on another mesh than {mesh!r}")
        if ndim is not None and declared.ndim > ndim:
            raise ValueError(f"{name}: layout {declared} has {declared.ndim} entries, but the tensor has {ndim} dims")
        return declared if ndim is None else declared.replace(dims=declared.dims + ((),) * (ndim - declared.ndim))
    if isinstance(declared, LayoutSpec):
        if mesh is None:
            raise ValueError(f"{name}: layout {declared} is on no mesh yet; give the mesh to bind it to")
        return declared.bind(mesh, ndim, arriving, name)
    raise TypeError(
        f"{name}: {declared!r} is no layout: write layout('dp', 'None', …), a Layout, or a mindspore.Layout"
    )


@lru_cache(maxsize=65536)
def _make_layout(mesh, dims, partial, varying):
    """The one `Layout` of these parts, with axes of size 1 left out; checks the axes."""
    used = [axis for entry in dims for axis in axes_in(entry)] + [axis for axis, _ in partial] + list(varying)
    mesh.check_axes(used)
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(
                f"axis '{axis}' is used twice in one layout: {entries_shown(dims)}; an axis places one dim"
            )
    for _, op in partial:
        Partial(op)
    order = mesh.axis_names.index
    big = {axis for axis in used if mesh.axis_size(axis) > 1}
    self = object.__new__(Layout)
    dims = tuple(entry_of(entry, big) for entry in dims)
    partial = tuple(sorted(((a, op) for a, op in partial if a in big), key=lambda pair: order(pair[0])))
    varying = tuple(sorted((axis for axis in varying if axis in big), key=order))
    parts, axes = (mesh, dims, partial, varying), tuple(map(axes_in, dims))
    cut = frozenset().union(*axes)
    for name, value in zip(Layout.__slots__, (*parts, axes, cut, cut.union(dict(partial)), hash(parts)), strict=True):
        object.__setattr__(self, name, value)
    return self


def _clean_entry(entry):
    if entry is ... or isinstance(entry, str) and entry != "None":
        return entry
    if entry is None or entry == "None":
        return ()
    if isinstance(entry, (tuple, list)) and all(isinstance(axis, str) for axis in entry):
        return tuple(axis for axis in entry if axis != "None")
    raise TypeError(f"a layout entry is an axis name, a tuple of axis names, None or '...', not {entry!r}")


def _resolve_axes(entry, mesh):
    """Axis names of an entry; a str that is no axis is split into axis names joined by `_`."""
    axes = entry if isinstance(entry, tuple) else _split_joined(entry, mesh.axis_names) or (entry,)
    mesh.check_axes(axes)
    return axes


def _split_joined(joined, names):
    """The axis names that a str is, one or several joined by `_`; none where it is made of something else."""
    if joined in names:
        return (joined,)
    heads = [name for name in names if joined.startswith(f"{name}_")]
    tails = ((name, _split_joined(joined[len(name) + 1 :], names)) for name in heads)
    return next(((name, *tail) for name, tail in tails if tail), ())


def _from_mindspore(declared):
    """Our `Layout` from a `mindspore.Layout`, read through its `to_dict()` so that MindSpore needn't be imported."""
    parts = declared.to_dict()
    mesh = DeviceMesh(parts["device_matrix"], parts["alias_name"], parts.get("rank_list"))
    names = tuple(reversed(mesh.axis_names))
    numbers = [entry if isinstance(entry, (tuple, list)) else (entry,) for entry in parts["tensor_map"]]
    return Layout.on(mesh, [[names[number] for number in entry if number >= 0] for entry in numbers])
