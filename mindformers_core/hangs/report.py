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
        lines.append(f"{size - len(states)} more of {size} ranks are on other hosts, whose logs have their own places.")
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
            return lost, f"{_ranks(lost)} {_plural(conditions, lost)}{_before(lost, states)}"
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


def _plural(predicate, ranks):
    verb, _, rest = predicate.partition(" ")
    return predicate if len(ranks) == 1 else f"{ {'has': 'have', 'is': 'are', 'was': 'were'}[verb] } {rest}".strip()


def _missing(state, known):
    """The known ranks that a waiting rank waits for."""
    current = state.current
    if current.kind == "receive":
        return [rank for rank in current.ranks[:1] if rank in known]
    if not current.ranks:  # of a compiled function, whose collectives aren't known: any rank that is elsewhere
        return [rank for rank, other in known.items() if not other.current or other.state != "running"]
    others = [rank for rank in current.ranks if rank in known and rank != state.rank]
    return [rank for rank in others if not known[rank].has_issued(current)]


def _before(ranks, states):
    """The first call that others wait in and these ranks have not issued."""
    for state in states:
        current = state.current
        if current and state.rank not in ranks and (ranks & {*current.ranks} or not current.ranks):
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
    """The ranks that have issued another call than the others, and the reason; None where no calls differ.

    Two records belong to the same call where their ranks and number are equal, or their place in the plan, at which
    all ranks have the same group, kind and shape.
    """
    calls, sites = {}, {}
    for state in states:
        for one in (one for one in state.history if one.number is not None):
            calls.setdefault(one.call, {})[one.rank] = one
            if one.plan:
                sites.setdefault((one.place, one.plan), {})[one.rank] = one  # the last one of the rank
    for what, groups in ((_form, sites), (_signature, calls)):
        for alike in groups.values():
            waiting = [one for one in alike.values() if not one.done]
            if len({what(one) for one in waiting}) > 1:
                return _odd_ones(waiting, Counter(map(what, alike.values())), what, _highest(states))
    return None


def _highest(states):
    """The highest number in the plan that any rank has recorded; 1 without any."""
    numbers = [one.plan.rpartition("#")[2] for state in states for one in state.history]
    return max([1, *(int(number) for number in numbers if number.isdigit())])


def _form(one):
    return one.kind, one.axes, one.shape


def _signature(one):
    return one.signature


def _odd_ones(issued, counts, what, highest):
    """The ranks whose call is the rarer one; where none is, those that are further on in the plan, or all."""
    first, *_, second = sorted(dict.fromkeys(map(what, issued)), key=counts.get, reverse=True)
    usual = next(one for one in issued if what(one) == first)
    odd = [one for one in issued if what(one) != first]
    gap = _gap(usual, odd[0], highest)
    if counts[first] == counts[second]:
        if gap == 0:
            both = f"rank {usual.rank} issued {usual.described}, rank {odd[0].rank} {odd[0].described}"
            return {one.rank for one in issued}, f"the ranks disagree: {both}"
        if gap < 0:
            usual, odd, gap = odd[0], [one for one in issued if what(one) == first], -gap
    ranks = {one.rank for one in odd}
    skipped = f", so {usual.plan} was skipped or comes later there" if gap > 0 else ""
    return ranks, f"{_ranks(ranks)} issued {odd[0].described} in its place{skipped}"


def _gap(one, other, highest):
    """How much further on `other` is in the plan, by the shorter way around a step: 1 to `highest` forward, then back;
    0 if that isn't known."""
    places = [int(each.plan.rpartition("#")[2]) if "#" in each.plan else 0 for each in (one, other)]
    if not all(places):
        return 0
    at, to = (place if each.plan[0] == "#" else 2 * highest + 1 - place for place, each in zip(places, (one, other)))
    return (to - at + highest) % (2 * highest) - highest


def _cycle(ranks, known):
    """Ranks that wait for each other in calls of different groups: those of the least common call are blamed."""
    calls = Counter((known[rank].current.ranks, known[rank].current.label) for rank in ranks)
    least = min(calls.values())
    rare = {rank for rank in ranks if calls[known[rank].current.ranks, known[rank].current.label] == least}
    first = min(rare)
    if len(rare) == len(ranks):  # all alike: those further on in the plan
        highest = _highest(known.values())
        gaps = {rank: _gap(known[first].current, known[rank].current, highest) for rank in rare}
        rare = {rank for rank in rare if gaps[rank] == max(gaps.values())} if any(gaps.values()) else rare
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
    condition = f"{state.condition.partition(' ')[2]}; " if state.condition else ""  # without the verb
    if current:
        return f"{condition}in {current.described}"
    where = f"in Python at {state.stack[0]}" if state.stack else ("" if condition else "in Python")
    done = f"after {last.described}" if last else "before the first collective"
    return f"{condition}{where}{', ' * bool(where)}{done}"
