"""Weights of which ranks store parts of one size, with zeros behind what is theirs of a dim that isn't cut evenly.

`layout(…, pad=…)` asks for it. Such a Parameter has an attribute `part_sizes`: for every dim the number of rows of each
part, or None where parts are equal. Its `global_shape` is the model's: that of code, optimizers and files. Pure Python.
"""

from itertools import accumulate

import numpy as np


def sizes_of_parts(layout, shape, pad, name):
    """For every dim of a weight the sizes of its parts, None where they are equal without padding; () for no padding.

    Args:
        layout: its `Layout`. shape: global.
        pad: as of `layout(…, pad=…)`: True, or the sizes of the parts of the one dim that is cut.
        name: of the weight, for errors.

    Raises:
        ValueError: sizes that aren't those of the parts of one dim.
    """
    counts = [layout.mesh.axis_size(*axes) for axes in layout.axes]
    if pad is True:
        rooms = [-(-size // count) for size, count in zip(shape, counts)]
        found = [
            tuple(max(0, min(room, size - number * room)) for number in range(count)) if size % count else None
            for size, room, count in zip(shape, rooms, counts)
        ]
        return tuple(found) if any(found) else ()
    cut = [dim for dim, count in enumerate(counts) if count > 1]
    if not cut and sum(pad) in shape:
        return ()
    if len(cut) != 1 or len(pad) != counts[cut[0]] or sum(pad) != shape[cut[0]] or min(pad) < 1:
        raise ValueError(
            f"{name} of shape {tuple(shape)}: pad={pad} should have the sizes of the parts of the one dim that is cut, "
            f"as {layout} on {layout.mesh}, which add up to its size"
        )
    return tuple(tuple(pad) if dim == cut[0] else None for dim in range(len(shape)))


def padded_shape(shape, sizes):
    """The global shape as ranks store it, of parts of these `part_sizes`; () for no padding."""
    sizes = sizes or (None,) * len(shape)
    return tuple(size if parts is None else len(parts) * max(parts) for size, parts in zip(shape, sizes))


def stored_shape(parameter):
    """The shape of the whole of a Parameter as ranks store it: with its padding."""
    return padded_shape(getattr(parameter, "global_shape", parameter.shape), getattr(parameter, "part_sizes", ()))


def with_padding(weight):
    """A weight in a Cell's code as ranks store it, where that has rows of zeros at its end alone; or the weight itself.

    Code that takes it computes on parts of a dim that its axes don't divide, and sees to it that the rows of zeros have
    no influence, and get no gradient. Other code has the weight without them, gathered from all ranks.
    """
    return getattr(weight, "with_padding", weight)


def note_stored(weight, stored, sizes):
    """Have what stands for a padded weight in a Cell's code know the whole as ranks store it."""
    vars(weight).update(stored=stored, part_sizes=sizes)
    if all(parts is None or len(_runs(parts)) == 1 for parts in sizes):
        weight.with_padding = stored


def own_slices(part, sizes):
    """The slices of a weight, as the model has it, for those of a part of it as ranks store it; () for no padding."""
    return tuple(each if parts is None else _own(each, parts) for each, parts in zip(part, sizes)) or tuple(part)


def _own(rows, parts):
    number, before = rows.start // max(parts), sum(parts[: rows.start // max(parts)])
    return slice(*(before + min(end - number * max(parts), parts[number]) for end in (rows.start, rows.stop)))


def padded_array(array, shape):
    """An array with zeros behind its ends, up to a shape, such as that of a part."""
    pairs = [(0, size - own) for own, size in zip(array.shape, shape)]
    return np.pad(array, pairs) if any(behind for _, behind in pairs) else array


def stored_array(array, sizes):
    """The whole of a weight as ranks store it, in parts of these `part_sizes`; () for no padding."""
    if not sizes:
        return array
    found = np.zeros(padded_shape(array.shape, sizes), array.dtype)
    found[_own_index(array.shape, sizes)] = array
    return found


def own_array(array, sizes):
    """The inverse of `stored_array`."""
    shape = [size if parts is None else sum(parts) for size, parts in zip(array.shape, sizes)]
    return array[_own_index(shape, sizes)] if sizes else array


def _own_index(shape, sizes):
    rows = [
        np.arange(size) if parts is None else np.concatenate([np.arange(start, start + n) for start, n in _runs(parts)])
        for size, parts in zip(shape, sizes)
    ]
    return np.ix_(*rows)


def narrowed(tensor, sizes, ops):
    """A tensor, of any kind, without the padding of parts of these `part_sizes`; `ops` are MindSpore's."""
    for dim, parts in enumerate(sizes):
        if parts is not None:
            pieces = [ops.narrow(tensor, dim, *run) for run in _runs(parts)]
            tensor = pieces[0] if len(pieces) == 1 else ops.cat(pieces, dim)
    return tensor


def _runs(parts):
    """The rows that aren't padding, in what is stored of parts of these sizes: pairs (start, number of rows)."""
    found = []
    for start, size in zip(accumulate([max(parts)] * len(parts), initial=0), parts):
        if found and sum(found[-1]) == start:
            found[-1] = found[-1][0], found[-1][1] + size
        elif size:
            found.append((start, size))
    return found


def padding_note(parameter):
    """The padding of a Parameter as text, `dim 0: 257 stored as 260`; "" where there is none."""
    pairs = zip(getattr(parameter, "part_sizes", ()), stored_shape(parameter))
    found = [(dim, *pair) for dim, pair in enumerate(pairs) if pair[0] is not None]
    return ", ".join(
        f"dim {dim}: {sum(parts)} stored as {stored}, parts of {_shown(parts)}" for dim, parts, stored in found
    )


def _shown(parts):
    return " + ".join(map(str, parts)) if len(parts) <= 8 else f"up to {max(parts)}"
