"""The report of a hang, from what is known about every rank: which rank is behind, and where all are. Pure Python."""

from collections import Counter
from itertools import permutations
from operator import attrgetter
from pathlib import Path
from sysconfig import get_path

from mindformers_core.grouping import grouped
from mindformers_core.program.name_ranges import ranges_shown

LEFT_BEHIND = "variables of another launch may be left: unset MS_ROLE MS_WORKER_NUM MS_SCHED_HOST MS_SCHED_PORT RANK_ID"
_MOST_PLACES, _MOST_STACKS, _MOST_FRAMES = 9, 2, 4
_LEAST_BUSY, _BUSIER = 0.05, 4  # CPU seconds for a second of a rank that computes; times those of one that waits
_PLURALS = {"has": "have", "is": "are", "was": "were", "waits": "wait", "computes": "compute"}
_LIBRARIES = (f"{get_path('stdlib')}/", "/site-packages/", "/dist-packages/", "<frozen ")  # parts of files' names
_PACKAGE = f"{Path(__file__).parent.parent}/"


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
        first = max(state.stack.index(own_frame(state.stack)) - 1, 0)  # the frame that the user's code calls
        lines += [f"    {frame}" for frame in dict.fromkeys((state.stack[0], *state.stack[first:]))][:_MOST_FRAMES]
    if any(state.state == "absent" for state in states):
        lines.append(f"Where nobody started these ranks, {LEFT_BEHIND}")
    if size is not None and size > len(states):
        lines.append(f"{size - len(states)} more of {size} ranks are on other hosts, whose logs have their own places.")
    return "\n".join(lines)


def blamed(states):
    """The ranks that are behind, or called something else than the others: `(set of ranks, the reason as text)`."""
    known = {state.rank: state for state in states}
    awaited = {rank for state in states for rank in _missing(state, known)}
    for kind in ("failed", "dead", "stopped", "absent", "ended"):
        alike = {rank for rank in known if kind == ("failed" if known[rank].error else known[rank].state)}
        lost = alike if kind != "ended" else alike & awaited
        if lost:
            conditions = ", ".join(dict.fromkeys(known[rank].condition for rank in sorted(lost)))
            return lost, f"{_said(lost, conditions)}{_before(lost, states) if kind != 'absent' else ''}"
    if conflict := _conflict(states):
        return conflict
    if late := {rank for rank in awaited if not known[rank].current}:
        stacks = {_at(known[rank].stack) for rank in late if known[rank].stack}
        where = f"at {stacks.pop()}" if len(stacks) == 1 else "code"
        return late, f"{_said(late, f'is in Python {where}')}{_before(late, states)}"
    if awaited:
        return _cycle(states, known)
    return _apart_in_graphs(states)


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
            issued = [one for other in states if other.rank in ranks for one in other.history if not one.ranks]
            last = max((one.number for one in issued if one.label == current.label), default=-1)
            if not current.ranks and last >= current.number:
                return f", after call {last} of it, and not in call {current.number}: their graphs differ"
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
    for one in [one for state in states for one in state.history if one.number is not None and one.ranks]:
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
    calls = [state for state in states if state.current]
    waiting = [state.current for state in calls if _missing(state, known) or not state.current.ranks]
    odd = _odd_ones(waiting, attrgetter("ranks", "label"), waiting, states)
    ways = "; ".join(f"rank {one.rank} waits in {one.described}" for one in odd[:2])
    return {one.rank for one in odd}, f"{ways}: these ranks wait for each other in different calls"


def _apart_in_graphs(states):
    """`blamed` for ranks that wait in compiled functions, each in a call that the others have begun."""
    inside = [state.current for state in states if state.current and state.current.number is not None]
    least = min((state.computed for state in states if state.current), default=0.0)
    if busy := {state.rank for state in states if state.computed > max(_LEAST_BUSY, _BUSIER * least)}:
        return busy, _said(busy, f"computes in {next(one for one in inside if one.rank in busy).described}")
    for one, other in permutations(inside, 2):
        if one.label == other.label and one.number < other.number:
            return {one.rank, other.rank}, (
                f"rank {one.rank} is in {one.described}, rank {other.rank} in call {other.number} of it: graphs of "
                "these ranks make different collectives"
            )
    return set(), "no rank is behind as far as the records tell"


def own_frame(stack):
    """The innermost frame of a stack that is of the user's code; else of this package's; else the innermost one."""
    outside = [frame for frame in stack if not any(part in frame for part in _LIBRARIES)]
    return next((frame for frame in outside if not frame.startswith(_PACKAGE)), (*outside, stack[0])[0])


def _at(stack):
    """Where a stack is: the user's line, and the innermost frame where that is another one."""
    own = own_frame(stack)
    return own if own == stack[0] else f"{own}, which is in {stack[0]}"


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
    ranks = grouped((_place(state), state.rank) for state in states)
    shown = [f"- rank{'s' * (len(here) > 1)} {shown_ranks(here)}: {place}" for place, here in ranks.items()]
    return shown[:_MOST_PLACES] + [f"- and {len(shown) - _MOST_PLACES} more places"] * (len(shown) > _MOST_PLACES)


def _place(state):
    parts = [state.condition.partition(" ")[2]] if state.condition else []  # without the verb
    if state.current:
        return "; ".join([*parts, f"in {state.current.described}"])
    done = "before the first collective"
    if state.history and state.history[-1].kind != "start":
        done = f"after {state.history[-1].described}"
    where = f"in Python at {_at(state.stack)}, " if state.stack else "" if parts else "in Python, "
    return "; ".join([*parts, f"{where}{done}"])
