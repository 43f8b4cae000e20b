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
    """The results of a collective on all ranks of a group, a list: `exchanged` for every place."""
    if kind in ("all_reduce", "all_gather"):
        return [exchanged(kind, tensors, 0, *arguments)] * len(tensors)
    return [exchanged(kind, tensors, place, *arguments) for place in range(len(tensors))]


def exchanged(kind, tensors, place, *arguments):
    """The result of a collective on one rank of a group.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute`, `dispatch` or `combine`.
        tensors: the inputs of all ranks, NumPy arrays; of `dispatch` and `combine` a row for each rank, of its rows.
        place: of the rank in the group.
        arguments: `op`; `dim`; `dim, op`; `dim, to_dim`; `destinations, origins`, for every place of the group the
            place that its tensor goes to, and the one that its result comes from; None: none, and zeros.
    """
    return _EXCHANGES[kind](tensors, place, *arguments)


def _parts(tensors, place, dim):
    return [np.split(tensor, len(tensors), dim)[place] for tensor in tensors]


_EXCHANGES = {
    "all_reduce": lambda tensors, _, op: reduce_arrays(tensors, op),
    "all_gather": lambda tensors, _, dim: np.concatenate(tensors, dim),
    "reduce_scatter": lambda tensors, place, dim, op: reduce_arrays(_parts(tensors, place, dim), op),
    "all_to_all": lambda tensors, place, dim, to_dim: np.concatenate(_parts(tensors, place, to_dim), dim),
    **dict.fromkeys(
        ("dispatch", "combine"), lambda tensors, place, *_: np.stack([tensor[place] for tensor in tensors])
    ),
    "permute": lambda tensors, place, _, origins: (
        np.zeros_like(tensors[0]) if origins[place] is None else tensors[origins[place]]
    ),
}


def reduce_terms(terms, layout):
    """Rank -> reduced tensor, of the terms of a partial tensor, for ranks with all others along the partial axes."""
    for axis, op in layout.partial:
        members = {rank: layout.mesh.group(rank, (axis,)) for rank in terms}
        terms = {rank: reduce_arrays([terms[other] for other in members[rank]], op) for rank in terms}
    return terms
