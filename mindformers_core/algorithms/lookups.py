"""Algorithms of operators that look up, or write, along a dim that is cut: each part does what falls into it."""

from functools import partial

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.algorithms.scans import part_along
from mindformers_core.dtypes import dtype_name


def found_here(indices, size, context):
    """Indices into this part (0 where they point elsewhere), and where they do. Negative ones count from the end.

    An index outside of all parts points elsewhere for every one of them: it finds zeros, where one card raises an
    error (an error here would need a copy of all indices to the host in every step).
    """
    whole = ops.where(ops.less(indices, 0), indices + size * context.count, indices)
    local = whole - context.start(size, indices.dtype)
    absent = ops.logical_or(ops.less(local, 0), ops.greater_equal(local, size))
    return ops.masked_fill(local, absent, 0), absent


def zero_where(absent, found):
    """What was found, and zero where it is absent."""
    return ops.masked_fill(found, absent, 0.0 if "float" in dtype_name(found.dtype) else 0)


def _gather(operator, args, context):
    """Look up the entries of this part, zero for others: the parts' results are terms of a sum."""
    params, indices, dim, batch = (*args, 0)[:4]
    dim, batch = dim % params.ndim, batch + indices.ndim * (batch < 0)
    local, absent = found_here(indices, params.shape[dim], context)
    shape = [*indices.shape[:batch], *[1] * (dim - batch), *indices.shape[batch:], *[1] * (params.ndim - dim - 1)]
    return zero_where(ops.reshape(absent, tuple(shape)), operator(params, local, dim, *args[3:]))


def _slice(_, args, context):
    """Elements at known places: every part gives those that would be in it, of which the right ones are taken.

    No number of a rank is in it: of two slices that are the same on one rank, a compiler would send only one there.

    Args:
        args: the tensor, and for every dim that is sliced the bounds of a `range`.
    """
    x, taken = args
    for dim, *bounds in sorted(taken, key=lambda each: len(context.along(each[0]).axes)):
        places, parts, size = np.arange(*bounds), context.along(dim), x.shape[dim]
        if parts.axes and len(places) < size:
            x = ops.gather(x, Tensor(places % size), dim)
            places = places // size * len(places) + np.arange(len(places))
        x = ops.gather(parts.gathered(x, dim) if parts.axes else x, Tensor(places), dim)
    return ops.reshape(x, context.local_shape)


def _gather_elements(operator, args, context):
    """As `_gather`, element by element along a dim."""
    x, dim, indices = args
    local, absent = found_here(indices, x.shape[dim], context)
    return zero_where(absent, operator(x, dim, local))


def _zero_rows(absent, found):
    """As `zero_where`, for the rows of the last dims."""
    return zero_where(ops.reshape(absent, (*absent.shape, *(1,) * (found.ndim - absent.ndim))), found)


def _embedding(operator, args, context):
    """As `_gather`, for the operator that takes indices first and a matrix of rows second."""
    indices, weight, *more = args
    return _gather(lambda params, local, _: operator(local, params, *more), (weight, indices, 0), context)


def _gather_nd(operator, args, context):
    """As `_gather`, by coordinates."""
    x, indices = args
    local, absent = _coordinates_here(indices, x, context)
    return _zero_rows(ops.any(absent, -1), operator(x, ops.masked_fill(local, absent, 0)))


def _coordinates_here(indices, x, context):
    """Coordinates into this part, and those that point elsewhere."""
    parts = [(context.along(dim), x.shape[dim]) for dim in range(indices.shape[-1])]
    columns = zip(*((size * part.count, size * part.number, size) for part, size in parts))
    wholes, starts, sizes = (Tensor(values, indices.dtype) for values in columns)
    local = ops.where(ops.less(indices, 0), indices + wholes, indices) - starts
    return local, ops.logical_or(ops.less(local, 0), ops.greater_equal(local, sizes))


def _embedding_lookup(operator, args, context):
    params, indices, offset = args
    return embedding_rows(params, indices - context.start(params.shape[0], indices.dtype), offset)


def embedding_rows(params, indices, offset):
    """As `_gather`, with zeros for rows that there aren't. MindSpore's operator has a sparse gradient."""
    rows = indices - offset
    absent = ops.logical_or(ops.less(rows, 0), ops.greater_equal(rows, params.shape[0]))
    return _zero_rows(absent, ops.gather(params, ops.masked_fill(rows, absent, 0), 0))


def _scatter(locate, operator, args, context):
    """Write what falls into this part. The rest goes to one more entry of each cut dim, which is cut off again."""
    x, *rest = args
    cut = [dim for dim, axes in enumerate(context.layouts[0].dims) if set(axes) & set(context.axes)]
    kinds = (tuple, list) if locate is _of_several else Tensor
    place = next(place for place, argument in enumerate(rest) if isinstance(argument, kinds))
    rest[place] = locate(rest[place], x, cut, context)
    wide = x
    for dim in cut:
        wide = ops.cat((wide, ops.zeros_like(part_along(wide, dim, 0, 1))), dim)
    return ops.slice(operator(wide, *rest), (0,) * x.ndim, x.shape)


def _of_one_dim(indices, x, cut, context):
    """Indices into the one dim that is cut."""
    local, absent = found_here(indices, x.shape[cut[0]], context)
    return ops.masked_fill(local, absent, x.shape[cut[0]])


def _of_coordinates(indices, x, cut, context):
    """Coordinates, of which the last dim counts the dims of `x`."""
    local, absent = _coordinates_here(indices, x, context)
    return ops.where(absent, Tensor(x.shape[: indices.shape[-1]], indices.dtype), local)


def _of_several(indices, x, cut, context):
    """A tensor of indices for each of the first dims of `x`."""
    here = [_of_one_dim(each, x, [dim], context.along(dim)) if dim in cut else each for dim, each in enumerate(indices)]
    return type(indices)(here)


LOOKUPS = {
    "slice": _slice,
    "gather": lambda _, *given: _gather(ops.gather, *given),
    "gather_elements": _gather_elements,
    "gather_nd": _gather_nd,
    "embedding": _embedding,
    "embedding_lookup": _embedding_lookup,
    "scatter": partial(_scatter, _of_one_dim),
    "scatter_nd": partial(_scatter, _of_coordinates),
    "index_put": partial(_scatter, _of_several),
}
