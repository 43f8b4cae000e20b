"""Which experts lie together on a rank, so that ranks have equal loads. Pure Python."""

from dataclasses import dataclass

import numpy as np

from mindformers_core.ranges import bounded


@dataclass(frozen=True)
class PlacementSettings:
    """Experts that move between the ranks of `parallelism.expert_parallel`, docs/experts.md."""

    interval: int = bounded(0, 0, 10**9)  # steps between looks at the loads of ranks since the last one; 0: none
    threshold: float = bounded(1.1, 1.0, 1e4)  # of the busiest rank's load over the mean: a layer's experts move above


@dataclass(frozen=True)
class MoeSettings:
    """Mixtures of experts."""

    placement: PlacementSettings = PlacementSettings()


def rank_loads(loads, experts, ranks):
    """The loads (ranks,) of ranks, of loads (E,) of experts by number, and the experts (E,) at each position."""
    return np.asarray(loads, float)[np.asarray(experts)].reshape(ranks, -1).sum(1)


def placed_by_loads(loads, ranks, experts, threshold):
    """The experts at each position after a look at their loads: as before up to `threshold` times the mean, else moved
    until the busiest rank's load is halfway between it and the mean. Arguments as of `placement`."""
    of_ranks = rank_loads(loads, experts, ranks)
    if of_ranks.max() <= threshold * of_ranks.mean():
        return experts
    return placement(loads, ranks, experts, (1 + threshold) / 2)


def placement(loads, ranks, experts, threshold=1.0):
    """The experts at each position after as few moves as bring the busiest rank's load to `threshold` times the mean.

    Each move exchanges an expert of the busiest rank for one of another rank, those two that leave the busier of both
    with the least: local search for multiprocessor scheduling (Finn and Horowitz, "A linear time approximation
    algorithm for multiprocessor scheduling", BIT 19, 1979), with as many experts on every rank. It ends where no
    exchange helps; experts that stay on a rank keep their position.

    Args:
        loads: (E,), of experts by number.
        ranks: number of ranks, each of which has E / ranks consecutive positions.
        experts: the expert at each position now.
        threshold: at least 1. Default: 1, as good as exchanges make it.

    Returns:
        An int array (E,).
    """
    before, loads = np.asarray(experts).reshape(ranks, -1), np.asarray(loads, float)
    held = before.copy()
    while True:
        sums = loads[held].sum(1)
        busiest = int(np.argmax(sums))
        if sums[busiest] <= threshold * sums.mean():
            break
        less = loads[held[busiest]][:, None, None] - loads[held]  # of the busiest rank after each exchange
        after = np.maximum(sums[busiest] - less, sums[:, None] + less)
        after[:, busiest] = np.inf
        own, rank, other = np.unravel_index(np.argmin(after), after.shape)
        if after[own, rank, other] >= sums[busiest]:
            break
        held[busiest, own], held[rank, other] = held[rank, other], held[busiest, own]
    found = before.copy()
    for own, old, new in zip(found, before, held):
        own[~np.isin(old, new)] = new[~np.isin(new, old)]
    return found.reshape(-1)
