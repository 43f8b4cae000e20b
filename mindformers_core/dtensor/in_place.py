"""Operators that change a tensor in place, as functions of its value: the tensor then has the result, a new version.

A write of a Parameter is state of its Cell: the value is written, in the layout that the Parameter has.
"""

from mindspore import Tensor, mint, ops

__all__ = ["is_in_place", "written"]


def _columns(function):
    """A scatter of rows: of indices of any shape, one a row."""
    return lambda x, indices, updates: function(x, ops.expand_dims(indices, -1), updates)


def _scatter_update(x, indices, updates):
    return ops.TensorScatterUpdate()(x, indices, updates)


# operators of Parameters: the new value by the old one and the operator's other arguments
_STATE = {
    "Assign": lambda x, value: value,
    "AssignAdd": lambda x, value: x + value,
    "AssignSub": lambda x, value: x - value,
}
_SCATTERS = {
    "Update": _scatter_update,
    **{name: getattr(ops, f"tensor_scatter_{name.lower()}") for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")},
}
_STATE |= {f"ScatterNd{name}": function for name, function in _SCATTERS.items()}
_STATE |= {f"Scatter{name}": _columns(function) for name, function in _SCATTERS.items()}


def is_in_place(name):
    """Whether an operator changes a tensor in place."""
    return name.startswith("Inplace") or name in _STATE


def written(name, args, kwargs, primitive):
    """The tensor that an operator changes in place, with its new value; None for any other operator."""
    function = _STATE.get(name)
    if function is None or not hasattr(type(args[0]), "overwrite"):
        return None
    value = function(*args, **kwargs)
    if not isinstance(value, Tensor) or value.shape != args[0].shape:
        value = ops.broadcast_to(value if isinstance(value, Tensor) else Tensor(value, args[0].dtype), args[0].shape)
    args[0].overwrite(value if value.dtype == args[0].dtype else ops.cast(value, args[0].dtype))
    return args[0]
