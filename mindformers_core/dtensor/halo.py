"""Windows over dims of images that are cut: each part gets the borders of its neighbours, its halo, and computes alone.

The borders go by one all-gather for each cut dim, which both engines and every device have: a rank sends its own ones,
(ranks - 1) times the bytes of a halo in all, never more of the image; the gradient comes home by a reduce-scatter. Only
where a halo is larger than a part, parts are sent as a whole. The idea is that of spatial partitioning in GSPMD (arXiv
2105.04663, section 3.3).
"""

import math

import numpy as np
from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.dtensor.scans import part_along


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
    """`x` between the last `before` elements of the part in front of it and the first `behind` of that after it."""
    if not before and not behind:
        return x
    size, front, back = x.shape[dim], max(before, 0), max(behind, 0)
    if max(before, behind) > size:
        around = padded(parts.gathered(x, dim, varying=True), dim, before, behind, fill)
        return _taken(around, dim, np.arange(size + before + behind), parts.start(size, mstype.int32))
    length, ends = front + back, ((size - front, front), (0, back))
    sent = _joined([part_along(x, dim, first, count) for first, count in ends if count], dim)
    # the border of part r is in place r + 1
    around = padded(parts.gathered(sent, dim, varying=True), dim, length, length, fill)
    start = parts.start(length, mstype.int32)
    first = [_taken(around, dim, np.arange(front), start)] if front else []
    last = [_taken(around, dim, np.arange(back) + 2 * length + front, start)] if back else []
    own = [padded(x, dim, min(before, 0), min(behind, 0), fill)] if max(-before, -behind) < size else []
    return _joined([*first, *own, *last], dim)


def _taken(x, dim, places, start):
    return ops.gather(x, Tensor(places.astype(np.int32)) + start, dim)


def _joined(parts, dim):
    return ops.cat(parts, dim) if len(parts) > 1 else parts[0]


def padded(x, dim, before, behind, fill):
    """`x` with so many elements `fill` before and behind it along a dim; for a negative number, so many fewer."""
    if min(before, behind) < 0:
        x = part_along(x, dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(behind, 0))
    if max(before, behind) <= 0:
        return x
    fill = ops.cast(fill if isinstance(fill, Tensor) else Tensor(fill, mstype.float32), x.dtype)
    first, last = (  # not by PadV3: compiled, on CPU, only the gradient of its first call is right
        [ops.broadcast_to(fill, (*x.shape[:dim], count, *x.shape[dim + 1 :]))] if count > 0 else []
        for count in (before, behind)
    )
    return ops.cat([*first, x, *last], dim)
