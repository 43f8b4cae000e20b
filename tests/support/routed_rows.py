"""What ranks have and get where as many rows go between them as data say: the truth of `dispatch` and `combine`."""

import numpy as np


def routed_rows(me, counts, others, total, most=None):
    """Random float32 rows of a rank, and what becomes of them.

    Args:
        me: the rank.
        counts: int (ranks, ranks), how many rows go from each to each.
        others: sizes of a row's dims.
        total: rows of the tensor that is dispatched.
        most: rows of a rank's part of a result in a graph. Default: as in PyNative, as many as come.

    Returns:
        What `dispatch` and `combine` take; what they give, a list of the rows from each rank, and a tensor of `total`
        rows; and a function that gives such a list of a tensor as `dispatch` gives.
    """
    random, ranks = np.random.default_rng(counts), len(counts)
    xs = random.normal(size=(ranks, total, *others)).astype(np.float32)
    held = [[random.normal(size=(each, *others)).astype(np.float32) for each in column] for column in counts.T]
    there = [np.split(x, np.cumsum(given))[me] for x, given in zip(xs, counts)]
    back = np.concatenate([*(parts[me] for parts in held), np.zeros((total, *others), np.float32)])[:total]
    if most is None:
        y = np.concatenate([*held[me], np.zeros((int(not counts[:, me].any()), *others), np.float32)])
        return xs[me], y, there, back, lambda y: np.split(y, np.cumsum(counts[:, me]))[:ranks]
    y = np.concatenate([[*part, *random.normal(size=(most - len(part), *others))] for part in held[me]])
    starts = np.arange(ranks) * most
    return (
        xs[me],
        y.astype(np.float32),
        there,
        back,
        lambda y: [y[start : start + count] for start, count in zip(starts, counts[:, me])],
    )
