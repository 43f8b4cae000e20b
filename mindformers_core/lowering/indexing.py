"""`x[...]` written with operators that have rules: MindSpore's own indexing runs below the level of `__fallback__`."""

import math
from numbers import Integral

import numpy as np
from mindspore import Tensor, dtype as mstype, get_context, ops

from mindformers_core.algorithms.halo import padded
from mindformers_core.operators.rules.dims import broadcast_shape


def of_whole(what, read=None):
    """A method that reads `what` of the plain tensor that `self._whole(what)` gives, or raises an error instead."""

    def method(self, *args):
        whole = self._whole(what)
        return getattr(whole, what.removesuffix("()"))(*args) if read is None else read(whole)

    method.__doc__ = f"`{what}` of the whole tensor, where that is known."
    return method


class IndexedTensor(Tensor):
    """A tensor of which indexing, iteration and assignment by index are operators that have rules.

    `h += f(h)` makes a new tensor: others may share the parts of the old one.
    """

    memory = None  # see `aliases`

    @property
    def data(self):
        """This tensor."""
        return self

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return self.shape[0]

    def __iter__(self):
        return (self[place] for place in range(len(self)))

    def __getitem__(self, index):
        return index_tensor(self, index)

    def __setitem__(self, index, value):
        if "is_lookup" in vars(self):
            raise ValueError(
                f"x[indices], of shape {tuple(self.shape)}, is assigned to, which MindSpore writes back into x: assign "
                "to a place of x itself, or to a copy, x[indices].copy()"
            )
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
    ranges, looked_up, kept, place = _selection(index, x.shape)
    part = _part(x, ranges)
    found = _looked_up(part, looked_up, kept, place) if looked_up else _arranged(part, kept)
    if found is not x and (looked_up or "is_lookup" in vars(x)):
        vars(found)["is_lookup"] = True
    return found


def _selection(index, shape):
    """What an index takes of a tensor.

    Returns:
        ranges: of every dim; whole where a tensor looks up.
        looked_up: dim -> indices that aren't negative, an array where they are known, or else a tensor.
        kept: for every dim of the result that no lookup brings, its dim in the tensor; None for a new one.
        place: the place among these of the dims that lookups bring. Ints count as lookups: where they are apart, the
            dims lead.
    """
    ranges, looked_up, kept, advanced = [], {}, [], []
    if isinstance(index, list) and not all(isinstance(entry, Integral) for entry in index):
        index = tuple(index)  # of slices, tensors or lists: MindSpore's reading of it
    for number, entry in enumerate(_entries(index if isinstance(index, tuple) else (index,), shape)):
        if entry is None:
            kept.append(None)
            continue
        dim, size = len(ranges), shape[len(ranges)]
        ranges.append(range(*entry.indices(size)) if isinstance(entry, slice) else range(size))
        if isinstance(entry, slice):
            kept.append(dim)
            continue
        advanced.append((number, len(kept)))
        found = _places(entry, dim, size)
        if np.ndim(found) or not isinstance(entry, Integral):
            looked_up[dim] = found
        else:
            ranges[dim] = range(int(found), int(found) + 1)
    are_apart = bool(advanced) and advanced[-1][0] - advanced[0][0] >= len(advanced)
    return ranges, looked_up, kept, 0 if are_apart or not advanced else advanced[0][1]


def _entries(index, shape):
    """One entry for every dim of a tensor, besides the `None`s."""
    ndim = len(shape)
    places = [place for place, entry in enumerate(index) if entry is ...]
    used = sum(entry is not None and entry is not ... for entry in index)
    if len(places) > 1 or used > ndim:
        raise IndexError(
            f"{used} indices{' and more than one ...' if len(places) > 1 else ''} for a tensor of {ndim} dims"
        )
    place = places[0] if places else len(index)
    return [*index[:place], *[slice(None)] * (ndim - used), *index[place + 1 :]]


def _places(entry, dim, size):
    """The places on a dim of `size` of an int, a list or a tensor of them; for a list of bools those that are true."""
    if isinstance(entry, bool) or (isinstance(entry, Tensor) and entry.dtype == mstype.bool_):
        raise TypeError(
            "a DTensor can't be indexed by bools, whose number of elements is not known ahead: "
            "use ops.where or ops.masked_fill"
        )
    if isinstance(entry, Tensor):
        return ops.where(entry < 0, entry + size, entry)
    places = np.asarray(entry) if isinstance(entry, (Integral, list, tuple)) else None
    if places is None or places.size and places.dtype.kind not in "biu":
        kind = type(entry).__name__ if places is None else f"{places.dtype}s"
        raise TypeError(f"a DTensor is indexed by ints, slices, None, ... or an integer tensor, not {kind}")
    if places.dtype == bool:
        if places.shape != (size,):
            raise IndexError(f"a list of bools of shape {places.shape} for dim {dim} of size {size}")
        return np.nonzero(places)[0]
    if not ((-size <= places) & (places < size)).all():
        raise IndexError(f"index {entry} is out of range for dim {dim} of size {size}")
    return np.where(places < 0, places + size, places).astype(np.int64)


def _in_blocks(x, ranges):
    """`x` and its ranges where each dim whose step divides it is two: of blocks, and of the places in a block."""
    shape, found = [], []
    for size, taken in zip(x.shape, ranges):
        is_two = taken.step > 1 and len(taken) * taken.step == size
        shape += [len(taken), taken.step] if is_two else [size]
        found += [range(len(taken)), range(taken.start, taken.start + 1)] if is_two else [taken]
    return x if len(shape) == x.ndim else ops.reshape(x, tuple(shape)), found


def _part(x, ranges):
    """`x` at a range of every dim. A step is a dim of its own, for which `x` may be padded: MindSpore's has no gradient
    on CPU."""
    shape, reverse = tuple(map(len, ranges)), tuple(dim for dim, taken in enumerate(ranges) if taken.step < 0)
    x, ranges = _in_blocks(x, [taken[::-1] if taken.step < 0 else taken for taken in ranges])
    spans = [range(r.start, r[-1] + 1 if r else r.start) for r in ranges]
    if spans != list(map(range, x.shape)):
        x = ops.strided_slice(x, *zip(*((span.start, span.stop, 1) for span in spans)))
    for dim, taken in enumerate(ranges):
        x = padded(x, dim, 0, taken.step - 1, 0) if len(taken) > 1 else x
    if any(taken.step > 1 and len(taken) > 1 for taken in ranges):
        x = _part(x, [range(0, size, taken.step if len(taken) > 1 else 1) for size, taken in zip(x.shape, ranges)])
    x = _reshaped(x, shape)
    return ops.flip(x, reverse) if reverse else x


def _looked_up(x, indices, kept, place):
    """`x` at indices, by dim, and its dims in order: those that are `kept`, and from `place` on those of indices."""
    ((dim, each),) = indices.items() if len(indices) == 1 else ((0, None),)
    rest = [other for other in range(x.ndim) if other not in indices]
    if each is not None:
        count, x = each.ndim, ops.gather(x, _tensor(each), dim)
    else:
        places = _coordinates(indices)
        x = ops.transpose(x, (*indices, *rest)) if tuple(indices) != tuple(range(len(indices))) else x
        count, dim, x = places.ndim - 1, 0, ops.gather_nd(x, places)
    places = {other: at + count * (at >= dim) for at, other in enumerate(rest)}
    wanted = [None if other is None else places[other] for other in kept]
    return _arranged(x, [*wanted[:place], *range(dim, dim + count), *wanted[place:]])


def _tensor(indices):
    return indices if isinstance(indices, Tensor) else Tensor(indices)


def _coordinates(indices):
    """Indices of several dims, broadcast to one shape, side by side along a new last dim."""
    shape, indices = broadcast_shape([each.shape for each in indices.values()]), map(_tensor, indices.values())
    columns = [ops.expand_dims(ops.broadcast_to(each, shape), -1).astype(mstype.int64) for each in indices]
    return ops.cat(columns, -1) if len(columns) > 1 else columns[0]


def _arranged(x, dims):
    """`x` with these dims in this order, None for a new one; dims that aren't named have size 1."""
    named, dropped = [dim for dim in dims if dim is not None], tuple(dim for dim in range(x.ndim) if dim not in dims)
    x = ops.squeeze(x, dropped) if dropped else x
    if named != sorted(named):
        x = ops.transpose(x, tuple(sorted(named).index(dim) for dim in named))
    for place, dim in enumerate(dims):
        x = ops.expand_dims(x, place) if dim is None else x
    return x


def _reshaped(x, shape):
    return x if x.shape == shape else ops.reshape(x, shape)


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
    if x.dtype == mstype.bfloat16 and get_context("device_target") == "CPU":  # which has no kernels for it
        return ops.cast(with_items(ops.cast(x, mstype.float32), index, value, accumulate), x.dtype)
    ranges, looked_up, kept, place = _selection(index, x.shape)
    if any(taken.step < 0 for taken in ranges):
        raise TypeError("an assignment by a slice with a negative step is not available: use ops.flip of the values")
    shape = broadcast_shape([each.shape for each in looked_up.values()])
    wanted = [1 if dim is None else len(ranges[dim]) for dim in kept]
    wanted[place:place] = shape
    value = ops.broadcast_to(_reshaped(value, value.shape[max(value.ndim - len(wanted), 0) :]), tuple(wanted))
    if 0 in wanted:
        return x
    if looked_up:
        new = [at + len(shape) * (at >= place) for at, dim in enumerate(kept) if dim is None]
        value = _arranged(value, [at for at in range(len(wanted)) if at not in new])
        before = place - kept[:place].count(None)
        return _scattered(x, ranges, looked_up, [dim for dim in kept if dim is not None], before, value, accumulate)
    shape, (x, ranges) = x.shape, _in_blocks(x, ranges)
    value = _reshaped(value, tuple(map(len, ranges)))
    if 3 * value.size <= x.size:  # beyond, masks take less time
        return _reshaped(_scattered(x, ranges, {}, list(range(x.ndim)), 0, value, False), shape)
    return _reshaped(_masked(x, ranges, value), shape)


def _masked(x, ranges, value):
    """`x` with values at a range of every dim, chosen by masks."""
    narrow = {dim: taken for dim, taken in enumerate(ranges) if len(taken) < x.shape[dim]}
    for dim, taken in narrow.items():
        places = np.zeros(x.shape[dim], np.int64)
        places[taken] = range(len(taken))
        value = ops.gather(value, Tensor(places), dim)
    for dim, taken in narrow.items():
        mask = np.zeros((x.shape[dim], *(1,) * (x.ndim - dim - 1)), bool)
        mask[taken] = True
        value = ops.where(Tensor(mask), value, x)
    return value


def _scattered(x, ranges, looked_up, kept, before, value, accumulate):
    """`x` with values at indices, whose dims in `value` stand behind so many of the dims that are `kept`.

    No part of `x` is read, so that none is gathered: ints and slices that take a part of a dim count as indices, too.
    """
    sliced = [dim for dim in kept if len(ranges[dim]) < x.shape[dim]]
    rest, count = [dim for dim in kept if dim not in sliced], value.ndim - len(kept)
    at = {dim: place + count * (place >= before) for place, dim in enumerate(kept)}
    own, indices = [*range(before, before + count), *map(at.get, sliced)], {}
    for dim in (dim for dim in range(x.ndim) if dim not in rest):
        behind = sliced[sliced.index(dim) + 1 :] if dim in sliced else sliced if dim in looked_up else ()
        found = looked_up.get(dim, np.array(ranges[dim]))
        indices[dim] = found.reshape((*found.shape, *(1,) * len(behind))) if behind else found
    ((dim, each),) = indices.items() if len(indices) == 1 else ((0, None),)
    # the kernel for elements has no complex numbers, and writes in any order, so that no place may be named twice
    is_distinct = each is not None and (
        math.prod(each.shape) == 1 or (isinstance(each, np.ndarray) and len(np.unique(each)) == each.size)
    )
    if is_distinct and not accumulate and not str(x.dtype).lower().startswith("complex"):
        value = _arranged(value, [*(at[d] for d in rest if d < dim), *own, *(at[d] for d in rest if d > dim)])
        value = _reshaped(value, (*x.shape[:dim], math.prod(each.shape), *x.shape[dim + 1 :]))
        index = _reshaped(ops.cast(_tensor(each), mstype.int64), (1,) * dim + (-1,) + (1,) * (x.ndim - dim - 1))
        return ops.tensor_scatter_elements(x, ops.broadcast_to(index, value.shape), value, dim)
    places, order = _coordinates(indices), (*indices, *rest)
    value = _arranged(value, [*own, *map(at.get, rest)])
    value = _reshaped(value, (*places.shape[:-1], *(x.shape[dim] for dim in rest)))
    write = ops.tensor_scatter_add if accumulate else ops.TensorScatterUpdate()
    made = write(_arranged(x, order), places, value)
    return _arranged(made, [order.index(dim) for dim in range(x.ndim)])
