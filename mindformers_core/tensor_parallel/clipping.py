"""Clipping by the global norm (Pascanu et al. 2013) of gradients that lie in slices on a mesh."""

from mindspore import ops

from mindformers_core.layout import Layout
from mindformers_core.tensor_parallel.move import move

__all__ = ["clip_by_global_norm", "global_norm", "sum_over"]


def clip_by_global_norm(gradients, parameters, max_norm):
    """Scale all gradients by one factor so that their joint L2 norm over the whole mesh is at most `max_norm`.

    Args:
        gradients: plain local tensors, final: replicated over the axes that don't shard their parameter.
        parameters: the parameters, in the same order; `parameter.layout` (a `Layout`) where it is distributed.
        max_norm: 0 leaves the gradients as they are.

    Returns:
        `(gradients, norm)`: a tuple, and the norm before clipping, a float32 scalar that is the same on all ranks.
    """
    norm = global_norm(gradients, parameters)
    if max_norm == 0:
        return tuple(gradients), norm
    # the small term keeps a norm of zero from making NaN
    factor = ops.minimum(max_norm / (norm + 1e-6), ops.ones_like(norm))
    return tuple(gradient * factor.astype(gradient.dtype) for gradient in gradients), norm


def global_norm(gradients, parameters):
    """L2 norm of all elements of the global gradients, each counted once, in float32.

    Parameters that the same axes shard are summed together, and each such set of axes costs one all-reduce of a scalar.
    """
    sums = {}
    for gradient, parameter in zip(gradients, parameters, strict=True):
        layout = getattr(parameter, "layout", None)
        key = (None, ()) if layout is None else (layout.mesh, _sharding_axes(layout))
        square = ops.square(gradient.astype("float32")).sum()
        sums[key] = square if key not in sums else sums[key] + square
    return ops.sqrt(sum(sum_over(mesh, axes, value) for (mesh, axes), value in sums.items()))


def _sharding_axes(layout):
    return tuple(axis for axis in layout.mesh.axis_names if any(axis in axes for axes in layout.dims))


def sum_over(mesh, axes, value):
    """The scalar `value` summed over `axes` of `mesh`, the same on all their ranks."""
    if not axes:
        return value
    return move(value, Layout.on(mesh, (), {axis: "sum" for axis in axes}), Layout.on(mesh), ())
