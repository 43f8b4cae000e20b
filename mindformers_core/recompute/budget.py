"""`recompute: {budget: 0.5}`: what to compute again so that activations take a part of their bytes. Pure Python."""

import math
from dataclasses import dataclass, replace
from functools import cache

from mindformers_core.analysis.operations import operations
from mindformers_core.hints import bytes_shown, operations_shown
from mindformers_core.program.name_ranges import layers_together
from mindformers_core.program.producers import links_of
from mindformers_core.recompute.explained import bytes_not_kept
from mindformers_core.recompute.knapsack import improved, mixed, pieces_of
from mindformers_core.recompute.pareto import Measured, best_of, corners, lower_hull, trade_of
from mindformers_core.recompute.selection import kept_keys

__all__ = ["Choice", "Part", "choice_within", "choose", "described", "out_of_reach", "rows_of"]

_SMALL = 400  # instructions of a program in which everything is tried to be changed
_WORK = 60_000  # how often that asks, times the number of instructions
_NEAR = 3  # corners of the curve on either side of the budget that this starts from


@dataclass(frozen=True)
class Part:
    """One instruction that is computed again.

    Attributes:
        key: which.
        saved_bytes: that aren't kept because of it: its result, and copies that operators keep of views; 0 for one that
            nothing needs but what is computed again from it.
        flops: what computing it again takes.
    """

    key: tuple
    saved_bytes: int
    flops: int


@dataclass(frozen=True)
class Choice:
    """What is computed again.

    Attributes:
        dropped: keys of the instructions whose results aren't kept (frozenset): each is computed again once.
        saved_bytes: bytes of activations that are kept.
        flops: operations that are computed again.
        all_bytes: bytes that are kept where nothing is computed again.
        curve: points `(saved_bytes, flops)` from nothing computed again to the least memory: of all that are known, no
            other has less of both. Operations ascend (where something costs none, two may have 0), bytes descend.
        forward_flops: operations of the whole forward pass.
        parts: a `Part` for every one of `dropped`, in the order of the program.
        problem: why gradients can't be taken of the program, where nothing is chosen; else empty.
        least_bytes: the least that can be kept.
    """

    dropped: frozenset
    saved_bytes: int
    flops: int
    all_bytes: int
    curve: tuple
    forward_flops: int
    parts: tuple
    problem: str = ""
    least_bytes: int = 0


def choice_within(settings, program, boundaries=(), swapped=frozenset(), is_part=False):
    """The `Choice` of a program.

    Args:
        settings: the `RecomputeSettings`, with a budget.
        program: the `NamedProgram`.
        boundaries: paths of Cells whose results are kept in any case.
        swapped: keys of instructions whose results wait on the host: they aren't chosen, and their bytes count.
        is_part: whether the program is one of a stage.

    Raises:
        ValueError: nothing needs so little, see `choose`.
    """
    algorithm = program.algorithm and cache(program.algorithm)
    places = {place.key: place for place in program.places}
    prediction = program.prediction

    def not_kept(dropped):
        again = prediction.recomputed(dropped)
        return bytes_not_kept(links_of(program.frame), again, prediction.saved(), prediction.saved(dropped))

    return choose(
        program.frame,
        settings.budget,
        prediction.saved_bytes,
        prediction.recomputed,
        not_kept,
        lambda key: operations(places[key], algorithm),
        keep=kept_keys(settings, program, boundaries) | swapped,
        is_part=is_part,
    )


def choose(frame, budget, saved_bytes, recomputed, not_kept, price, keep=(), is_part=False):
    """What to compute again so that at most `budget` of the saved bytes stay, for as few operations as can be found.

    Instructions at the same place of equal layers are treated alike, but where a budget lies between two such choices:
    then the first layers follow the one and the others the other. What layers return is kept, so that never more than
    one layer is computed again at once. To give up tensors for operations is the idea of Chen et al., "Training deep
    nets with sublinear memory cost", 2016; see `frontier` and `filling` for how it is chosen.

    Args:
        frame: the `CellPlan` of the root.
        budget: above 0, at most 1: the part of the bytes saved for the backward pass that may stay.
        saved_bytes: (frozenset of dropped keys) -> bytes that are saved then.
        recomputed: (frozenset of dropped keys) -> those of them that are computed again.
        not_kept: (frozenset of dropped keys) -> key -> bytes that aren't kept because of it.
        price: key -> operations of computing it once more.
        keep: keys of instructions that must not be computed again.
        is_part: whether the program is one of a stage of a pipeline, for all of which there is one budget.

    Raises:
        ValueError: no choice needs so little: names the least part that can be had. Of an evaluation program, which
            keeps nothing as long as nobody asks for gradients, and of a stage, which knows nothing of the others, that
            is the `problem` of the `Choice`.
    """
    links = links_of(frame)
    measured = Measured(saved_bytes, recomputed, price)
    all_bytes = measured.nbytes(frozenset())
    limit = math.floor(all_bytes * budget + 1e-6)
    trade = trade_of(links, measured, links.results.union(keep))
    sets = [trade.dropped(groups) for groups in (*corners(trade, limit), trade.droppable)]
    for dropped in sets:
        measured.again(dropped), measured.nbytes(dropped)
    least = min(map(measured.nbytes, sets))
    if least > limit:
        whose = "this stage" if is_part else "this model"
        problem = out_of_reach(budget, least, all_bytes, "", whose)
        if frame.graph.training and not is_part:
            raise ValueError(problem)
        return replace(_choice(frozenset(), links, measured, not_kept), problem=problem, least_bytes=least)
    chosen = frozenset() if all_bytes <= limit else _within(limit, links, measured)
    return replace(_choice(chosen, links, measured, not_kept), least_bytes=least)


def out_of_reach(budget, least_bytes, all_bytes, place, whose):
    """The text of the error.

    Args:
        budget: what was asked for.
        least_bytes, all_bytes: what can be kept at the least, and what is kept without.
        place: of the program: `" on stage 1"`, or empty.
        whose: what the least budget is for.
    """
    least = math.ceil(1000 * least_bytes / all_bytes) / 1000  # not less than it is
    return (
        f"recompute.budget: {budget!r} is out of reach{place}: with all computed again that may be, "
        f"{bytes_shown(least_bytes)} of {bytes_shown(all_bytes)} stay; the least budget for {whose} is {least:g}"
    )


def _within(limit, links, measured):
    """The cheapest set that is found within `limit` bytes."""

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
        changeable = keys if is_small else keys[first:end]
        pieces = pieces_of([key for key in changeable if key in below - above], links.producers)
        better.append(improved(dropped, changeable, pieces, measured, limit, questions))
    return min(better, key=lambda some: (measured.flops(some), measured.nbytes(some)))


def _choice(dropped, links, measured, not_kept):
    """The `Choice` of a set, without what is never asked for."""
    again = measured.again(dropped)
    dropped = again if measured.nbytes(again) == measured.nbytes(dropped) else dropped
    saves = not_kept(dropped)
    everything = measured.nbytes(frozenset()), 0
    curve = [(nbytes, flops) for nbytes, flops, _ in best_of(measured.points())]
    return Choice(
        dropped=dropped,
        saved_bytes=measured.nbytes(dropped),
        flops=measured.flops(dropped),
        all_bytes=everything[0],
        curve=tuple(dict.fromkeys([everything, *curve])),
        forward_flops=sum(map(measured.price, links.producers)),
        parts=tuple(Part(key, saves.get(key, 0), measured.price(key)) for key in links.producers if key in dropped),
    )


def rows_of(choice, names):
    """What is computed again, as rows `(name, bytes that this saves, operations)` whose sums are those of the choice.

    Args:
        choice: a `Choice`.
        names: key -> name of an instruction, as `"model.layers.0.mlp.silu"`. Equal names of layers in a row come in one
            row, as `model.layers.0-7.mlp.silu`; what neither saves nor takes anything has none.
    """
    rows = []
    for name, places in layers_together([names(part.key) for part in choice.parts]):
        inside = [choice.parts[place] for place in places]
        rows.append((name, sum(part.saved_bytes for part in inside), sum(part.flops for part in inside)))
    besides = choice.all_bytes - choice.saved_bytes - sum(nbytes for _, nbytes, _ in rows)
    rows.append(("kept in their place, to compute from", besides, 0))
    return [row for row in rows if row[1] or row[2]]


def described(choice, names):
    """Lines of text: what is computed again, what that saves and takes, and the sums; arguments as of `rows_of`."""
    lines = [*rows_of(choice, names), ("together", choice.all_bytes - choice.saved_bytes, choice.flops)]
    head = "computed again"
    width = max(len(head), *(len(name) for name, _, _ in lines))
    part = 100 * choice.saved_bytes / max(choice.all_bytes, 1)
    share = 100 * choice.flops / max(choice.forward_flops, 1)
    return [
        f"{bytes_shown(choice.saved_bytes)} of {bytes_shown(choice.all_bytes)} of saved activations stay "
        f"({part:.1f} %); {operations_shown(choice.flops)} are computed again, {share:.1f} % of the forward pass",
        f"{head:{width}}  {'saves':>10}  {'operations':>12}",
        *(f"{name:{width}}  {_signed(nbytes):>10}  {operations_shown(flops):>12}" for name, nbytes, flops in lines),
    ]


def _signed(nbytes):
    return bytes_shown(nbytes) if nbytes >= 0 else f"-{bytes_shown(-nbytes)}"
