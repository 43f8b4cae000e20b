"""The cheapest sequence of steps from one layout to another: an A* search over layouts. Pure Python.

A plan communicates only over axes that *move*: an axis whose placement changes, or that shards a dim minor to an axis
that moves. Ranks along other axes never wait for each other. Among these plans the search returns the one with the
least cost of forward and backward together, since training pays for both.
"""

import heapq
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count, takewhile

from mindformers_core.dtypes import ITEM_BYTES, wire_dtype
from mindformers_core.hints import nearest
from mindformers_core.layout import Layout
from mindformers_core.redistribution.bounds import lower_bound
from mindformers_core.redistribution.device_model import CPU, DeviceModel
from mindformers_core.redistribution.steps import EXTREMES, Step
from mindformers_core.redistribution.striding import split_dims
from mindformers_core.redistribution.transitions import REPLICATE, SearchSpace, compatible, transitions

# Cost of every step in the search besides its collectives, in seconds: of equal plans the shorter is chosen.
PER_STEP = 1e-12


@dataclass(frozen=True)
class Plan:
    """A sequence of steps; `str()` shows one a line.

    Attributes:
        source: layout before.
        target: layout after.
        steps: tuple of `Step`; empty where the layouts are equal.
    """

    source: Layout
    target: Layout
    steps: tuple

    def __str__(self):
        return "\n".join(str(step) for step in self.steps) or f"nothing to do: {self.source}"


def plan_redistribution(source, target, shape, dtype, device_model=CPU):
    """The cheapest plan that takes a tensor from layout `source` to layout `target`. Plans are remembered.

    All ranks of the mesh get the same plan. Partial placements on several axes are reduced in any order, so those that
    don't commute (`max` beside `sum`) may not stand in one layout.

    Args:
        source: the `Layout` before.
        target: the `Layout` after, on the same mesh and of as many dims.
        shape: shape of the global tensor.
        dtype: name of the element type ("float32", "bfloat16", …), whose `wire_dtype` is sent, or the size in bytes of
            an element that is sent.
        device_model: a `DeviceModel`; default `CPU`.

    Returns:
        A `Plan`, without steps where the layouts are equal.

    Raises:
        TypeError: a layout or device model of another type.
        ValueError: layouts on two meshes or of different numbers of dims; a dim that its axes don't divide; an
            unknown dtype; partial placements that don't commute.
    """
    name = str(dtype).lower()
    item_size = dtype if type(dtype) is int and dtype > 0 else ITEM_BYTES.get(wire_dtype(name))
    if item_size is None:
        known = ", ".join(ITEM_BYTES)
        raise ValueError(f"unknown dtype {dtype!r}{nearest(name, ITEM_BYTES)}: use a size in bytes, or one of {known}")
    return _plan(source, target, tuple(shape), item_size, device_model)


@lru_cache(maxsize=65536)
def _plan(source, target, shape, itemsize, model):
    _check(source, target, shape, model)
    if source == target:
        return Plan(source, target, ())
    pairs = zip(zip(source.dims, target.dims), zip(source.axes, target.axes))
    if any(entries != axes and entries[0] != entries[1] for entries, axes in pairs):
        return _strided_plan(source, target, shape, itemsize, model)
    space = SearchSpace(source, target, shape, itemsize)
    steps, layout = [], source
    for *what, state in _search(space.state(source), space.state(target), space, model):
        after = space.layout(*state)
        steps.append(Step(*what, layout, after, shape, itemsize))
        layout = after
    return Plan(source, target, tuple(steps))


def _strided_plan(source, target, shape, itemsize, model):
    """The plan for a dim that is strided before or after, and not alike: the dim is split where both layouts have an
    ordinary cut.

    Where there is no such split, the dim is gathered in between, as far as the layouts differ.
    """
    split = split_dims(source, target, shape)
    if split is None:
        pairs = (takewhile(lambda pair: pair[0] == pair[1], zip(*entries)) for entries in zip(source.dims, target.dims))
        between = source.replace(dims=[[each for each, _ in pair] for pair in pairs])
        legs = [_plan(source, between, shape, itemsize, model), _plan(between, target, shape, itemsize, model)]
        return Plan(source, target, legs[0].steps + legs[1].steps)
    inner = _plan(*split, itemsize, model)

    def view(at, after, one, other):
        return Step("view", (), None, None, None, at, after, one, itemsize, other)

    first, last = view(source, inner.source, shape, split[2]), view(inner.target, target, split[2], shape)
    return Plan(source, target, (first, *inner.steps, last))


def _check(source, target, shape, model):
    for name, layout in (("source", source), ("target", target)):
        if not isinstance(layout, Layout):
            raise TypeError(f"{name} layout {layout!r} is no Layout: bind it to a mesh first, with bind_layout")
    if not isinstance(model, DeviceModel):
        raise TypeError(f"device_model {model!r} is no DeviceModel: use CPU, GPU, ASCEND, or one made from these")
    if source.mesh != target.mesh:
        raise ValueError(f"can't redistribute from {source!r} to {target!r}: both should be on one mesh")
    if source.ndim != target.ndim:
        raise ValueError(
            f"can't redistribute from {source!r}, of {source.ndim} dims, to {target!r}, of {target.ndim}: both should "
            f"place the dims of shape {shape}"
        )
    for name, layout in (("source", source), ("target", target)):
        layout.local_shape(shape, f"redistribution {name}")
        if not compatible(op for _, op in layout.partial):
            raise ValueError(
                f"{name} layout {layout!r} mixes partial placements that don't commute: reduce all but one kind first "
                "(sum and avg may stand together; max and min only alone)"
            )


def _search(start, goal, space, model):
    """The cheapest path of steps from `start` to `goal`, by Dijkstra's algorithm with bounds (A*).

    Ties go to fewer steps, and then to the step that `transitions` yields first, which is the same on all ranks. Where
    one axis moves, a single step to `goal` costs least, save for an extreme that all ranks get.
    """
    if len(space.axes) == 1 and not (start[1][0] in EXTREMES and goal[1][0] == REPLICATE):
        for step in transitions(space, *start):
            if step[-1] == goal:
                return (step,)
    local_bytes, left, order = cache(space.local_bytes), lower_bound(space, goal, model), count()
    rates = cache(lambda kind, op, axes: model.step_rates(kind, op, axes, space.size(axes)))
    best, queue = {start: 0.0}, [(0.0, next(order), 0.0, start, ())]
    while True:
        _, _, paid, state, path = heapq.heappop(queue)
        if state == goal:
            return path
        if paid > best[state]:
            continue
        volume = local_bytes(state[1])
        for step in transitions(space, *state):
            kind, axes, _, _, op, after = step
            fixed, per_byte = rates(kind, op, axes)
            total = paid + PER_STEP + fixed + per_byte * max(volume, local_bytes(after[1]))
            if total < best.get(after, float("inf")):
                best[after] = total
                heapq.heappush(queue, (total + left(after), next(order), total, after, (*path, step)))
