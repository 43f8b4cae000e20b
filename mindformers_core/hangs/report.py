"""The report of a hang, from what is known about every rank: which rank is behind, and where all are. Pure Python."""

from collections import Counter
from operator import attrgetter

from mindformers_core.program.name_ranges import ranges_shown

_MOST_PLACES, _MOST_STACKS, _MOST_FRAMES = 9, 2, 4
_PLURALS = {"has": "have", "is": "are", "was": "were", "waits": "wait"}


def explain_hang(states, size=None):
    """The report, of at most 25 lines.

    Args:
        states: a `RankState` of every rank that is known, in any order.
        size: the number of all ranks of the job; None if all are known.

    Returns:
        The text. Its first line names the ranks that wait and the ranks that are behind; then come the places of all
        ranks, equal ones together, and the Python stacks of those that are behind.
    """
    states = sorted(states, key=attrgetter("rank"))
    behind, why = blamed(states)
    lines = [_first_wait(states, behind) + why, "Where the ranks are:", *_places(states)]
    for state in [state for state in states if state.rank in behind and state.stack][:_MOST_STACKS]:
        lines.append(f"Python stack of rank {state.rank}, innermost first:")
        lines += [f"    {frame}" for frame in state.stack[:_MOST_FRAMES]]
    if size is not None and size > len(states):
        lines.append(f"{size - len(states)} more of {size} ranks are on other hosts, whose logs have their own places.")
    return "\n".join(lines)


def blamed(states):
    """The ranks that are behind, or called something else than the others: `(set of ranks, the reason as text)`."""
    known = {state.rank: state for state in states}
    awaited = {rank for state in states for rank in _missing(state, known)}
    for kind in ("dead", "stopped", "ended"):
        lost = {rank for rank in known if known[rank].state == kind and (kind != "ended" or rank in awaited)}
        if lost:
            conditions = ", ".join(dict.fromkeys(known[rank].condition for rank in sorted(lost)))
            return lost, f"{_said(lost, conditions)}{_before(lost, states)}"
    if conflict := _conflict(states):
        return conflict
    if late := {rank for rank in awaited if not known[rank].current}:
        stacks = {frame for rank in late for frame in known[rank].stack[:1]}
        where = f"at {stacks.pop()}" if len(stacks) == 1 else "code"
        return late, f"{_said(late, f'is in Python {where}')}{_before(late, states)}"
    if awaited:
        return _cycle(states, known)
    return set(), "no rank is behind as far as the records tell"


def shown_ranks(ranks):
    """Ranks as ranges: `0-5, 7`."""
    return ", ".join(ranges_shown(ranks))


def _missing(state, known):
    """The known ranks that have not issued the call that a rank is in."""
    if not state.current:
        return []
    others = [rank for rank in state.current.ranks or known if rank in known and rank != state.rank]
    return [rank for rank in others if not known[rank].has_issued(state.current)]


def _said(ranks, predicate):
    """A sentence about ranks, of a predicate in the singular."""
    verb, _, rest = predicate.partition(" ")
    plural = len(ranks) > 1
    return f"rank{'s' * plural} {shown_ranks(ranks)} {_PLURALS.get(verb, verb) if plural else verb} {rest}"


def _before(ranks, states):
    """The first call that others wait in and these ranks have not issued."""
    for state in states:
        current = state.current
        if current and state.rank not in ranks and (ranks & {*current.ranks} or not current.ranks):
            seen = [other for other in states if other.rank in ranks and other.current]
            return "" if seen else f", before {current.plan or current.label}"
    return ""


def _first_wait(states, behind):
    """The wait for a rank that is behind, or the first one, as a sentence with all ranks that are in it."""
    calls = [state.current for state in states if state.current]
    calls = [call for call in calls if call.rank not in behind] or calls
    calls.sort(key=lambda call: not behind & {*call.ranks})
    alike = {call.rank for call in calls if (call.call, call.described) == (calls[0].call, calls[0].described)}
    return f"{_said(alike, f'waits in {calls[0].label}{calls[0].purpose}')}; " if calls else ""


def _conflict(states):
    """The ranks that have issued another call than the others, and the reason; None where no calls differ."""
    sites, calls = {}, {}  # equal calls have equal ranks and numbers, or the same place in the plan
    for one in [one for state in states for one in state.history if one.number is not None]:
        calls.setdefault(one.call, {})[one.rank] = one
        if one.plan:
            sites.setdefault((one.place, one.plan), {})[one.rank] = one  # the last one of the rank
    for alike in [*sites.values(), *calls.values()]:
        waiting = [one for one in alike.values() if not one.done]
        if len({one.signature for one in waiting}) > 1:
            return _explain_conflict(waiting, alike.values(), states)
    return None


def _explain_conflict(issued, alike, states):
    """`blamed` for calls that differ and have not ended, of those that should be alike."""
    odd = _odd_ones(issued, attrgetter("signature"), alike, states)
    usual = [one for one in issued if one not in odd]
    if not usual:
        one, other = issued[0], next(other for other in issued if other.described != issued[0].described)
        texts = f"rank {one.rank} issued {one.described}, rank {other.rank} {other.described}"
        return {one.rank for one in issued}, f"the ranks disagree: {texts}"
    skipped = _gap(usual[0], odd[0], states) > 0
    ranks, where = {one.rank for one in odd}, f", so {usual[0].plan} was skipped or comes later there" * skipped
    return ranks, f"{_said(ranks, f'issued {odd[0].described}')} in its place{where}"


def _cycle(states, known):
    """`blamed` for ranks that wait for each other in calls of different groups."""
    waiting = [state.current for state in states if _missing(state, known)]
    odd = _odd_ones(waiting, attrgetter("ranks", "label"), waiting, states)
    ways = "; ".join(f"rank {one.rank} waits in {one.described}" for one in odd[:2])
    return {one.rank for one in odd}, f"{ways}: these ranks wait for each other in different calls"


def _odd_ones(issued, form, alike, states):
    """The calls of the rarest form among those alike; if there is none, those further on in the plan, or all."""
    counts = Counter(map(form, alike))
    least = min(counts[form(one)] for one in issued)
    rare = [one for one in issued if counts[form(one)] == least]
    gaps = [_gap(rare[0], one, states) for one in rare]
    return rare if len(rare) < len(issued) else [one for one, gap in zip(rare, gaps) if gap == max(gaps)]


def _gap(one, other, states):
    """How much further on `other` is in the plan, by the shorter way around a step; 0 if that isn't known."""
    if not one.plan or not other.plan:
        return 0
    highest = max(issued.plan_number for state in states for issued in state.history)
    at, to = (call.plan_number if call.plan[0] == "#" else 2 * highest + 1 - call.plan_number for call in (one, other))
    return (to - at + highest) % (2 * highest) - highest


def _places(states):
    """A line for every place, with the ranks that are there."""
    ranks = {}
    for state in states:
        ranks.setdefault(_place(state), []).append(state.rank)
    shown = [f"- rank{'s' * (len(here) > 1)} {shown_ranks(here)}: {place}" for place, here in ranks.items()]
    return shown[:_MOST_PLACES] + [f"- and {len(shown) - _MOST_PLACES} more places"] * (len(shown) > _MOST_PLACES)


def _place(state):
    parts = [state.condition.partition(" ")[2]] if state.condition else []  # without the verb
    if state.current:
        return "; ".join([*parts, f"in {state.current.described}"])
    done = f"after {state.history[-1].described}" if state.history else "before the first collective"
    where = f"in Python at {state.stack[0]}, " if state.stack else "" if parts else "in Python, "
    return "; ".join([*parts, f"{where}{done}"])
