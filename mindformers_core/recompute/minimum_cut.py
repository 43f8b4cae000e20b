"""The closed set of least cost under implications, by a minimum cut. Pure Python.

Picard, "Maximal closure of a graph and applications to combinatorial problems", 1976; the cut is found by Dinic's
algorithm (1970).
"""

from collections import deque

_SOURCE, _SINK = object(), object()


def minimum_cost_closure(costs, implications):
    """The set of nodes with the least sum of costs among all sets closed under `implications`; the smallest of equals.

    Args:
        costs: node -> an integer, negative for a gain.
        implications: pairs `(u, v)` of nodes: a set with `u` has `v`.

    Returns:
        A set.
    """
    unlimited = 1 + sum(map(abs, costs.values()))
    capacity = {node: {} for node in (*costs, _SOURCE, _SINK)}
    arcs = [(_SOURCE, node, -cost) if cost < 0 else (node, _SINK, cost) for node, cost in costs.items() if cost]
    for start, end, limit in [*arcs, *((u, v, unlimited) for u, v in implications)]:
        capacity[start][end] = capacity[start].get(end, 0) + limit
        capacity[end].setdefault(start, 0)
    while _SINK in (levels := _levels(capacity)):
        _block(capacity, levels)
    return set(levels) - {_SOURCE}


def _levels(capacity):
    """Distances of all reachable nodes from the source."""
    levels, waiting = {_SOURCE: 0}, deque([_SOURCE])
    while waiting:
        node = waiting.popleft()
        for other, left in capacity[node].items():
            if left and other not in levels:
                levels[other] = levels[node] + 1
                waiting.append(other)
    return levels


def _block(capacity, levels):
    """Send a blocking flow along shortest paths."""
    untried = {node: iter(list(capacity[node])) for node in levels}
    way = [_SOURCE]
    while way:
        if way[-1] is _SINK:
            arcs = list(zip(way, way[1:]))
            flow = min(capacity[u][v] for u, v in arcs)
            for u, v in arcs:
                capacity[u][v] -= flow
                capacity[v][u] += flow
            full = next(place for place, (u, v) in enumerate(arcs) if not capacity[u][v])
            way = way[: full + 1]
            continue
        node = way[-1]
        for other in untried[node]:
            if capacity[node][other] and levels.get(other) == levels[node] + 1:
                way.append(other)
                break
        else:
            way.pop()
