"""Results that are views in PyNative, by the records of operators. Pure Python."""

from mindformers_core.operators.registry import facts_of, rewritten
from mindformers_core.operators.views import INPUT, INPUT_IF_CONTIGUOUS, INPUT_IF_OF_ITS_DTYPE, is_contiguous


def viewed(node, shape, strides, targets):
    """Strides of an operator's results if they are views of its first tensor; otherwise None.

    Args:
        shape, strides: local shape and strides of its first tensor.
        targets: local shapes of its results.

    Returns:
        A tuple with the strides of each result, or None in it for a view of a copy that the operator makes.
    """
    view, args, kwargs = _view_of(node)
    return view(node, args, kwargs, shape, strides, targets) if callable(view) else None


def gives_its_input(node, shape, strides):
    """Whether an operator returns its first tensor unchanged; arguments are those of `viewed`."""
    view, *_ = _view_of(node)
    return view == INPUT or view == INPUT_IF_CONTIGUOUS and is_contiguous(shape, strides)


def is_cast_to_its_dtype(node):
    """Whether an operator is a cast to its input's own dtype: it returns the same object."""
    if _view_of(node)[0] != INPUT_IF_OF_ITS_DTYPE:
        return False
    return node.made[0].dtype == node.taken[0].dtype


def _view_of(node):
    """`OperatorFacts.view` of an operator after its rewrite, and the arguments then."""
    name, args, kwargs = rewritten(node.operator, tuple(node.args), dict(node.kwargs))
    return facts_of(name).view, args, kwargs
