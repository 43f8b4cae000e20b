"""Collectives as array operations on the tensors of all ranks of a group.

Pure Python. Written from the definitions of the collectives; a group's tensors are a list in the group's order.
"""

from functools import reduce

import numpy as np

_REDUCE = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum}


def reduce_arrays(tensors, op):
    """The elementwise reduction of tensors in their order; `op`: `sum`, `avg`, `max` or `min`."""
    total = reduce(_REDUCE[op], tensors)
    return total / len(tensors) if op == "avg" else total


def exchange(kind, tensors, *arguments):
    """The results of a collective on all ranks of a group.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute` or `exchange`.
        tensors: the inputs, NumPy arrays.
        arguments: `op`; `dim`; `dim, op`; `dim, to_dim`; `destinations, origins`, for every place of the group the
            place that its tensor goes to, and the one that its result comes from; None: none, and zeros.

    Returns:
        The list of results.
    """
    return _EXCHANGES[kind](tensors, *arguments)


def _all_to_all(tensors, dim, to_dim):
    pieces = [np.split(tensor, len(tensors), to_dim) for tensor in tensors]
    return [np.concatenate(received, dim) for received in zip(*pieces)]


_EXCHANGES = {
    "all_reduce": lambda tensors, op: [reduce_arrays(tensors, op)] * len(tensors),
    "all_gather": lambda tensors, dim: [np.concatenate(tensors, dim)] * len(tensors),
    "reduce_scatter": lambda tensors, dim, op: np.split(reduce_arrays(tensors, op), len(tensors), dim),
    "all_to_all": _all_to_all,
    "exchange": lambda tensors: [np.stack(rows) for rows in zip(*tensors)],
    "permute": lambda tensors, _, origins: [
        np.zeros_like(tensors[0]) if origin is None else tensors[origin] for origin in origins
    ],
}


def reduce_terms(terms, layout):
    """Rank -> reduced tensor, of the terms of a partial tensor, for ranks with all others along the partial axes."""
    for axis, op in layout.partial:
        members = {rank: layout.mesh.group(rank, (axis,)) for rank in terms}
        terms = {rank: reduce_arrays([terms[other] for other in members[rank]], op) for rank in terms}
    return terms
