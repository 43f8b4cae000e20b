"""`x[...]` written with operators that have rules: MindSpore's own indexing runs below the level of `__fallback__`."""

from numbers import Integral

from mindspore import Tensor, ops

__all__ = ["index_tensor"]


def index_tensor(x, index):
    """`x[index]` for ints, slices, `None`, `...`, and one integer tensor (or list of ints).

    Raises:
        TypeError: an index of another kind. IndexError: out of range, or too many indices.
    """
    index = index if isinstance(index, tuple) else (index,)
    entries = _expand_ellipsis(index, x.ndim)
    begin, end, strides, gathers = [], [], [], []
    kept = []  # for every dim of the result: its place in the sliced tensor, or None for a new dim
    for entry in entries:
        if entry is None:
            kept.append(None)
            continue
        dim = len(begin)
        first, last, step, keep = _bounds(entry, x.shape[dim], dim)
        begin.append(first)
        end.append(last)
        strides.append(step)
        if isinstance(entry, (Tensor, list)):
            gathers.append((dim, entry if isinstance(entry, Tensor) else Tensor(entry)))
        if keep:
            kept.append(dim)
    if len(gathers) > 1:
        raise TypeError("a DTensor can be indexed by one tensor at a time: index in several steps")
    if begin != [0] * x.ndim or tuple(end) != tuple(x.shape) or set(strides) - {1}:
        x = ops.strided_slice(x, tuple(begin), tuple(end), tuple(strides))
    for dim, indices in gathers:
        x = ops.gather(x, ops.where(indices < 0, indices + x.shape[dim], indices), dim)
        kept = [place for entry in kept for place in _widen(entry, dim, indices.ndim)]
    return _reshape_kept(x, kept)


def _expand_ellipsis(index, ndim):
    """One entry for every dim of the tensor, besides the `None`s."""
    places = [place for place, entry in enumerate(index) if entry is ...]
    used = sum(entry is not None and entry is not ... for entry in index)
    if len(places) > 1 or used > ndim:
        raise IndexError(
            f"{used} indices{' and more than one ...' if len(places) > 1 else ''} for a tensor of {ndim} dims"
        )
    whole = [slice(None)] * (ndim - used)
    place = places[0] if places else len(index)
    return [*index[:place], *whole, *index[place + 1 :]]


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


def _widen(place, dim, count):
    """Places in a tensor whose dim `dim` has become `count` dims."""
    if place is None or place < dim:
        return [place]
    return list(range(dim, dim + count)) if place == dim else [place + count - 1]


def _reshape_kept(x, kept):
    """Drop the dims that `kept` doesn't name, and add those that are new."""
    dropped = [dim for dim in range(x.ndim) if dim not in kept]
    for dim in reversed(dropped):
        x = ops.squeeze(x, dim)
    for place, entry in enumerate(kept):
        if entry is None:
            x = ops.expand_dims(x, place)
    return x
