"""The results of operators that are views of their first tensor in PyNative, and their strides. Pure Python.

A view has the memory of another tensor and strides of its own, counted in elements. A reshape of a transposed tensor
can't be: there a contiguous copy is made, and the result is a view of that.

The functions are called with an operator's node, its arguments as `rewritten` has them, shape and strides of its first
tensor on one rank, and the local shapes of its results. They return the strides of each result, themselves None for a
view of a copy that the operator makes; or None where no result is a view.
"""

from itertools import accumulate
from operator import mul

INPUT = "input"  # the result is just what the first tensor is
INPUT_IF_CONTIGUOUS = "input if contiguous"
INPUT_IF_OF_ITS_DTYPE = "input if of its dtype"  # the same object


def contiguous_strides(shape):
    """Strides of a contiguous tensor of this shape, in row-major order."""
    return tuple(accumulate(reversed(shape), mul, initial=1))[-2::-1]


def is_contiguous(shape, strides):
    """Whether strides are those of a contiguous tensor, wherever they matter."""
    if 0 in shape:
        return True
    return all(size == 1 or one == other for size, one, other in zip(shape, strides, contiguous_strides(shape)))


def _runs(shape, strides):
    """`(number of elements, stride)` of dims that are evenly spaced together, major to minor."""
    runs = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs


def reshaped(node, args, kwargs, shape, strides, targets):
    """View of a reshape; of a contiguous copy where no strides fit."""
    if 0 in shape:
        return (contiguous_strides(targets[0]),)
    runs, found = _runs(shape, strides), []
    for size in reversed(targets[0]):
        while runs and runs[-1][0] == 1:
            runs.pop()
        count, stride = runs.pop() if runs else (1, 1)
        if count % size:
            return (None,)
        found.append(stride)
        runs.append((count // size, stride * size))
    return (tuple(reversed(found)),)


def broadcast(node, args, kwargs, shape, strides, targets):
    """Dims that are repeated have the stride 0."""
    new = len(targets[0]) - len(shape)
    kept = [stride if size == wanted else 0 for size, wanted, stride in zip(shape, targets[0][new:], strides)]
    return ((*(0,) * new, *kept),)


def parts(node, args, kwargs, shape, strides, targets):
    """Every result is a part of it."""
    return (strides,) * len(targets)


def transposed(node, args, kwargs, shape, strides, targets):
    """The dims in another order."""
    return (tuple(strides[dim] for dim in args[1]),)


def swapped(node, args, kwargs, shape, strides, targets):
    """Two dims change places."""
    first, second = (*args[1:], *kwargs.values())
    found = list(strides)
    found[first], found[second] = strides[second], strides[first]
    return (tuple(found),)


def reversed_dims(node, args, kwargs, shape, strides, targets):
    """The dims in the opposite order."""
    return (strides[::-1],)


def unstacked(node, args, kwargs, shape, strides, targets):
    """Without one dim."""
    attributes = node.primitive.attributes if node.primitive is not None else {}
    given = [*args[1:2], *(value for name, value in (attributes | kwargs).items() if name in ("axis", "dim"))]
    dim = (given[-1] if given else 0) % len(strides)
    return ((*strides[:dim], *strides[dim + 1 :]),) * len(targets)


def strided(node, args, kwargs, shape, strides, targets):
    """A view where no masks are given; MindSpore copies otherwise."""
    steps, masks = args[3], args[4:]
    if any(masks) or kwargs or len(strides) != len(targets[0]) or any(step < 1 for step in steps):
        return None
    return (tuple(stride * step for stride, step in zip(strides, (*steps, *(1,) * len(strides)))),)
