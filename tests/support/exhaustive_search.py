"""The cheapest redistribution by exhaustive search over all layouts of a small mesh, written from the placements alone.

Two layouts are neighbours if one step joins them.
"""

import itertools
from functools import lru_cache

import numpy as np

from mindformers_core.layout import Layout, Partial, Replicate, Shard, Varying

# Partial ops that may stand together in one layout.
FAMILIES = (("sum", "avg"), ("max",), ("min",))

# What a step runs forward and backward (all-gather, reduce-scatter, all-reduce, all-to-all), by its axes' placements.
NEIGHBOURS = {
    ("R", "S"): ("", "ag"), ("V", "S"): ("", ""), ("S", "R"): ("ag", ""), ("S", "V"): ("ag", "rs"),
    ("R", "V"): ("", "ar"), ("V", "R"): ("", ""), ("V", "sum"): ("", ""), ("S", "sum"): ("", ""),
    ("R", "sum"): ("", ""), ("R", "avg"): ("", ""),
    ("R", "max"): ("", "ar"), ("R", "min"): ("", "ar"), ("sum", "R"): ("ar", ""), ("avg", "R"): ("ar", ""),
    ("max", "R"): ("ar", "ar"), ("min", "R"): ("ar", "ar"), ("sum", "V"): ("ar", "ar"), ("avg", "V"): ("ar", "ar"),
    ("sum", "S"): ("rs", "ag"), ("avg", "S"): ("rs", "ag"), ("max", "S"): ("rs", "ag"), ("min", "S"): ("rs", "ag"),
}  # fmt: skip


def mark(layout, axis):
    placement = layout.placement(axis)
    return {Shard: "S", Replicate: "R", Varying: "V"}.get(type(placement)) or placement.op


@lru_cache(maxsize=8)
def all_layouts(mesh, shape):
    """Every layout of a tensor of `shape` that divides it and whose partials commute."""
    found = []
    choices = [Replicate(), Varying(), *map(Partial, ("sum", "avg", "max", "min")), *map(Shard, range(len(shape)))]
    for placements in itertools.product(choices, repeat=len(mesh.axis_names)):
        placed = dict(zip(mesh.axis_names, placements, strict=True))
        partial = {axis: entry.op for axis, entry in placed.items() if isinstance(entry, Partial)}
        if not any(set(partial.values()) <= set(family) for family in FAMILIES):
            continue
        varying = [axis for axis, entry in placed.items() if isinstance(entry, Varying)]
        on_dims = [[axis for axis, entry in placed.items() if entry == Shard(dim)] for dim in range(len(shape))]
        for dims in itertools.product(*map(itertools.permutations, on_dims)):
            layout = Layout.on(mesh, dims, partial, varying)
            if all(size % layout.divisor(dim) == 0 for dim, size in enumerate(shape)):
                found.append(layout)
    return list(dict.fromkeys(found))


def joining_step(u, v):
    """`(axes, forward collective, backward collective)` of the single step from `u` to `v`, or None."""
    axes = [axis for axis in u.mesh.axis_names if u.placement(axis) != v.placement(axis)]
    pairs = {(mark(u, axis), mark(v, axis)) for axis in axes}
    if pairs <= {("S", "S")}:
        if [u.divisor(dim) for dim in range(u.ndim)] == [v.divisor(dim) for dim in range(u.ndim)]:
            return moved_axes(u, v), "permute", "permute"
        joined = [dim for dim in range(u.ndim) if len(v.dims[dim]) > len(u.dims[dim])]
        left = [dim for dim in range(u.ndim) if len(v.dims[dim]) < len(u.dims[dim])]
        if len(joined) != 1 or len(left) != 1:
            return None
        rest = v.dims[left[0]]
        moved = u.dims[left[0]][len(rest) :]
        expected = list(u.dims)
        expected[left[0]], expected[joined[0]] = rest, u.dims[joined[0]] + moved
        return (axes, "a2a", "a2a") if tuple(expected) == v.dims and u.dims[left[0]][: len(rest)] == rest else None
    if len(pairs) != 1 or next(iter(pairs)) not in NEIGHBOURS:
        return None
    changed = [dim for dim in range(u.ndim) if u.dims[dim] != v.dims[dim]]
    if len(changed) > 1:
        return None
    for dim in changed:
        short, long = sorted((u.dims[dim], v.dims[dim]), key=len)
        if long[: len(short)] != short or len(long) - len(short) != len(axes):
            return None
    return axes, *NEIGHBOURS[next(iter(pairs))]


def moved_axes(u, v):
    """The axes along which a rank and the one it sends to differ, when `u` becomes `v` by a permutation."""
    shape = [u.divisor(dim) for dim in range(u.ndim)]
    holder = {}
    still = [axis for axis in u.mesh.axis_names if mark(u, axis) != "S"]
    for rank in u.mesh.rank_list:
        holder[str(v.local_slices(shape, rank)), u.mesh.coordinate(rank, still)] = rank
    differing = set()
    for rank in u.mesh.rank_list:
        other = holder[str(u.local_slices(shape, rank)), u.mesh.coordinate(rank, still)]
        here, there = u.mesh.coordinate(rank), u.mesh.coordinate(other)
        differing |= {axis for axis, x, y in zip(u.mesh.axis_names, here, there, strict=True) if x != y}
    return [axis for axis in u.mesh.axis_names if axis in differing]


@lru_cache(maxsize=8)
def all_steps(mesh, shape):
    layouts = all_layouts(mesh, shape)
    pairs = ((u, v) for u in layouts for v in layouts if u != v)
    found = [(u, v, joining_step(u, v)) for u, v in pairs]
    return [entry for entry in found if entry[2] is not None]


def seconds(name, axes, whole, model, mesh):
    if not name:
        return 0.0
    n, links = mesh.axis_size(*axes), [dict(model.axis_links).get(axis, model.link) for axis in axes]
    latency, bandwidth = max(link.latency for link in links), min(link.bandwidth for link in links)
    rounds, share = {"permute": (1, 1), "ar": (2 * n - 2, (2 * n - 2) / n)}.get(name, (n - 1, (n - 1) / n))
    return model.launch + rounds * latency + share * whole / bandwidth


def moving(source, target):
    """Axes whose placement, or what stands before them on their dim, differs."""

    def where(layout, axis):
        major = [axes[: axes.index(axis)] for axes in layout.dims if axis in axes]
        return layout.placement(axis), major

    return {axis for axis in source.mesh.axis_names if where(source, axis) != where(target, axis)}


def exhaustive_costs(source, mesh, shape, itemsize, model, axes):
    """Cheapest cost from `source` to every layout by steps over `axes` only, by Bellman and Ford's relaxation."""
    edges = []
    for u, v, (group, forward, backward) in all_steps(mesh, shape):
        if axes.issuperset(group):
            whole = max(np.prod(u.local_shape(shape)), np.prod(v.local_shape(shape))) * itemsize
            edges.append((u, v, sum(seconds(name, group, whole, model, mesh) for name in (forward, backward))))
    cost, changed = {source: 0.0}, True
    while changed:
        changed = False
        for u, v, price in edges:
            if u in cost and cost[u] + price < cost.get(v, float("inf")) * (1 - 1e-12):
                cost[v], changed = cost[u] + price, True
    return cost
