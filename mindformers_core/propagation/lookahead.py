"""Looking ahead: choices that cost more at one operator, and less in all. Pure Python.

The start is what `decide_frame` chooses operator by operator. From every redistribution that this leaves, other
choices are tried: backward, that who makes the tensor makes it as it is wanted, then also those before who make what
that takes, and so on; and forward, that who takes it computes in another way. All that follows is decided anew. What is
accepted costs no more bytes, seconds or work than before, and less of one, so the end is never worse than the start.
At last redistributions are moved above shape operators, where that costs no more: there they can be shared.
The effort is limited: it grows with the square of a Cell's operators, of which real ones have a few dozen.
"""

from dataclasses import replace

from mindformers_core.operators.resolve import alternatives
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.costs import move_cost
from mindformers_core.propagation.decide import TRAINED, CallDecision, decide_frame

__all__ = ["improve"]

MOST_NODES = 150_000  # operators and calls that are decided for one call of a Cell: a few seconds


def improve(run, graph, arguments, final, wanted):
    """The best `Decision` that is found for a call; the arguments are those of `decide_frame`."""
    best, choices = run.decide(graph, arguments, final, wanted), {}

    def tried_out(candidate):
        """The `Decision` with some choices more; None where they ask of a later operator what it can't do."""
        try:
            return decide_frame(run, graph, arguments, final, wanted, choices | candidate)
        except ValueError:
            return None

    left = MOST_NODES // max(1, len(graph.nodes))
    progress = bool(best.cost.nbytes or best.cost.seconds)
    while progress and left > 0:
        progress, tried, more = False, set(), True
        while more and left > 0:  # after an improvement go on with what wasn't tried yet, and then once more with all
            more = False
            for origin, candidate in _candidates(run, best, choices, tried):
                left -= 1
                trial = tried_out(candidate)
                if trial is not None and trial.cost.improves_on(best.cost):
                    best, choices, progress, more = trial, choices | candidate, True, True
                    tried.add(origin)
                    break
                if left <= 0:
                    break
    return _hoisted(best, tried_out)


def _hoisted(best, tried_out):
    """The best `Decision` once what results are needed for is done above the operators that make them, at no more cost.

    There whoever else reads the tensor can share the move: `nn.Dense` reshapes its input before the product, and so
    would mark, or gather, a copy for each of the layers that read one tensor. An operator that is linear in its one
    input commutes with all redistributions.

    Args:
        best: the `Decision` so far.
        tried_out: choices, as `decide_frame` takes them -> the `Decision` for them and those of `best`, or None.
    """
    hoisted = {}
    for place in reversed(range(len(best.entries))):  # the readers of a view's view come first
        way = _above(best, place)
        if way is not None:
            trial = tried_out(hoisted | {place: way})
            if trial is not None and trial.cost.is_no_more_than(best.cost):
                best, hoisted = trial, hoisted | {place: way}
    return best


def _above(decision, place):
    """How an operator that is linear in its one input makes its result as it is needed; None where it does already."""
    entry, asked = decision.entries[place], decision.asked[place]
    if isinstance(entry, CallDecision) or len(asked.metas) != 1 or {0} not in asked.signature.linear:
        return None
    values, results = tree_leaves((entry.node.args, entry.node.kwargs)), tree_leaves(entry.node.outputs)
    if len(results) != 1 or values[0].id in {use.value.id for use in decision.graph.parameters}:
        return None
    forms = decision.forms[results[0].id]
    needed = forms.entry()
    cuts = {axis for axes in needed.dims for axis in axes} - {axis for axes in forms.first.dims for axis in axes}
    if needed == forms.first or cuts:  # a slice sends nothing, and has nothing to share
        return None
    way = _making(asked, 0, needed.replace(varying=()))
    return None if way is None else replace(way, marked=frozenset(needed.varying))


def _candidates(run, decision, choices, tried):
    """Pairs (origin, choices to try together, as `decide_frame` takes them): child calls first, then move by move.

    Origins go to `tried` when all that comes from them has been given, and nothing comes from those that are there.
    """
    calls = {place: None for place in range(len(decision.entries)) if place not in choices}
    calls = {place: None for place in calls if _can_improve(run, decision.entries[place], decision.asked[place])}
    if calls and "calls" not in tried:
        yield "calls", calls
        if len(calls) > 1:
            yield from (("calls", {place: None}) for place in calls)
    tried.add("calls")
    producers = {
        value.id: (place, number)
        for place, entry in enumerate(decision.entries)
        for number, value in enumerate(tree_leaves(entry.node.outputs))
    }
    takers = {}
    for place, used in enumerate(decision.used[:-1]):
        for pair in used:
            takers.setdefault(pair, []).append(place)
    for key, target in _moves_that_cost(run, decision):
        if (key, target) in tried:
            continue
        yield from (((key, target), choice) for choice in _pulled(decision, producers, key, target))
        for place in takers.get((key, target), ()):
            if isinstance(decision.entries[place], CallDecision):
                continue
            for way in alternatives(decision.asked[place]):
                if way.inputs != decision.entries[place].inputs:
                    yield (key, target), {place: way}
        tried.add((key, target))


def _can_improve(run, entry, asked):
    """Whether an entry is a call for which looking ahead finds something else."""
    if not isinstance(entry, CallDecision) or entry.decision is None:
        return False
    return run.improved(entry.node.graph, asked) is not entry.decision


def _moves_that_cost(run, decision):
    """Pairs (key, target), in the order of execution."""
    for key, forms in decision.forms.items():
        value, trained = decision.values[key], decision.flows[key] == TRAINED
        needed = forms.needed()
        for target, (source, _) in forms.moves.items():
            cost = move_cost(source, target, value.shape, value.dtype, trained, run.cost_model)
            if target in needed and (cost.nbytes or cost.seconds):
                yield key, target


def _pulled(decision, producers, key, target):
    """Backward: the tensor is made in `target`, by one operator, by it and those before it, and so on."""
    chosen, frontier = {}, [(key, target)]
    while frontier:
        before, following = len(chosen), []
        for wanted_key, layout in frontier:
            place, number = producers.get(wanted_key, (None, None))
            if place is None or place in chosen:
                continue
            entry, asked = decision.entries[place], decision.asked[place]
            if isinstance(entry, CallDecision):
                count = len(tree_leaves(entry.node.outputs))
                if entry.decision is not None:
                    chosen[place] = tuple(layout if other == number else None for other in range(count))
                continue
            resolution = _making(asked, number, layout)
            if resolution is not None:
                chosen[place] = resolution
                following += _missing(decision, entry, resolution)
        if len(chosen) > before:
            yield dict(chosen)
        frontier = following


def _making(asked, number, layout):
    """The cheapest way to compute an operator so that output `number` comes in `layout`, or None."""
    bare = layout.replace(varying=())
    ways = alternatives(asked, [(asked.signature.outputs[number], bare)])
    ways = [way for way in ways if way.outputs[number].replace(varying=()) == bare]
    return min(ways, key=lambda way: way.cost, default=None)


def _missing(decision, entry, resolution):
    """Pairs (key, layout) of the inputs that an operator would then take otherwise than it does."""
    paths = {use.value.id: use.path for use in decision.graph.parameters}
    keys = [paths.get(value.id, value.id) for value in tree_leaves((entry.node.args, entry.node.kwargs))]
    return [
        (key, layout)
        for key, layout in zip(keys, resolution.inputs)
        if layout.replace(varying=()) != decision.current[key].replace(varying=())
    ]
