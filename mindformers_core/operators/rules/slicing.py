"""Rules of slices and padding: a dim that keeps its size stays parallel; a shift by a padding sends a halo.

A part of a cut dim can be taken by an algorithm, where each rank gives what might be in its part, or after a gather,
which serves other slices, too: prices decide.
"""

from mindformers_core.operators import views
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import select_index, slice_one_dim
from mindformers_core.operators.rules.dims import along, as_dim, dim_names, equation, integers, unary
from mindformers_core.operators.saved import INPUTS_AS_THEY_ARE, NOTHING
from mindformers_core.operators.signature import LocalCall, Signature, tensors_in


def _sliced(x, ranges, localize, kept=None):
    """The `Signature` of a slice.

    Args:
        ranges: dim -> the `range` of the positions taken; default: all.
        localize: see `LocalCall`.
        kept: for every dim of the result that of `x`, None for a new one of size 1; default: all.
    """
    names, kept = dim_names(x), range(x.ndim) if kept is None else kept
    ranges = {dim: taken for dim, taken in ranges.items() if taken != range(x.shape[dim])}
    output = [() if dim is None else (f"part{dim}",) if dim in ranges else names[dim] for dim in kept]
    sizes = {f"part{dim}": len(taken) for dim, taken in ranges.items()}
    parts = [] if x.dtype == "bool" else [dim for dim, taken in ranges.items() if taken]
    whole = {dim for dim in range(x.ndim) if dim in ranges or dim not in kept}.difference(parts)
    bounds = tuple((dim, taken.start, taken.stop, taken.step) for dim, taken in ranges.items())
    more = {"distributed": {f"d{dim}": "slice" for dim in parts}, "local": LocalCall((x, bounds), localize)}
    return unary(x, output, sizes=sizes, whole=whole, linear=({0},), **more)


_PART = {"saves": NOTHING, "reads_a_part": True, "algorithms": ("slice",)}


@register_operator("StridedSlice", view=views.strided, **_PART)
def strided_slice(x, begin, end, strides, *masks):
    """Python's slices, one for each dim, in MindSpore's encoding.

    `masks` are `begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask`: bit i speaks of entry i.
    """
    begin, end, strides = (integers((part,), "a slice") for part in (begin, end, strides))
    if not len(begin) == len(end) == len(strides):
        raise ValueError(f"begin {begin}, end {end} and strides {strides} have different lengths")
    open_begin, open_end, ellipsis, new_dim, index = (*masks, *(0,) * (5 - len(masks)))
    ranges, kept, full, dim = {}, [], {}, 0
    for entry, stride in enumerate(strides):
        bit = 1 << entry
        if ellipsis & bit:
            behind = x.ndim - sum(not (new_dim >> later) & 1 for later in range(entry + 1, len(begin)))
            kept, dim = [*kept, *range(dim, behind)], behind
        elif new_dim & bit:
            kept.append(None)
        else:
            size = x.shape[as_dim(dim, x.ndim)]
            bounds = None if open_begin & bit else begin[entry], None if open_end & bit else end[entry]
            ranges[dim] = _one(begin[entry], size) if index & bit else range(*slice(*bounds, stride).indices(size))
            if not index & bit:
                full |= {entry: len(kept)} if ranges[dim] == range(size) else {}
                kept.append(dim)
            dim += 1

    def localize(args, shapes):
        """The entries `full` (entry -> dim of the result) take all of the local dim, too."""
        local_begin = tuple(0 if entry in full else at for entry, at in enumerate(begin))
        local_end = tuple(shapes[0][full[entry]] if entry in full else at for entry, at in enumerate(end))
        return args[0], local_begin, local_end, strides, *masks

    return _sliced(x, ranges, localize, [*kept, *range(dim, x.ndim)])


@register_operator("Slice", saves=INPUTS_AS_THEY_ARE, reads_a_part=True, algorithms=("slice",))
def slice_sizes(x, begin, size):
    """`size[i]` elements of dim i from `begin[i]` on; -1 for the rest."""
    begin, size = integers((begin,), "begin"), integers((size,), "size")
    if not len(begin) == len(size) == x.ndim:
        raise ValueError(f"begin {begin} and size {size} need one entry for each of the {x.ndim} dims of {x.shape}")
    sizes = [x.shape[dim] - begin[dim] if length == -1 else length for dim, length in enumerate(size)]
    return _spanned(x, dict(enumerate(zip(begin, sizes))), lambda args, shapes: (args[0], begin, tuple(shapes[0])))


@register_operator("Narrow", saves=INPUTS_AS_THEY_ARE, view=views.parts, source=".narrow", algorithms=("slice",))
@register_operator("NarrowView", saves=INPUTS_AS_THEY_ARE, view=views.parts, algorithms=("slice",))
def narrow(x, dim, start, length):
    """`length` elements of one dim from `start` on."""
    place = as_dim(dim, x.ndim)
    start += x.shape[place] if start < 0 else 0
    return _spanned(x, {place: (start, length)}, lambda args, shapes: (args[0], dim, start, shapes[0][place]))


@register_operator("SliceExt", "SliceExtView", rewrite=slice_one_dim, **_PART)
def slice_one_dim(x, dim, start, end, step=1):
    """`x[start:end:step]` along one dim."""
    place = as_dim(dim, x.ndim)
    taken = range(*slice(start, end, step).indices(x.shape[place]))
    is_all = taken == range(x.shape[place])
    return _sliced(x, {place: taken}, (lambda args, shapes: (args[0], dim, 0, shapes[0][place], 1)) if is_all else None)


@register_operator("SelectExtView", rewrite=select_index, **_PART)
def select_index(x, dim, index):
    """One index of a dim, which the result lacks."""
    place = along(x, dim)
    return _sliced(x, {place: _one(index, x.shape[place])}, None, [other for other in range(x.ndim) if other != place])


def _one(index, size):
    return range(as_dim(index, size), as_dim(index, size) + 1)


def _spanned(x, spans, localize):
    """The `Signature` of a slice by `(start, length)` of dims."""
    for dim, (start, length) in spans.items():
        if start < 0 or length < 0 or start + length > x.shape[dim]:
            raise ValueError(f"{length} elements from {start} on are not all in dim {dim} of {x.shape}")
    return _sliced(x, {dim: range(start, start + length) for dim, (start, length) in spans.items()}, localize)


@register_operator("ConstantPadND", algorithms=("pad",))
@register_operator("PadV3", saves=NOTHING, numbers=(1,), algorithms=("pad",))
@register_operator("ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D")
@register_operator("ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D")
def pad(x, padding, value=None):
    """`x` with `padding`, pairs (before, after) from the last dim on: linear where the padding value is 0, or none.

    A dim that is shifted, as by (1, -1), stays cut where it is padded with a value.
    """
    padding = integers((padding,), "a padding")
    if len(padding) % 2 or len(padding) > 2 * x.ndim:
        raise ValueError(f"padding {padding} is not made of at most {x.ndim} pairs, for the dims of {x.shape}")
    output, sizes, halos, cut = list(dim_names(x)), {}, {}, {}
    for dim, (before, behind) in zip(reversed(range(x.ndim)), zip(padding[::2], padding[1::2])):
        if min(before, 0) + min(behind, 0) + x.shape[dim] < (min(before, behind) < 0):
            raise ValueError(f"padding {padding} takes more from dim {dim} of {x.shape} than there is")
        if before or behind:
            halos[dim] = before, behind, behind
        if before + behind:
            output[dim], sizes[f"padded{dim}"] = (f"padded{dim}",), x.shape[dim] + before + behind
        elif before and value is not None:
            cut[f"d{dim}"] = "pad"
    values, whole = tensors_in([value]), [dim for dim in halos if f"d{dim}" not in cut]
    inputs = dim_names(x), *((),) * len(values)
    plain, linear = unary(x, output, sizes=sizes, whole=whole), () if values or value not in (None, 0) else ({0},)
    more = {"linear": linear, "distributed": cut, "local": LocalCall((x, value), halos=halos)}
    return Signature(inputs, plain.outputs, plain.sizes, whole=plain.whole, **more)


@register_operator("Pad", attributes=("paddings",), source="(x)", saves=NOTHING)
def pad_all_dims(x, paddings):
    """`x` with zeros around it: a pair (before, behind) for every dim."""
    return pad(x, [number for pair in reversed(paddings) for number in pair])


@register_operator("Padding", attributes=("pad_dim_size",), source="(x)", saves=NOTHING)
def padded_to(x, pad_dim_size=8):
    """`x`, of one element in the last dim, with zeros behind it."""
    return equation("... 1 -> ... P", x, sizes={"P": pad_dim_size}, linear=({0},))
