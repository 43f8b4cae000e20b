"""Operators that compute nothing: their result is their input, seen with another shape. Pure Python."""

__all__ = ["is_view"]

_VIEWS = frozenset(
    ("Reshape", "ViewAs", "Flatten", "FlattenExt", "ExpandDims", "DeprecatedUnsqueeze", "Squeeze", "TExt")
    + ("Identity", "StopGradient")
)


def is_view(operator):
    """Whether an operator's result needs no memory of its own: it is the input's, seen with another shape."""
    return operator in _VIEWS or operator.endswith("View")
