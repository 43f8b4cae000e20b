"""Which results of operators are views of their inputs in PyNative, and with which strides. Pure Python.

A view has the memory of another tensor and strides of its own, counted in elements. A reshape of a transposed tensor
can't be: there a contiguous copy is made, and the result is a view of that.
"""

from mindformers_core.operators.operator_rewrites import rewrite
from mindformers_core.program.structure import values_in

__all__ = ["contiguous_strides", "gives_its_input", "is_cast_to_its_dtype", "is_contiguous", "reshaped", "viewed"]

_RESHAPES = frozenset(
    ("Reshape", "ViewAs", "FlattenExt", "ExpandDims", "ExpandDimsView", "DeprecatedUnsqueeze", "Squeeze")
)
_BROADCASTS = frozenset(("BroadcastTo", "ExpandAs"))
_PARTS = frozenset(
    ("Split", "SplitTensor", "SplitTensorView", "SplitWithSize", "SplitWithSizeView", "DeprecatedSplit")
    + ("Chunk", "ChunkView", "Narrow", "NarrowView")
)
_CASTS = frozenset(("Cast", "TypeAs"))
_SAME_WHERE_CONTIGUOUS = frozenset(("ToOther", "ToDevice"))


def contiguous_strides(shape):
    """Strides of a tensor whose elements lie one behind the other, the last dim's closest."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_contiguous(shape, strides):
    """Whether strides are those of a contiguous tensor, wherever they matter."""
    if 0 in shape:
        return True
    return all(size == 1 or one == other for size, one, other in zip(shape, strides, contiguous_strides(shape)))


def reshaped(shape, strides, target):
    """Strides of the view with shape `target`, or None where there is none."""
    if 0 in shape:
        return contiguous_strides(target)
    runs = _runs(shape, strides)
    found = []
    for size in reversed(target):
        while runs and runs[-1][0] == 1:
            runs.pop()
        count, stride = runs.pop() if runs else (1, 1)
        if count % size:
            return None
        found.append(stride)
        runs.append((count // size, stride * size))
    return tuple(reversed(found))


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


def viewed(node, shape, strides, targets):
    """The strides of an operator's results where they are views of its first tensor; None where they aren't.

    Args:
        node: the `OperatorNode`.
        shape, strides: of its first tensor, on one rank.
        targets: local shapes of its results.

    Returns:
        A tuple with the strides of each result, themselves None for a view of a copy that the operator makes; or None.
    """
    name, args, kwargs = rewrite(node.operator, tuple(node.args), dict(node.kwargs))
    if name in _RESHAPES:
        return (reshaped(shape, strides, targets[0]),)
    if name in _BROADCASTS:
        new = len(targets[0]) - len(shape)
        kept = [stride if size == wanted else 0 for size, wanted, stride in zip(shape, targets[0][new:], strides)]
        return ((*(0,) * new, *kept),)
    if name in _PARTS:
        return (strides,) * len(targets)
    rule = _RULES.get(name)
    return None if rule is None else rule(node, args, kwargs, strides, targets)


def gives_its_input(node, shape, strides):
    """Whether an operator's result is just what its first tensor is; takes what `viewed` does."""
    name, _, _ = rewrite(node.operator, tuple(node.args), dict(node.kwargs))
    return name == "StopGradient" or name in _SAME_WHERE_CONTIGUOUS and is_contiguous(shape, strides)


def is_cast_to_its_dtype(node):
    """Whether an operator is a cast to the dtype that its tensor has: it gives the same object back."""
    name, _, _ = rewrite(node.operator, tuple(node.args), dict(node.kwargs))
    return name in _CASTS and values_in(node.outputs)[0].dtype == values_in((node.args, node.kwargs))[0].dtype


def _transpose(node, args, kwargs, strides, targets):
    return (tuple(strides[dim] for dim in args[1]),)


def _swap(node, args, kwargs, strides, targets):
    first, second = (*args[1:], *kwargs.values())
    swapped = list(strides)
    swapped[first], swapped[second] = strides[second], strides[first]
    return (tuple(swapped),)


def _reverse(node, args, kwargs, strides, targets):
    return (strides[::-1],)


def _unstack(node, args, kwargs, strides, targets):
    attributes = node.primitive.attributes if node.primitive is not None else {}
    given = [*args[1:2], *(value for name, value in (attributes | kwargs).items() if name in ("axis", "dim"))]
    dim = (given[-1] if given else 0) % len(strides)
    return ((*strides[:dim], *strides[dim + 1 :]),) * len(targets)


def _strided(node, args, kwargs, strides, targets):
    """A view where no masks are given; MindSpore copies otherwise."""
    steps, masks = args[3], args[4:]
    if any(masks) or kwargs or len(strides) != len(targets[0]) or any(step < 1 for step in steps):
        return None
    return (tuple(stride * step for stride, step in zip(strides, (*steps, *(1,) * len(strides)))),)


_RULES = {
    "Transpose": _transpose,
    "TransposeExtView": _swap,
    "TExt": _reverse,
    "Unstack": _unstack,
    "StridedSlice": _strided,
}
