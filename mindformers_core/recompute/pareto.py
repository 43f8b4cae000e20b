"""The Pareto curve of saved bytes against recomputed time: corners of its convex hull. Pure Python.

Saving everything and recomputing everything are the ends of the curve. For any price of a byte in seconds, the best
point is a minimum cut: a value is available in the backward pass if a gradient reads it, or if another value is
recomputed from it; an available value is either saved, at the price of its bytes, or recomputed, at the price of its
seconds. The minimum cut for one price is the idea of PyTorch's partitioner (functorch,
`min_cut_rematerialization_partition`); all prices together give the lower convex hull of the curve.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil

from mindformers_core.recompute.minimum_cut import minimum_cost_closure

TICKS = 10**12  # in a second: the search counts in picoseconds, whose sums are exact in any order
_DEPTH = 5  # bisections of the curve far from the budget


class Measured:
    """Bytes and time of sets of dropped instructions, with a cache.

    Args:
        saved_bytes, recomputed, price: see `budget.choose`.

    Attributes:
        price: function of the key of an instruction: its forward time, in ticks.
        asked: number of evaluations so far.
    """

    def __init__(self, saved_bytes, recomputed, price):
        self._saved_bytes, self._recomputed = saved_bytes, recomputed
        self._nbytes, self._rerun = {}, {}
        self.price, self.asked = cache(lambda key: ceil(price(key) * TICKS)), 0

    def nbytes(self, dropped):
        """Saved bytes without the results of `dropped`, a frozenset of keys."""
        if dropped not in self._nbytes:
            self.asked += 1
            self._nbytes[dropped] = int(self._saved_bytes(dropped))
        return self._nbytes[dropped]

    def recomputed(self, dropped):
        """The subset of `dropped` that the backward pass recomputes."""
        if dropped not in self._rerun:
            self.asked += 1
            self._rerun[dropped] = frozenset(self._recomputed(dropped))
        return self._rerun[dropped]

    def ticks(self, dropped):
        """Time of what is recomputed."""
        return sum(map(self.price, self.recomputed(dropped)))

    def points(self):
        """`(bytes, ticks, dropped)` of all evaluated sets."""
        return [(self._nbytes[known], self.ticks(known), known) for known in self._rerun if known in self._nbytes]


@dataclass(frozen=True, eq=False)
class RematProblem:
    """The rematerialization problem of a program, by groups of equivalent instructions.

    Attributes:
        keys: group -> its instructions, in order.
        producers: group -> groups that produce its inputs.
        bases: group of views -> the group that owns their memory.
        sizes: group -> bytes of its results; 0 for views.
        prices: group -> ticks.
        needed: groups whose results some gradient reads, and the groups that own their memory.
        droppable: groups that may be recomputed.
    """

    keys: dict
    producers: dict
    bases: dict
    sizes: dict
    prices: dict
    needed: frozenset
    droppable: frozenset

    def dropped(self, groups):
        """The instructions of `groups`, and their views, as a frozenset."""
        found = (group for group in self.keys if group in self.droppable and _owners(group, self.bases)[-1] in groups)
        return frozenset(key for group in found for key in self.keys[group])


def trade_of(links, measured, keep):
    """The `RematProblem` of a program.

    An instruction that takes no time counts as a view of its first input; others count with their results. Copies and
    statistics that this model leaves out make the search miss points, but the bytes of each point are evaluated.

    Args:
        keep: instructions that are never recomputed, nor are the owners of their memory.
    """
    views = {key: made_from[0] for key, made_from in links.producers.items() if made_from and not measured.price(key)}
    kept = {owner for key in keep for owner in _owners(key, views)}
    groups, keys, producers = _groups(links, kept), {}, {}
    for key, group in groups.items():
        keys.setdefault(group, []).append(key)
        producers.setdefault(group, {}).update(dict.fromkeys(groups[maker] for maker in links.producers[key]))
    droppable = frozenset(group for group in keys if kept.isdisjoint(keys[group]))
    prices = {group: sum(map(measured.price, members)) for group, members in keys.items()}
    bases = {group: next(iter(producers[group])) for group in keys if producers[group] and not prices[group]}
    needed = {owner for group in _needed(keys, producers, measured) for owner in _owners(group, bases)}
    sizes = {group: sum(map(links.nbytes.get, members)) for group, members in keys.items()}
    sizes |= dict.fromkeys(bases, 0)
    return RematProblem(keys, producers, bases, sizes, prices, frozenset(needed), droppable)


def _groups(links, kept):
    """Key -> group: instructions at equal positions of equal layers with equal kept instructions."""
    order, found, numbers = list(links.producers), {}, {}
    for start, end in pairwise(links.layer_bounds):
        inside = order[start:end]
        pattern = frozenset(links.groups[key] for key in inside if key in kept)
        number = numbers.setdefault(pattern, len(numbers))
        found |= {key: (number, links.groups[key]) for key in inside}
    return found


def _owners(view, bases):
    """A view, its base, the base of that, and so on, a list; `bases`: view -> base."""
    found = [view]
    while found[-1] in bases:
        found.append(bases[found[-1]])
    return found


def _needed(keys, producers, measured):
    """Groups whose results a gradient reads: those recomputed if dropped without their consumers."""
    colours = {}
    near = {group: set(made_from) for group, made_from in producers.items()}
    for group, made_from in producers.items():
        for maker in made_from:
            near[maker].add(group)
    for group in keys:
        taken = {colours.get(other) for other in near[group] - {group}}
        colours[group] = next(colour for colour in range(len(keys)) if colour not in taken)
    found = set()
    for colour in sorted(set(colours.values())):
        middle = {keys[group][len(keys[group]) // 2]: group for group in keys if colours[group] == colour}
        found |= {middle[key] for key in measured.recomputed(frozenset(middle)) if key in middle}
    return found


def corners(trade, limit):
    """Sets of groups to drop, with ascending time: the lower convex hull, finest around `limit`.

    Args:
        trade: a `RematProblem`.
        limit: bytes.
    """
    first = frozenset(), sum(trade.sizes[group] for group in trade.needed), 0
    last = _cheapest(trade, 1 + sum(trade.prices.values()), 1)
    return [groups for groups, _, _ in [first, *_between(trade, first, last, limit, 0), last]]


def _between(trade, left, right, limit, depth):
    """The corners between two corners, left to right, each `(groups, bytes, ticks)`."""
    fewer, more = left[1] - right[1], right[2] - left[2]
    around = left[1] > limit >= right[1]
    if fewer <= 0 or more <= 0 or (depth > _DEPTH and not around):
        return []
    middle = _cheapest(trade, more, fewer)
    if more * middle[1] + fewer * middle[2] >= more * left[1] + fewer * left[2]:
        return []
    before = _between(trade, left, middle, limit, depth + 1)
    return [*before, middle, *_between(trade, middle, right, limit, depth + 1)]


def _cheapest(trade, byte_price, tick_price):
    """`(groups to recompute, saved bytes, ticks)` with the least sum at these prices."""
    costs, implications = {}, []
    for group, size in trade.sizes.items():
        available, recomputed = ("available", group), ("recomputed", group)
        costs[available] = 0 if group in trade.needed else byte_price * size
        if group in trade.bases:
            implications.append((available, ("available", trade.bases[group])))
        elif group in trade.droppable:
            costs[recomputed] = tick_price * trade.prices[group] - byte_price * size
            implications.append((recomputed, available))
            implications += [(recomputed, ("available", maker)) for maker in trade.producers[group] if maker != group]
    found = minimum_cost_closure(costs, implications)
    groups = frozenset(group for kind, group in found if kind == "recomputed")
    available = trade.needed.union(group for kind, group in found if kind == "available")
    kept = sum(trade.sizes[group] for group in available - groups)
    return groups, kept, sum(trade.prices[group] for group in groups)


def best_of(points):
    """The Pareto-optimal ones of points `(bytes, ticks, set)`, ticks ascending."""
    best = []
    for point in sorted(points, key=lambda point: (point[1], point[0])):
        if not best or point[0] < best[-1][0]:
            best.append(point)
    return best


def lower_hull(points):
    """Corners of the lower convex hull of points `(bytes, ticks, set)`, bytes descending."""
    hull = []
    for point in best_of(points):
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(point, left, right):
    """Whether a point is on or above the line between two others."""
    return (point[1] - left[1]) * (left[0] - right[0]) >= (right[1] - left[1]) * (left[0] - point[0])
