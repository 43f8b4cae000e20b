"""Rules of slices: a dim that is taken whole stays parallel, any other is needed whole. All are linear."""

from mindformers_core.operators import views
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import select_index, slice_one_dim
from mindformers_core.operators.rules.dims import along, as_dim, dim_names, integers, unary
from mindformers_core.operators.saved import INPUTS_AS_THEY_ARE, NOTHING

__all__ = []


def _sliced(x, ranges, localize, dropped=(), new=()):
    """The `Signature` of a slice.

    Args:
        x: the tensor.
        ranges: for dims that aren't taken whole, the `range` of the positions taken.
        localize: see `Signature`.
        dropped: dims of `x` that the result lacks.
        new: places in the result, in ascending order, of new dims of size 1.
    """
    names = dim_names(x)
    output = [(f"part{dim}",) if dim in ranges else names[dim] for dim in range(x.ndim) if dim not in dropped]
    for place in new:
        output.insert(place, ())
    sizes = {f"part{dim}": len(taken) for dim, taken in ranges.items()}
    return unary(x, output, sizes=sizes, whole=(*ranges, *dropped), linear=({0},), localize=localize)


def _is_all(taken, size):
    return taken == range(size)


@register_operator("StridedSlice", saves=NOTHING, view=views.strided, reads_a_part=True)
def strided_slice(x, begin, end, strides, *masks):
    """Python's slices, one for each dim, in MindSpore's encoding.

    `masks` are `begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask`: bit i speaks of entry i.
    """
    begin, end, strides = (integers((part,), "a slice") for part in (begin, end, strides))
    if not len(begin) == len(end) == len(strides):
        raise ValueError(f"begin {begin}, end {end} and strides {strides} have different lengths")
    open_begin, open_end, ellipsis, new_dim, index = (*masks, *(0,) * (5 - len(masks)))
    ranges, dropped, new, full = {}, [], [], {}
    dim = place = 0  # in x, in the result
    for entry, stride in enumerate(strides):
        bit = 1 << entry
        if ellipsis & bit:
            later = sum(not (new_dim >> number) & 1 for number in range(entry + 1, len(begin)))
            place, dim = place + x.ndim - later - dim, x.ndim - later
            continue
        if new_dim & bit:
            new.append(place)
            place += 1
            continue
        size = x.shape[as_dim(dim, x.ndim)]
        if index & bit:
            as_dim(begin[entry], size)
            dropped.append(dim)
        else:
            bounds = None if open_begin & bit else begin[entry], None if open_end & bit else end[entry]
            taken = range(*slice(*bounds, stride).indices(size))
            if _is_all(taken, size):
                full[entry] = place
            else:
                ranges[dim] = taken
            place += 1
        dim += 1
    return _sliced(x, ranges, _whole_locally(begin, end, strides, masks, full), dropped, new)


def _whole_locally(begin, end, strides, masks, full):
    """Localizes a strided slice: the entries `full` (entry -> dim of the result) take all of the local dim too."""

    def localize(args, shapes):
        local_begin = tuple(0 if entry in full else at for entry, at in enumerate(begin))
        local_end = tuple(shapes[0][full[entry]] if entry in full else at for entry, at in enumerate(end))
        return args[0], local_begin, local_end, strides, *masks

    return localize


@register_operator("Slice", saves=INPUTS_AS_THEY_ARE, reads_a_part=True)
def slice_sizes(x, begin, size):
    """`size[i]` elements of dim i from `begin[i]` on; -1 for the rest."""
    begin, size = integers((begin,), "begin"), integers((size,), "size")
    if not len(begin) == len(size) == x.ndim:
        raise ValueError(f"begin {begin} and size {size} need one entry for each of the {x.ndim} dims of {x.shape}")
    size = tuple(x.shape[dim] - begin[dim] if length == -1 else length for dim, length in enumerate(size))
    for dim, (start, length) in enumerate(zip(begin, size)):
        _check_range(x, dim, start, length)
    taken = [range(start, start + length) for start, length in zip(begin, size)]
    ranges = {dim: part for dim, part in enumerate(taken) if not _is_all(part, x.shape[dim])}
    return _sliced(x, ranges, lambda args, shapes: (args[0], begin, tuple(shapes[0])))


@register_operator("Narrow", saves=INPUTS_AS_THEY_ARE, view=views.parts, source=".narrow")
@register_operator("NarrowView", saves=INPUTS_AS_THEY_ARE, view=views.parts)
def narrow(x, dim, start, length):
    """`length` elements of one dim from `start` on."""
    place = as_dim(dim, x.ndim)
    start += x.shape[place] if start < 0 else 0
    _check_range(x, place, start, length)
    taken = range(start, start + length)
    ranges = {} if _is_all(taken, x.shape[place]) else {place: taken}
    return _sliced(x, ranges, lambda args, shapes: (args[0], dim, start, shapes[0][place]))


@register_operator("SliceExt", "SliceExtView", saves=NOTHING, reads_a_part=True, rewrite=slice_one_dim)
def slice_one_dim(x, dim, start, end, step=1):
    """`x[start:end:step]` along one dim."""
    place = as_dim(dim, x.ndim)
    taken = range(*slice(start, end, step).indices(x.shape[place]))
    ranges = {} if _is_all(taken, x.shape[place]) else {place: taken}
    if ranges:
        return _sliced(x, ranges, None)
    return _sliced(x, ranges, lambda args, shapes: (args[0], dim, 0, shapes[0][place], 1))


@register_operator("SelectExtView", saves=NOTHING, reads_a_part=True, rewrite=select_index)
def select_index(x, dim, index):
    """One index of a dim, which the result lacks."""
    place = int(along(x, dim)[1:])
    as_dim(index, x.shape[place])
    return _sliced(x, {}, None, (place,))


def _check_range(x, dim, start, length):
    if start < 0 or length < 0 or start + length > x.shape[dim]:
        raise ValueError(f"{length} elements from {start} on are not all in dim {dim} of {x.shape}")
