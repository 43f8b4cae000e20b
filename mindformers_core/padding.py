"""Weights that ranks store with zeros behind the end of a dim, so that all their parts are equal. Pure Python.

`layout(…, pad=True)` asks for it. Such a Parameter has an attribute `padded_shape` besides `global_shape`, which is the
model's: that of code, optimizers and files.
"""

import numpy as np


def stored_shape(parameter):
    """The shape of the whole of a Parameter as ranks store it: with its padding."""
    shape = getattr(parameter, "padded_shape", None) or getattr(parameter, "global_shape", parameter.shape)
    return tuple(shape)


def rounded_up(layout, shape):
    """A global shape with each dim rounded up to a multiple of the number of parts that a `Layout` cuts it into."""
    counts = (layout.mesh.axis_size(*axes) for axes in layout.axes)
    return tuple(-(-size // count) * count for size, count in zip(shape, counts))


def with_padding(weight):
    """A weight in a Cell's code as ranks store it, with rows of zeros at the end; itself where there are none.

    Code that takes it computes on parts of a dim that its axes don't divide, and sees to it that the rows of zeros have
    no influence, and get no gradient. Other code has the weight without them, gathered from all ranks.
    """
    return getattr(weight, "stored", weight)


def clipped(part, shape):
    """The slices of a padded tensor without its padding, which begins behind `shape`."""
    return tuple(slice(min(each.start, size), min(each.stop, size)) for each, size in zip(part, shape))


def padded_array(array, shape):
    """An array with zeros behind its ends, up to a shape."""
    pairs = [(0, size - own) for own, size in zip(array.shape, shape)]
    return np.pad(array, pairs) if any(behind for _, behind in pairs) else array


def narrowed(tensor, shape, narrow):
    """A tensor without what is beyond `shape`; `narrow(tensor, dim, start, length)` takes a part of a dim."""
    for dim, (size, own) in enumerate(zip(tensor.shape, shape)):
        tensor = tensor if size == own else narrow(tensor, dim, 0, own)
    return tensor


def padding_note(parameter):
    """The padding of a Parameter as text, `dim 0: 257 stored as 260`; "" where there is none."""
    pairs = enumerate(zip(getattr(parameter, "global_shape", parameter.shape), stored_shape(parameter)))
    return ", ".join(f"dim {dim}: {size} stored as {stored}" for dim, (size, stored) in pairs if size != stored)
