"""The report of a hang, from what is known about every rank: which rank is behind, and where all are. Pure Python."""

from collections import Counter

__all__ = ["blamed", "explain_hang", "shown_ranks"]

_MOST_PLACES, _MOST_STACKS, _MOST_FRAMES = 9, 2, 4


def explain_hang(states, size=None):
    """The report, of at most 25 lines.

    Args:
        states: a `RankState` of every rank that is known, in any order.
        size: the number of all ranks of the job; None if all are known.

    Returns:
        The text. Its first line names the ranks that wait and the ranks that are behind; then come the places of all
        ranks, equal ones together, and the Python stacks of those that are behind.
    """
    states = sorted(states, key=lambda state: state.rank)
    behind, why = blamed(states)
    waiting = [state for state in states if state.current and state.rank not in behind] or states
    first = _first_wait(waiting, behind)
    lines = [f"{first}; {why}" if first else why]
    lines += ["Where the ranks are:", *_places(states)]
    for state in [state for state in states if state.rank in behind and state.stack][:_MOST_STACKS]:
        lines.append(f"Python stack of rank {state.rank}, innermost first:")
        lines += [f"    {frame}" for frame in state.stack[:_MOST_FRAMES]]
    if size is not None and size > len(states):
        lines.append(f"The other {size - len(states)} ranks are on other hosts, whose logs have their own places.")
    return "\n".join(lines)


def blamed(states):
    """The ranks that are behind, or called something else than the others: `(set of ranks, the reason as text)`."""
    known = {state.rank: state for state in states}
    waits = {state.rank: _missing(state, known) for state in states if state.current}
    for kind in ("dead", "stopped", "ended"):
        waited_for = {rank for ranks in waits.values() for rank in ranks}
        lost = {rank for rank in known if known[rank].state == kind and (kind != "ended" or rank in waited_for)}
        if lost:
            conditions = ", ".join(dict.fromkeys(known[rank].condition for rank in sorted(lost)))
            return lost, f"{_ranks(lost)} {conditions}{_before(lost, states)}"
    late = {rank for ranks in waits.values() for rank in ranks if not known[rank].current}
    conflict = _conflict(states)
    if conflict:
        return conflict
    if late:
        stacks = {known[rank].stack[:1] for rank in late}
        where = f"at {stacks.pop()[0]}" if len(stacks) == 1 and () not in stacks else "code"
        return late, f"{_ranks(late)} {'is' if len(late) == 1 else 'are'} in Python {where}{_before(late, states)}"
    if any(waits.values()):
        return _cycle({rank for rank, missing in waits.items() if missing}, known)
    return set(), "no rank is behind as far as the records tell"


def shown_ranks(ranks):
    """Ranks as ranges: `0-5, 7`."""
    ranges = []
    for rank in sorted(ranks):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


def _ranks(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)}"


def _missing(state, known):
    """The known ranks that a waiting rank waits for."""
    current = state.current
    if current.kind == "receive":
        return [rank for rank in current.ranks[:1] if rank in known]
    others = [rank for rank in current.ranks if rank in known and rank != state.rank]
    return [rank for rank in others if not known[rank].has_issued(current)]


def _before(ranks, states):
    """The first call that others wait in and these ranks have not issued."""
    for state in states:
        current = state.current
        if current and state.rank not in ranks and ranks & {*current.ranks}:
            seen = [other for other in states if other.rank in ranks and other.current]
            return "" if seen else f", before {current.plan or current.label_with_call}"
    return ""


def _first_wait(waiting, behind):
    """The wait for a rank that is behind, or the first one, as a sentence with all ranks that are in it."""
    calls = [state.current for state in waiting if state.current]
    calls.sort(key=lambda call: not behind & {*call.ranks})
    if not calls:
        return ""
    alike = {call.rank for call in calls if (call.call, call.described) == (calls[0].call, calls[0].described)}
    place = f" for {calls[0].place}" if calls[0].place and "compil" not in calls[0].kind else ""
    return f"{_ranks(alike)} wait{'s' * (len(alike) == 1)} in {calls[0].label}{place}"


def _conflict(states):
    """Ranks whose signature of one call differs from that of most others, and the reason; None without such a call."""
    calls, sites = {}, {}
    for state in states:
        for one in state.history:
            if one.number is not None:
                calls.setdefault(one.call, []).append(one)
        if state.current and state.current.plan:
            sites.setdefault(state.current.plan, []).append(state.current)
    for alike in sites.values():  # one place of the plan, with different groups
        counts = Counter((one.kind, one.axes) for one in alike)
        if len(counts) > 1:
            usual = next(one for one in alike if (one.kind, one.axes) == counts.most_common(1)[0][0])
            odd = [one for one in alike if (one.kind, one.axes) != (usual.kind, usual.axes)]
            ranks = {one.rank for one in (odd if len(odd) < len(alike) - len(odd) else alike)}
            return ranks, f"{_ranks({one.rank for one in odd})} issued {odd[0].described} in its place"
    for alike in calls.values():
        counts = Counter(one.signature for one in alike)
        if len(counts) > 1:
            return _odd_ones(alike, counts)
    return None


def _odd_ones(issued, counts):
    most, times = counts.most_common(1)[0]
    usual = next(one for one in issued if one.signature == most)
    odd = [one for one in issued if one.signature != most]
    tie = len(odd) == times
    early, late = sorted((usual, odd[0]), key=_plan_number)
    if tie and _plan_number(early) != _plan_number(late):  # the rank at the later number has left the earlier one out
        usual, odd = early, [one for one in issued if one.signature == late.signature]
        tie = False
    ranks = {one.rank for one in (issued if tie else odd)}
    text = f"{_ranks({one.rank for one in odd})} issued {odd[0].described}"
    return ranks, f"{text} in its place{_skipped(usual, odd[0])}"


def _skipped(expected, found):
    if _plan_number(expected) < _plan_number(found):
        return f", so {expected.plan} was skipped or comes later there"
    return ""


def _plan_number(one):
    """The number in the plan; backward passes, whose order is the opposite, come after all forward ones."""
    digits = one.plan.rpartition("#")[2]
    if not digits.isdigit():
        return 0
    return int(digits) if one.plan.startswith("#") else 10**9 - int(digits)


def _cycle(ranks, known):
    """Ranks that wait for each other in calls of different groups: those of the least common call are blamed."""
    calls = Counter((known[rank].current.ranks, known[rank].current.label) for rank in ranks)
    least = min(calls.values())
    rare = {rank for rank in ranks if calls[known[rank].current.ranks, known[rank].current.label] == least}
    if len({known[rank].current.call for rank in rare}) > 1 and len(rare) == len(ranks):
        first = min(rare, key=lambda rank: (_plan_number(known[rank].current), rank))
        later = {rank for rank in rare if known[rank].current.call != known[first].current.call}
        rare = later if _plan_number(known[first].current) else rare
    ways = "; ".join(f"rank {rank} waits in {known[rank].current.described}" for rank in sorted(rare)[:2])
    return rare, f"{ways}: these ranks wait for each other in different calls"


def _places(states):
    """A line for every place, with the ranks that are there."""
    lines = {}
    for state in states:
        lines.setdefault(_place(state), set()).add(state.rank)
    shown = [f"- {_ranks(ranks)}: {text}" for text, ranks in lines.items()]
    rest = len(shown) - _MOST_PLACES
    return shown if rest <= 0 else [*shown[:_MOST_PLACES], f"- and {rest} more places"]


def _place(state):
    current, last = state.current, state.history[-1] if state.history else None
    condition = f"{state.condition}; " if state.condition else ""
    if current:
        return f"{condition}in {current.described}"
    where = f"in Python at {state.stack[0]}" if state.stack else ("" if condition else "in Python")
    done = f"after {last.described}" if last else "before the first collective"
    return f"{condition}{where}{', ' * bool(where)}{done}"
