"""`x[...]` written with operators that have rules: MindSpore's own indexing runs below the level of `__fallback__`."""

import math
from numbers import Integral

import numpy as np
from mindspore import Tensor, get_context, ops
from mindspore import dtype as mstype

from mindformers_core.operators.rules.dims import broadcast_shape


class IndexedTensor(Tensor):
    """A tensor of which indexing, iteration and assignment by index are operators that have rules.

    `h += f(h)` makes a new tensor: others may share the parts of the old one.
    """

    @property
    def data(self):
        """This tensor."""
        return self

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return self.shape[0]

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index):
        return index_tensor(self, index)

    def __setitem__(self, index, value):
        self.overwrite(with_items(self, index, value))

    __iadd__ = Tensor.__add__
    __isub__ = Tensor.__sub__
    __imul__ = Tensor.__mul__
    __itruediv__ = Tensor.__truediv__


def index_tensor(x, index):
    """`x[index]` for ints, slices, `None`, `...`, and integer tensors (or lists of ints), by NumPy's rules.

    Raises:
        TypeError: an index of another kind. IndexError: out of range, or too many indices.
    """
    entries = _entries(index if isinstance(index, tuple) else (index,), x.shape)
    bounds, looked_up = [], {}
    kept = []  # for every dim of the result: its place in the sliced tensor, or None for a new dim
    for entry in entries:
        if entry is None:
            kept.append(None)
            continue
        dim = len(bounds)
        *sliced, keep = _bounds(entry, x.shape[dim], dim)
        bounds.append(sliced)
        if isinstance(entry, (Tensor, list)):
            looked_up[dim] = entry if isinstance(entry, Tensor) else Tensor(entry)
        elif keep:
            kept.append(dim)
    begin, end, strides = map(tuple, zip(*bounds)) if bounds else ((), (), ())
    if any(begin) or end != tuple(x.shape) or set(strides) - {1}:
        x = ops.strided_slice(x, begin, end, strides)
    if not looked_up:
        return _reshape_kept(x, kept)
    return _looked_up(x, looked_up, kept, _place_of_looked_up(entries))


def _place_of_looked_up(entries):
    """The place in the result of the dims that tensors bring; ints count as tensors of one index: apart, they lead."""
    advanced = [place for place, entry in enumerate(entries) if not (entry is None or isinstance(entry, slice))]
    return advanced[0] if advanced[-1] - advanced[0] == len(advanced) - 1 else 0


def _looked_up(x, indices, kept, place):
    """`x` at `indices`, by dim, and its dims in order: those that are `kept`, and from `place` on those of indices."""
    indices = {dim: ops.where(each < 0, each + x.shape[dim], each) for dim, each in indices.items()}
    ((dim, each),) = indices.items() if len(indices) == 1 else ((0, None),)
    rest = [other for other in range(x.ndim) if other not in indices]
    if each is not None:
        count, x = each.ndim, ops.gather(x, each, dim)
    else:
        shape = broadcast_shape([each.shape for each in indices.values()])
        dtype = mstype.int32 if {each.dtype for each in indices.values()} == {mstype.int32} else mstype.int64
        columns = [ops.expand_dims(ops.broadcast_to(each, shape), -1).astype(dtype) for each in indices.values()]
        x = ops.transpose(x, (*indices, *rest)) if tuple(indices) != tuple(range(len(indices))) else x
        count, dim, x = len(shape), 0, ops.gather_nd(x, ops.cat(columns, -1))
    places = {other: at + count * (at >= dim) for at, other in enumerate(rest)}
    wanted = [None if other is None else places[other] for other in kept]
    return _reshape_kept(x, [*wanted[:place], *range(dim, dim + count), *wanted[place:]])


def _entries(index, shape):
    """One entry for every dim of a tensor, besides the `None`s; a list of bools is one of the places that are true."""
    ndim = len(shape)
    places = [place for place, entry in enumerate(index) if entry is ...]
    used = sum(entry is not None and entry is not ... for entry in index)
    if len(places) > 1 or used > ndim:
        raise IndexError(
            f"{used} indices{' and more than one ...' if len(places) > 1 else ''} for a tensor of {ndim} dims"
        )
    whole = [slice(None)] * (ndim - used)
    place = places[0] if places else len(index)
    sizes = iter(enumerate(shape))
    entries = [*index[:place], *whole, *index[place + 1 :]]
    return [each if each is None else _as_places(each, *next(sizes)) for each in entries]


def _as_places(entry, dim, size):
    """A list of bools as the list of places that are true; any other entry as it is."""
    if not isinstance(entry, list) or np.asarray(entry).dtype != bool:
        return entry
    if np.shape(entry) != (size,):
        raise IndexError(f"a list of bools of shape {np.shape(entry)} for dim {dim} of size {size}")
    return np.nonzero(entry)[0].tolist()


def _bounds(entry, size, dim):
    """`(begin, end, stride, keep the dim)` of one index entry on a dim of `size`."""
    if isinstance(entry, bool) or (isinstance(entry, Tensor) and "bool" in str(entry.dtype).lower()):
        raise TypeError(
            "a DTensor can't be indexed by bools, whose number of elements is not known ahead: "
            "use ops.where or ops.masked_fill"
        )
    if isinstance(entry, slice):
        first, last, step = entry.indices(size)
        if step < 0:
            raise TypeError(f"a slice with the negative step {step} is not available for a DTensor: use ops.flip")
        return first, max(first, last), step, True
    if isinstance(entry, (Tensor, list)):
        return 0, size, 1, True
    if not isinstance(entry, Integral):
        raise TypeError(
            f"a DTensor is indexed by ints, slices, None, ... or an integer tensor, not {type(entry).__name__}"
        )
    if not -size <= entry < size:
        raise IndexError(f"index {entry} is out of range for dim {dim} of size {size}")
    place = int(entry) % size
    return place, place + 1, 1, False


def _reshape_kept(x, kept):
    """Drop the dims that `kept` doesn't name, bring the others into its order, and add those that are new."""
    dropped = [dim for dim in range(x.ndim) if dim not in kept]
    for dim in reversed(dropped):
        x = ops.squeeze(x, dim)
    named = [dim for dim in kept if dim is not None]
    if named != sorted(named):
        x = ops.transpose(x, tuple(sorted(named).index(dim) for dim in named))
    for place, entry in enumerate(kept):
        if entry is None:
            x = ops.expand_dims(x, place)
    return x


def with_items(x, index, value, accumulate=False):
    """`x` after `x[index] = value`, a new tensor; indices as of `index_tensor`, or one tensor of bools.

    With `accumulate` values at places of tensors are added, each as often as its place is named.

    Raises:
        TypeError: an index of another kind, or values for a tensor of bools. IndexError: as of `index_tensor`.
    """
    value = value if isinstance(value, Tensor) else Tensor(value)
    value = value if value.dtype == x.dtype else ops.cast(value, x.dtype)
    if isinstance(index, Tensor) and index.dtype == mstype.bool_:
        if value.size != 1:
            raise TypeError("x[bools] = values takes one value, since the number of places is not known: use ops.where")
        mask = ops.reshape(index, (*index.shape, *(1,) * (x.ndim - index.ndim)))
        return ops.where(mask, ops.reshape(value, ()), x)
    entries = [each for each in index if each is not None] if isinstance(index, tuple) else [index]
    entries = _entries(tuple(entries), x.shape)
    bounds = [_bounds(entry, size, dim)[:3] for dim, (entry, size) in enumerate(zip(entries, x.shape))]
    looked_up = {dim: each for dim, each in enumerate(entries) if isinstance(each, (Tensor, list))}
    stepped = {dim: list(range(*bound)) for dim, bound in enumerate(bounds) if bound[2] != 1}
    if stepped and (looked_up or len(stepped) > 1):
        raise TypeError("an assignment by a slice with a step and by another one, or a tensor, is not available")
    looked_up |= stepped
    bounds = [(0, size) if dim in looked_up else each[:2] for dim, (each, size) in enumerate(zip(bounds, x.shape))]
    shape = [end - begin for begin, end in bounds]
    if looked_up:
        is_whole = bounds == [(0, size) for size in x.shape]
        part = x if is_whole else ops.strided_slice(x, *map(tuple, zip(*bounds)), (1,) * x.ndim)
        part = _scattered(part, looked_up, entries, value, next(iter(stepped), None), accumulate)
    else:
        kept = [size for entry, size in zip(entries, shape) if isinstance(entry, slice)]
        value = ops.reshape(value, value.shape[max(value.ndim - len(kept), 0) :])
        part = ops.reshape(ops.broadcast_to(value, tuple(kept)), tuple(shape))
    return _pasted(x, part, bounds)


def _scattered(x, looked_up, entries, value, stepped, accumulate):
    """`x` with values at indices, by dim; other dims are whole, or have size 1 where the entry is an int.

    The indices of the dim `stepped` are those of a slice, whose values stay in its place.
    """
    known = [each for each in looked_up.values() if isinstance(each, list) and np.ndim(each) == 1]
    indices = {dim: each if isinstance(each, Tensor) else Tensor(each) for dim, each in looked_up.items()}
    indices = {dim: ops.where(each < 0, each + x.shape[dim], each) for dim, each in indices.items()}
    shape = broadcast_shape([each.shape for each in indices.values()])
    rest = [dim for dim in range(x.ndim) if dim not in indices]
    kept = [dim for dim in rest if isinstance(entries[dim], slice)]
    advanced = [dim for dim in range(x.ndim) if dim not in kept]
    together = stepped is not None or advanced[-1] - advanced[0] == len(advanced) - 1
    first = advanced[0] if stepped is None else stepped
    before = sum(dim < first for dim in kept) if together else 0
    sizes = [x.shape[dim] for dim in kept]
    value = ops.broadcast_to(value, (*sizes[:before], *shape, *sizes[before:]))
    count = len(shape)
    ((dim, each),) = indices.items() if len(indices) == 1 else ((0, None),)
    # the kernel for elements writes in any order, so that no place may be named twice
    are_distinct = count == 1 and len(known) == 1 and len({i % x.shape[dim] for i in known[0]}) == shape[0]
    is_one = math.prod(shape) == 1
    if together and each is not None and not accumulate and (is_one or are_distinct) and _has_scatter(x):
        values = ops.reshape(value, (*x.shape[:dim], math.prod(shape), *x.shape[dim + 1 :]))
        return _written_along(x, dim, ops.cast(ops.reshape(each, (-1,)), mstype.int64), values)
    order = (*range(before, before + count), *range(before), *range(before + count, value.ndim))
    value = value if order == tuple(range(value.ndim)) else ops.transpose(value, order)
    value = ops.reshape(value, (*shape, *(x.shape[dim] for dim in rest)))
    columns = [ops.expand_dims(ops.cast(ops.broadcast_to(each, shape), mstype.int64), -1) for each in indices.values()]
    places, order = ops.cat(columns, -1) if len(columns) > 1 else columns[0], (*indices, *rest)
    moved = order != tuple(range(x.ndim))
    write = ops.tensor_scatter_add if accumulate else ops.TensorScatterUpdate()
    made = write(ops.transpose(x, order) if moved else x, places, value)
    return ops.transpose(made, tuple(order.index(dim) for dim in range(x.ndim))) if moved else made


def _written_along(x, dim, places, values):
    """`x` with values at distinct places, a 1-D tensor, along a dim; it is copied once, at a time per value."""
    index = ops.reshape(places, (1,) * dim + (-1,) + (1,) * (x.ndim - dim - 1))
    return ops.tensor_scatter_elements(x, ops.broadcast_to(index, values.shape), values, dim)


def _has_scatter(x):
    """Whether scatters of elements have a kernel for a tensor."""
    dtype = str(x.dtype).lower()
    return not dtype.startswith("complex") and (dtype != "bfloat16" or get_context("device_target") != "CPU")


def _pasted(x, part, bounds):
    """`x` with `part` in the place of what lies within `bounds`: written along a dim, or joined to what is around."""
    shares = {dim: (end - begin) / size for dim, ((begin, end), size) in enumerate(zip(bounds, x.shape)) if size}
    dim = min(shares, key=shares.get, default=None)
    if dim is None or shares[dim] == 1:
        return part
    begin, end = bounds[dim]

    def piece(first, last):
        whole = [(0, size) for size in x.shape]
        whole[dim] = first, last
        return ops.strided_slice(x, *map(tuple, zip(*whole)), (1,) * x.ndim)

    rest = [*bounds[:dim], (0, end - begin), *bounds[dim + 1 :]]
    if sum(share < 1 for share in shares.values()) > 1:
        part = _pasted(piece(begin, end), part, rest)
    if shares[dim] <= 1 / 3 and _has_scatter(x):  # beyond, the joined pieces take less time
        return _written_along(x, dim, Tensor(np.arange(begin, end)), part)
    around = [piece(*ends) if ends[0] < ends[1] else None for ends in ((0, begin), (end, x.shape[dim]))]
    return ops.cat([each for each in (around[0], part, around[1]) if each is not None], dim)
