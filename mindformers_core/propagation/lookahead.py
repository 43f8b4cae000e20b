"""Lookahead: choices with a higher price at one operator and a lower total price. Pure Python.

The search starts from the choices of `decide_plan`, operator by operator, and tries others for every remaining
redistribution that sends anything, or that keeps a part of what every rank has computed. Backward: let the producer
emit the required layout, then its producers in turn. Forward: let the consumer compute in another sharding; a product
of a partial sum also in one that nothing has, since the sum can be scattered. All later operators are decided again. A
trial is accepted if its price is lower, and a rank's computation, were operators cut over the axes of declared
activations alone, takes no longer: at small sizes, where launches of collectives cost most, computing the batch on all
ranks would save some, and models would be tried with other plans than they are trained with.
Finally, redistributions move above shape operators where that costs no more: there other consumers can share them.
The effort is limited: it grows with the square of a Cell's operators, of which real Cells have a few dozen.
"""

from dataclasses import replace

from mindformers_core.grouping import grouped
from mindformers_core.operators.registry import facts_of
from mindformers_core.operators.resolve import alternatives
from mindformers_core.propagation.decide import TRAINED, CallDecision, decide_plan

MOST_NODES = 150_000  # decisions of operators and calls for one call of a Cell: a few seconds


def improve(run, graph, arguments, final, wanted):
    """The best `Decision` found for a call; arguments as of `decide_plan`."""
    best, choices = run.decide(graph, arguments, final, wanted), {}

    def tried_out(candidate):
        """The `Decision` with additional choices; None where a later operator can't satisfy them."""
        try:
            return decide_plan(run, graph, arguments, final, wanted, choices | candidate)
        except ValueError:
            return None

    left = MOST_NODES // max(1, len(graph.nodes))
    tried, improved = set(), False
    while left > 0:
        most = best.activation_seconds * (1 + 1e-9)
        for origin, candidate in _candidates(run, best, choices, tried):
            left -= 1
            trial = tried_out(candidate)
            if trial is not None and trial.activation_seconds <= most and trial.price.improves_on(best.price):
                best, choices, improved = trial, choices | candidate, True
                tried.add(origin)
                break
            if left <= 0:
                break
        else:  # no untried origin is left: repeat with all after an improvement
            if not improved:
                break
            tried, improved = set(), False
    return _hoisted(best, tried_out)


def _hoisted(best, tried_out):
    """The best `Decision` after redistributions are hoisted above the producers of their tensors, at no more cost.

    There other consumers of the producer's input share the redistribution: `nn.Dense` reshapes its input before the
    product, so that each of several layers with one input would gather a copy. An operator that is linear in its only
    input commutes with all redistributions.

    Args:
        best: the `Decision` so far.
        tried_out: choices, as `decide_plan` takes them -> the `Decision` for them and those of `best`, or None.
    """
    hoisted = {}
    for place in reversed(range(len(best.entries))):  # of nested views the outer one comes first
        way = _above(best, place)
        if way is not None:
            trial = tried_out(hoisted | {place: way})
            if trial is not None and not best.price.improves_on(trial.price):
                best, hoisted = trial, hoisted | {place: way}
    return best


def _above(decision, place):
    """The `Choice` by which an operator, linear in its only input, emits the required layout; None without gain."""
    entry, call = decision.entries[place], decision.calls[place]
    if isinstance(entry, CallDecision) or len(call.metas) != 1 or {0} not in call.signature.linear:
        return None
    values, results = entry.node.taken, entry.node.made
    if len(results) != 1 or values[0].id in {use.value.id for use in decision.graph.parameters}:
        return None
    required = decision.required[results[0].id]
    needed = required.entry()
    cuts = needed.cut_axes - required.first.cut_axes
    if needed == required.first or cuts:  # a slice sends nothing, so nothing is gained
        return None
    way = _making(call, 0, needed.replace(varying=()))
    return None if way is None else replace(way.choice, marked=frozenset(needed.varying))


def _candidates(run, decision, choices, tried):
    """Pairs (origin, choices to try together, as of `decide_plan`): child calls first, then every redistribution.

    An origin enters `tried` after all its candidates; origins in `tried` have none.
    """
    entries = enumerate(zip(decision.entries, decision.calls))
    calls = {place: None for place, pair in entries if place not in choices and _can_improve(run, *pair)}
    if calls and "calls" not in tried:
        yield "calls", calls
        if len(calls) > 1:
            yield from (("calls", {place: None}) for place in calls)
    tried.add("calls")
    for key, choices_by_operators in _gathered_once(decision):
        if key not in tried:
            yield key, choices_by_operators
            tried.add(key)
    producers = {
        value.id: (place, number)
        for place, entry in enumerate(decision.entries)
        for number, value in enumerate(entry.node.made)
    }
    consumers = grouped((pair, place) for place, used in enumerate(decision.used[:-1]) for pair in used)
    for key, source, target in _moves_to_save(run, decision, producers):
        if (key, target) in tried:
            continue
        yield from (((key, target), choice) for choice in _pulled(decision, producers, key, target))
        for place in consumers.get((key, target), ()):
            if isinstance(decision.entries[place], CallDecision):
                continue
            for way in alternatives(decision.calls[place], _scattered(decision, place, key, source, target)):
                if way.inputs != decision.entries[place].inputs:
                    yield (key, target), {place: way.choice}
        tried.add((key, target))


def _gathered_once(decision):
    """Of each tensor that several algorithms take: choices by which operators take it whole, from one gather."""
    entries = enumerate(zip(decision.entries, decision.used))
    taken = grouped((used[0], place) for place, (entry, used) in entries if used and getattr(entry, "algorithm", None))
    for tensor, places in taken.items():
        calls = [decision.calls[place] for place in places] if len(places) > 1 else []
        ways = [[way for way in alternatives(call) if way.algorithm[0] is None] for call in calls]
        if ways and all(ways):
            yield (tensor, "gathered once"), {place: min(each, key=_order).choice for place, each in zip(places, ways)}


def _can_improve(run, entry, call):
    """Whether an entry is a call that lookahead changes."""
    decision = getattr(entry, "decision", None)
    return decision is not None and run.improved(entry.node.graph, call) is not decision


def _moves_to_save(run, decision, producers):
    """Triples (key, source, target), in the order of execution: redistributions that send, and slices of results."""
    for key, required in decision.required.items():
        value, trained = decision.values[key], decision.flows[key] == TRAINED
        needed = required.needed()
        for target, (source, _) in required.moves.items():
            if target not in needed:
                continue
            is_slice = key in producers and not target.cut_axes <= source.cut_axes
            if is_slice or run.redistribution_price(value, trained, source, target).communication:
                yield key, source, target


def _scattered(decision, place, key, source, target):
    """What `alternatives` takes as suggested: of a partial sum that a product gets whole, parts along each dim."""
    entry, call = decision.entries[place], decision.calls[place]
    axes = tuple(axis for axis, _ in source.partial if axis not in target.placed_axes)
    if not axes or not callable(facts_of(call.name).operations):
        return []
    keys = [decision.graph.names.get(value.id, value.id) for value, _ in entry.consumed]
    return [
        (dims, target.replace(dims=[*target.dims[:dim], (*own, *axes), *target.dims[dim + 1 :]], varying=()))
        for dims in (call.signature.inputs[number] for number, each in enumerate(keys) if each == key)
        for dim, own in enumerate(target.dims)
    ]


def _pulled(decision, producers, key, target):
    """Backward candidates: the producer emits the tensor in `target`, then with its own producers, and so on."""
    chosen, frontier = {}, [(key, target)]
    while frontier:
        before, following = len(chosen), []
        for wanted_key, layout in frontier:
            place, number = producers.get(wanted_key, (None, None))
            if place is None or place in chosen:
                continue
            entry, call = decision.entries[place], decision.calls[place]
            if isinstance(entry, CallDecision):
                count = len(entry.node.made)
                if entry.decision is not None:
                    chosen[place] = tuple(layout if other == number else None for other in range(count))
                continue
            resolution = _making(call, number, layout)
            if resolution is not None:
                chosen[place] = resolution.choice
                following += _missing(decision, entry, resolution)
        if len(chosen) > before:
            yield dict(chosen)
        frontier = following


def _order(way):
    """By which the `Resolution` of the lower price comes first."""
    return way.price.given_up, way.price.seconds


def _making(call, number, layout):
    """The cheapest `Resolution` of an operator whose output `number` is in `layout`, or None."""
    bare = layout.replace(varying=())
    ways = alternatives(call, [(call.signature.outputs[number], bare)])
    ways = [way for way in ways if way.outputs[number].replace(varying=()) == bare]
    return min(ways, key=_order, default=None)


def _missing(decision, entry, resolution):
    """Pairs (key, layout) of the inputs that an operator would consume in another layout than the current one."""
    keys = [decision.graph.names.get(value.id, value.id) for value, _ in entry.consumed]
    return [
        (key, layout)
        for key, layout in zip(keys, resolution.inputs)
        if layout.replace(varying=()) != decision.current[key].replace(varying=())
    ]
