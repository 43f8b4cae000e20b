"""The report of a hang: over random programs in which one rank goes wrong, the report names it, and where all are."""

import random
import re

import pytest

from mindformers_core.hangs.records import Issued, RankState
from mindformers_core.hangs.report import blamed, explain_hang

FAULTS = ("in Python", "dead", "stopped", "skips", "reorders", "other shape", "other group")


def random_program(rng):
    """`(groups of all axes, a list of (axis, kind, shape))` for a mesh of two axes."""
    rows, columns = rng.choice([(1, 2), (1, 4), (2, 2), (2, 4), (3, 3)])
    ranks = [[row * columns + column for column in range(columns)] for row in range(rows)]
    groups = {"tp": [tuple(row) for row in ranks], "dp": [tuple(column) for column in zip(*ranks)]}
    axes = ["tp"] if rows == 1 else ["tp", "dp"]
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return groups, [(rng.choice(axes), rng.choice(kinds), (rng.randint(1, 9), 4)) for _ in range(rng.randint(4, 12))]


def run(groups, program, bad, fault, at):
    """`RankState`s when nobody can go on: every rank issues its calls in order, each waits for its whole group."""
    size = sum(map(len, groups["tp"]))
    calls = {rank: [(axis, kind, shape, number) for number, (axis, kind, shape) in enumerate(program, 1)]
             for rank in range(size)}  # fmt: skip
    mine = calls[bad]
    axis, kind, shape, number = mine[at]
    if fault == "skips":
        del mine[at]
    elif fault == "reorders":
        mine[at : at + 2] = reversed(mine[at : at + 2])
    elif fault == "other shape":
        mine[at] = axis, kind, (*shape, 2), number
    elif fault == "other group":
        mine[at] = "dp" if axis == "tp" else "tp", kind, shape, number
    else:
        del mine[at:]
    issued, counts = {rank: [] for rank in range(size)}, {}
    moving = True
    while moving:
        moving = False
        for rank, rest in calls.items():
            if rest and (not issued[rank] or _done(issued[rank][-1], issued)):
                axis, kind, shape, number = rest.pop(0)
                group = next(group for group in groups[axis] if rank in group)
                count = counts[rank, group] = counts.get((rank, group), -1) + 1
                issued[rank].append(
                    Issued(rank, count, kind, (axis,), group, shape, "float32", "net.layer", f"#{number}")
                )
                moving = True
    states = []
    for rank, history in issued.items():
        history = [Issued(**{**vars(one), "done": _done(one, issued)}) for one in history][-32:]
        condition = fault if rank == bad and fault in ("dead", "stopped") else "running"
        stack = () if history and not history[-1].done or condition != "running" else ("net.py:7 in construct",)
        states.append(RankState(rank, condition, tuple(history), stack))
    return states


def _done(one, issued):
    alike = [[each for each in issued[rank] if each.call == one.call] for rank in one.ranks]
    return all(alike) and len({each[0].signature for each in alike}) == 1


@pytest.mark.parametrize("seed", range(42))
@pytest.mark.parametrize("fault", FAULTS)
def test_the_rank_that_goes_wrong_is_named(fault, seed):
    rng = random.Random(f"{fault} {seed}")
    groups, program = random_program(rng)
    while fault == "other group" and len(groups["tp"]) == 1:
        groups, program = random_program(rng)
    if fault == "reorders":  # of equal calls, nothing is out of order
        program = [(axis, kind, (place, 4)) for place, (axis, kind, _) in enumerate(program)]
    at = rng.randrange(len(program) - 1)
    bad = rng.randrange(sum(map(len, groups["tp"])))
    states = run(groups, program, bad, fault, at)
    if fault == "reorders" and all(state.current is None for state in states):
        return  # two groups of which the other ranks come first: nobody waits
    text, (ranks, _) = explain_hang(states), blamed(states)
    assert bad in ranks, text
    assert len(ranks) <= 2 or len(program) == 1, text
    assert len(text.splitlines()) <= 25
    assert re.search(rf"rank {bad}\b|ranks .*\b{bad}\b", text.splitlines()[0]), text
    for state in states:
        if state.current:
            assert state.current.described in text or "more places" in text
