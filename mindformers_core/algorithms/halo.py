"""Windows over dims of images that are cut: each part gets the borders of its neighbours, its halo, and computes alone.

A border goes to the neighbour by a shift along each cut dim, and its gradient back: a rank sends the bytes of a halo,
whatever the number of ranks; where a halo is larger than a part, to ranks further away, too. The idea is that of
spatial partitioning in GSPMD (arXiv 2105.04663, section 3.3).
"""

import math

from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.algorithms.scans import part_along


def windows(fill, operator, args, context):
    """The operator on this part and its halo; beyond the image there is `fill`. The operator itself pads nothing."""
    return operator(_extended(args[0], fill, context), *args[1:])


def windows_with_index(operator, args, context):
    """As `windows`, of the largest elements: their positions in the extended part become those in the image."""
    x, given = args[0], args[0].shape
    x = _extended(x, -math.inf, context)
    value, index = operator(x, *args[1:])
    rest, found, scale = ops.stop_gradient(index), 0, 1
    for dim, (before, _, _) in reversed(context.halos.items()):
        start = context.along(dim).start(given[dim], index.dtype) + (before + 1)  # never 0: see `scans`
        place = rest % x.shape[dim] + start - (2 * before + 1)
        rest = rest // x.shape[dim]
        found = found + place * scale
        scale *= context.shapes[0][dim]
    return value, found


def shifted(_, args, context):
    """`x` with a padding that keeps the sizes of cut dims: fewer elements on one side, as many more on the other."""
    return _extended(*args, context)


def _extended(x, fill, context):
    """`x` with its halo along every dim of windows; the later dims take the corners from the earlier ones."""
    for dim, (before, behind, end) in context.halos.items():
        parts = context.along(dim)
        x = _with_borders(x, dim, before, behind, fill, parts) if parts.axes else padded(x, dim, before, end, fill)
    return x


def _with_borders(x, dim, before, behind, fill, parts):
    """The elements from `before` in front of `x` to `behind` after it; negative numbers leave out some of its own."""
    size, pieces = x.shape[dim], []
    for far in range(-before // size, -(-(size + behind) // size)):  # the part so far from this one has some of them
        first, last = max(0, -before - far * size), min(size, size + behind - far * size)
        piece = part_along(x, dim, first, last - first) if last - first < size else x
        if far:
            is_image = Tensor(0 <= parts.number + far < parts.count)  # else what the ring gives is not of the image
            piece = parts.shift(piece, -far if abs(far) < parts.count else 0)
            piece = ops.where(is_image, piece, _element(fill, x.dtype))
        pieces.append(piece)
    return ops.cat(pieces, dim) if len(pieces) > 1 else pieces[0]


def _element(fill, dtype):
    return ops.cast(fill if isinstance(fill, Tensor) else Tensor(fill, mstype.float32), dtype)


def padded(x, dim, before, behind, fill):
    """`x` with so many elements `fill` before and behind it along a dim; for a negative number, so many fewer."""
    if min(before, behind) < 0:
        x = part_along(x, dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(behind, 0))
    if max(before, behind) <= 0:
        return x
    fill = _element(fill, x.dtype)
    first, last = (  # not by PadV3: compiled, on CPU, only the gradient of its first call is right
        [ops.broadcast_to(fill, (*x.shape[:dim], count, *x.shape[dim + 1 :]))] if count > 0 else []
        for count in (before, behind)
    )
    return ops.cat([*first, x, *last], dim)
