"""`recompute: {budget: 0.5}`: instructions to recompute so that half of the activation bytes stay. Pure Python."""

import math
from dataclasses import dataclass, replace

from mindformers_core.analysis.forward_seconds import forward_seconds
from mindformers_core.hints import bytes_shown, seconds_shown
from mindformers_core.program.name_ranges import layers_together
from mindformers_core.program.producers import links_of
from mindformers_core.recompute.explained import bytes_not_kept
from mindformers_core.recompute.knapsack import improved, mixed, pieces_of
from mindformers_core.recompute.pareto import TICKS, Measured, best_of, corners, lower_hull, trade_of

_SMALL = 400  # largest program, in instructions, in which local search changes every instruction
_WORK = 60_000  # evaluations of the local search times the number of instructions
_NEAR = 3  # starting corners of the curve on either side of the budget


@dataclass(frozen=True)
class Choice:
    """The recomputed instructions of a program, with their effect.

    Attributes:
        dropped: keys of the instructions whose results aren't saved (frozenset): each is recomputed once.
        saved_bytes: bytes of saved activations.
        seconds: forward seconds of what is recomputed, by the plan's device model.
        all_bytes: bytes of saved activations without recompute.
        curve: Pareto points `(saved_bytes, seconds)` from no recompute to the least memory, of all evaluated sets.
            Seconds ascend (two points may have 0, if some instruction costs none), bytes descend.
        forward_seconds: those of the whole forward pass.
        parts: each key of `dropped`, in the order of the program -> bytes that its recomputation frees, those of its
            result and of copies of views that operators save (0 if only recomputed instructions read the result); and
            the seconds of one recomputation.
        problem: reason why the program has no gradients, if no set fits; else empty.
        least_bytes: the smallest reachable `saved_bytes`.
    """

    dropped: frozenset
    saved_bytes: int
    seconds: float
    all_bytes: int
    curve: tuple
    forward_seconds: float
    parts: dict
    problem: str = ""
    least_bytes: int = 0


def choice_within(settings, program, boundaries=(), swapped=frozenset(), is_part=False):
    """The `Choice` of a program.

    Args:
        settings: the `RecomputeSettings`, with a budget.
        program: the `NamedProgram`.
        boundaries: paths of Cells whose results are always saved.
        swapped: keys of swapped instructions: never recomputed; their bytes count.
        is_part: whether the program is that of a pipeline stage.

    Raises:
        ValueError: no set fits the budget, see `choose`.
    """
    places = {place.key: place for place in program.places}
    prediction = program.prediction

    def not_kept(dropped):
        again = prediction.recomputed(dropped)
        return bytes_not_kept(links_of(program.plan), again, prediction.saved(), prediction.saved(dropped))

    return choose(
        program.plan,
        settings.budget,
        prediction.saved_bytes,
        prediction.recomputed,
        not_kept,
        lambda key: forward_seconds(places[key], prediction.algorithm),
        keep=program.kept(settings, boundaries) | swapped,
        is_part=is_part,
    )


def choose(plan, budget, saved_bytes, recomputed, not_kept, price, keep=(), is_part=False):
    """The `Choice` with the least recomputed time found that saves at most the part `budget` of all bytes.

    Instructions at the same position of equal layers are treated alike, unless the budget lies between two such sets:
    then the first layers follow one set and the other layers the other. Results of layers are saved, so the backward
    pass recomputes at most one layer at a time. Trading time for memory is the idea of Chen et al., "Training
    Deep Nets with Sublinear Memory Cost", 2016; `pareto` and `knapsack` have the algorithms.

    Args:
        plan: the `CellPlan` of the root.
        budget: part of the saved bytes that may stay, above 0 and at most 1.
        saved_bytes: (frozenset of dropped keys) -> saved bytes.
        recomputed: (frozenset of dropped keys) -> the subset that the backward pass recomputes.
        not_kept: (frozenset of dropped keys) -> {key: bytes that its recomputation frees}.
        price: key -> seconds of one recomputation.
        keep: keys of instructions that are never recomputed.
        is_part: whether the program is that of a pipeline stage; all stages share one budget.

    Raises:
        ValueError: no set fits the budget; the text has the least budget. For an evaluation program, which saves
            nothing without gradients, and for a pipeline stage, the text becomes the `problem` of the `Choice`.
    """
    links = links_of(plan)
    measured = Measured(saved_bytes, recomputed, price)
    all_bytes = measured.nbytes(frozenset())
    limit = math.floor(all_bytes * budget + 1e-6)
    trade = trade_of(links, measured, links.results.union(keep))
    sets = [trade.dropped(groups) for groups in (*corners(trade, limit), trade.droppable)]
    for dropped in sets:
        measured.recomputed(dropped), measured.nbytes(dropped)
    least = min(map(measured.nbytes, sets))
    if least > limit:
        whose = "this stage" if is_part else "this model"
        problem = out_of_reach(budget, least, all_bytes, "", whose)
        if plan.graph.training and not is_part:
            raise ValueError(problem)
        return replace(_choice(frozenset(), links, measured, not_kept), problem=problem, least_bytes=least)
    chosen = frozenset() if all_bytes <= limit else _within(limit, links, measured, sets[-1])
    return replace(_choice(chosen, links, measured, not_kept), least_bytes=least)


def out_of_reach(budget, least_bytes, all_bytes, place, whose):
    """Error text for a budget that no set fits.

    Args:
        budget: the requested budget.
        least_bytes, all_bytes: the smallest reachable saved bytes, and those without recompute.
        place: location of the program: `" on stage 1"`, or empty.
        whose: owner of the least budget, as `"this model"`.
    """
    least = math.ceil(1000 * least_bytes / all_bytes) / 1000  # rounded up: the given budget is reachable
    return (
        f"recompute.budget: {budget!r} is out of reach{place}: with all computed again that may be, "
        f"{bytes_shown(least_bytes)} of {bytes_shown(all_bytes)} stay; the least budget for {whose} is {least:g}"
    )


def _within(limit, links, measured, droppable):
    """The set with the least time found within `limit` bytes, of the keys `droppable`."""

    def fits(dropped):
        return measured.nbytes(dropped) <= limit

    keys = list(links.producers)
    hull = lower_hull(measured.points())
    fitting = next(place for place, (nbytes, _, _) in enumerate(hull) if nbytes <= limit)
    is_small = len(keys) <= _SMALL
    near = _NEAR if is_small else 1
    left, right = reversed(hull[max(0, fitting - near) : fitting]), hull[fitting : fitting + near]
    pairs = [(above[2], below[2]) for above in left for below in right]
    starts = [(*mixed(keys, links.layer_bounds, *pair, fits), *pair) for pair in pairs]
    starts += [(below, 0, len(keys), frozenset(), below) for _, _, below in right]
    questions = _WORK // len(keys) // len(starts)
    better = []
    for dropped, first, end, above, below in starts:
        changeable = [key for key in (keys if is_small else keys[first:end]) if key in droppable]
        pieces = pieces_of([key for key in changeable if key in below - above], links.producers)
        better.append(improved(dropped, changeable, pieces, measured, limit, questions))
    return min(better, key=lambda some: (measured.ticks(some), measured.nbytes(some)))


def _choice(dropped, links, measured, not_kept):
    """The `Choice` of a set, without instructions whose results the backward pass never reads."""
    rerun = measured.recomputed(dropped)
    dropped = rerun if measured.nbytes(rerun) == measured.nbytes(dropped) else dropped
    saves = not_kept(dropped)
    everything = measured.nbytes(frozenset()), 0
    curve = [(nbytes, ticks / TICKS) for nbytes, ticks, _ in best_of(measured.points())]
    return Choice(
        dropped=dropped,
        saved_bytes=measured.nbytes(dropped),
        seconds=measured.ticks(dropped) / TICKS,
        all_bytes=everything[0],
        curve=tuple(dict.fromkeys([everything, *curve])),
        forward_seconds=sum(map(measured.price, links.producers)) / TICKS,
        parts={key: (saves.get(key, 0), measured.price(key) / TICKS) for key in links.producers if key in dropped},
    )


def described(choice, names):
    """Lines of text: recomputed instructions, the bytes that each frees and its time, and the sums.

    Args:
        names: key of an instruction -> its name, as `"model.layers.0.mlp.silu"`; without one it is a redistribution.
            Equal names in consecutive layers share a line, as `model.layers.0-7.mlp.silu`; lines of 0 bytes and 0
            seconds are left out.
    """
    lines, parts, freed = [], [*choice.parts.items()], choice.all_bytes - choice.saved_bytes
    for name, places in layers_together([names.get(key, "a redistribution") for key, _ in parts]):
        lines.append((name, *map(sum, zip(*(parts[place][1] for place in places)))))
    lines.append(("kept in their place, to compute from", freed - sum(nbytes for _, nbytes, _ in lines), 0))
    lines = [*(line for line in lines if line[1] or line[2]), ("together", freed, choice.seconds)]
    head = "computed again"
    width = max(len(head), *(len(name) for name, _, _ in lines))
    part = 100 * choice.saved_bytes / max(choice.all_bytes, 1)
    share = 100 * choice.seconds / (choice.forward_seconds or 1)
    return [
        f"{bytes_shown(choice.saved_bytes)} of {bytes_shown(choice.all_bytes)} of saved activations stay "
        f"({part:.1f} %); what is computed again takes {seconds_shown(choice.seconds)}, {share:.1f} % of the forward "
        "pass",
        f"{head:{width}}  {'saves':>10}  {'takes':>10}",
        *(f"{name:{width}}  {_signed(nbytes):>10}  {seconds_shown(time):>10}" for name, nbytes, time in lines),
    ]


def _signed(nbytes):
    return bytes_shown(nbytes) if nbytes >= 0 else f"-{bytes_shown(-nbytes)}"
