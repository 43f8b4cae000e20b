"""A lower bound of the remaining cost in the search for a plan, the heuristic of A*. Pure Python.

The steps of a plan that concern one axis are a path through the marks of that axis, which has a least cost. Over
several axes, the costs of hops and bytes add up even where one collective serves many axes: a ring over the joint group
is no shorter than its parts. The launch of a collective is paid once for all its axes, so that only the axis with the
highest launch costs counts.
"""

from dataclasses import replace
from functools import cache, lru_cache
from math import inf

from mindformers_core.redistribution.device_model import Link
from mindformers_core.redistribution.transitions import SHARD, changes_by_kind

OTHER_DIM = "other dim"


def lower_bound(space, goal, model):
    """A function from a state of `space` to seconds that no plan from there to state `goal` costs less than."""
    starts = replace(model, link=Link(0.0, inf), axis_links=())
    travel = replace(model, launch=0.0)
    parts, goals = space.size(space.axes), list(zip(space.axes, goal[1]))
    sizes = [(axis, space.sizes[axis], parts, len(space.axes), space.whole, space.ops) for axis in space.axes]
    least_starts = [_least(starts, mark, *size) for (_, mark), size in zip(goals, sizes)]
    least_travel = [_least(travel, mark, *size) for (_, mark), size in zip(goals, sizes)]
    goal_dims = {axis: dim for dim, axes in enumerate(goal[0]) for axis in axes}

    @cache
    def bound(marks):
        return max(map(dict.get, least_starts, marks)) + sum(map(dict.get, least_travel, marks))

    def left(state):
        away = {axis for dim, axes in enumerate(state[0]) for axis in axes if goal_dims.get(axis, dim) != dim}
        return bound(tuple([OTHER_DIM if axis in away else mark for axis, mark in zip(space.axes, state[1])]))

    return left


@lru_cache(maxsize=65536)
def _least(model, goal_mark, axis, size, parts, count, whole, ops):
    """For every mark of `axis` the least that its way to `goal_mark` costs; `OTHER_DIM` is sharded, but elsewhere.

    The axis has `size` ranks; it is one of `count` axes that move and that cut `whole` bytes into `parts`.
    """
    edges = list(_edges(model, axis, size, parts, count, whole, ops))
    least = {goal_mark: 0.0}
    for _ in range(len(ops) + 4):
        for before, after, seconds in edges:
            if after in least:
                least[before] = min(least.get(before, inf), least[after] + seconds)
    return least


def _edges(model, axis, size, parts, count, whole, ops):
    """`(mark before, mark after, seconds)` for every step on this axis alone, on the least that others may leave of it.

    A step from dim to dim may take all axes along for the price of one, so that each bears its part only.
    """
    for kind, op, before, after in changes_by_kind((SHARD, OTHER_DIM), ops):
        moves_dims = {before, after} == {SHARD, OTHER_DIM}
        fixed, per_byte = model.step_rates(kind, op, (axis,), size)
        volume = whole // parts if moves_dims else whole * size // parts
        share = count if moves_dims and not model.launch else 1
        yield before, after, (fixed + per_byte * volume) / share
