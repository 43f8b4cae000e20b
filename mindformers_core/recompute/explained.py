"""Recomputed and swapped results in `explain()`: an annotation for each instruction, and the sums. Pure Python."""

from collections import Counter, deque

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.hints import bytes_shown
from mindformers_core.program.activation_policy import Annotation, ExplainedActivations
from mindformers_core.program.name_ranges import cells_together, names_shown
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.program.plan import called_cells, operators_in_order
from mindformers_core.program.producers import links_of

_NOT_NEEDED = (
    "no gradient needs what is selected (of a Cell: besides its results, which stay); list_operators() shows what is "
    "saved of each operator; select such ones, or the Cell around"
)


def keepers_by_key(plan):
    """Key of an instruction -> its `Keeper`, for the instructions of a program that have one."""
    places = [place for place in operators_in_order(plan) if place.entry in place.plan.keepers]
    return {place.key: place.plan.keepers[place.entry] for place in places}


def explained_activations(plan, recomputing, algorithm, path="", arguments_need=True, swaps=False):
    """The `ExplainedActivations` of a program.

    Args:
        plan: its `CellPlan`, with keepers.
        recomputing: class name of the keepers of recomputed instructions; other keepers swap to the host.
        algorithm, arguments_need: see `Prediction`.
        path: path of a Cell in the program; annotations are those of its first call, with keys relative to the Cell.
        swaps: whether swapping was requested, even if no instruction is swapped.
    """
    keepers = keepers_by_key(plan)
    dropped = frozenset(key for key, keeper in keepers.items() if keeper.name == recomputing)
    predicted = Prediction(plan, algorithm, arguments_need)
    rerun, before, after = predicted.recomputed(dropped), predicted.saved(), predicted.saved(dropped)
    lost = bytes_not_kept(links_of(plan), rerun, before, after)
    notes = {key: Annotation("kept for others", -nbytes) for key, nbytes in lost.items() if nbytes < 0}
    notes |= {key: Annotation("recomputed", max(lost[key], 0), keepers[key].takes_collectives) for key in rerun}
    on_host, swapped = Counter(), keepers.keys() - dropped
    if swapped:  # each result on the host is a copy of its own, where the device has views of one piece of memory
        after = predicted.trace(dropped, swapped).live_set().kept
        for memory in after:
            if memory.on_host:
                on_host[memory.key] += memory.nbytes
    notes |= {key: Annotation("on host", nbytes) for key, nbytes in on_host.items()}
    lines = _lines(plan, dropped, rerun, on_host if swaps or swapped else None, before, after)
    return _inside(path, plan, lines, notes, (dropped, swapped))


def explained_cells(plan, cells, apart, algorithm, path="", arguments_need=True):
    """The `ExplainedActivations` of a compiled function that recomputes whole Cells, by its plan.

    The arguments of a recomputed Cell are saved. Other Cells are assumed to save the same tensors as in PyNative.

    Args:
        cells: keys of the calls of recomputed Cells, none inside another.
        apart: whether each of them is compiled and called as a function of its own.
        algorithm, path, arguments_need: see `explained_activations`.
    """
    predicted = Prediction(plan, algorithm, arguments_need)
    dropped = frozenset().union(*map(predicted.cell_keys, cells))
    before, after = predicted.saved(), predicted.saved(dropped)
    rerun = predicted.recomputed(dropped)
    if apart:  # these run again as they are; in a graph only what is needed does
        rerun = {place.key for place in operators_in_order(plan) if any(_lies_in(place.key, key) for key in cells)}
    notes = {key: Annotation("", 0, sends=True) for key in rerun}
    for key in cells:
        kept, left = (sum(tensor.nbytes for tensor in some if _lies_in(tensor.key, key)) for some in (before, after))
        notes[key] = Annotation("recomputed whole", max(kept - left, 0))
    names = cells_together([cell for key, cell in called_cells(plan) if key in cells])
    left, kept = (bytes_shown(sum(tensor.nbytes for tensor in some)) for some in (after, before))
    lines = (
        f"recompute, whole Cells in a compiled function: {', '.join(names)}",
        f"by the plan {left} of {kept} of activations are kept for the backward pass",
        "(of Cells that don't run again as PyNative keeps them: a graph may keep more, or less)",
    )
    return _inside(path, plan, lines, notes, (dropped, ()))


def _lies_in(key, cell):
    return key[: len(cell)] == cell


def _inside(path, plan, lines, notes, sets):
    """The `ExplainedActivations` of the first call of the Cell at `path`, with the lines of the whole program."""
    start = next(key for key, cell in called_cells(plan) if cell == path)
    inside = {key[len(start) :]: note for key, note in notes.items() if _lies_in(key, start)}
    sets = (frozenset(key[len(start) :] for key in keys if _lies_in(key, start)) for keys in sets)
    return ExplainedActivations(tuple(lines), inside, *sets)


def bytes_not_kept(links, rerun, before, after):
    """Key -> saved bytes that recomputing the instructions `rerun` frees; negative for bytes that are saved instead.

    A saved copy of a view is charged to the producer of the view. Bytes no longer saved by an operator outside of
    `rerun` are charged to the recomputed producers of its inputs. The sum is that of all freed bytes with a producer
    in `rerun`.
    """
    lost = Counter()
    for sign, tensors in ((1, before), (-1, after)):
        for tensor in tensors:
            lost[tensor.owner if tensor.owner in rerun else tensor.key] += sign * tensor.nbytes
    for key in [key for key, nbytes in lost.items() if nbytes > 0 and key not in rerun]:
        for maker in _nearest(key, links.producers, rerun):
            part = min(lost[key], links.nbytes[maker])
            lost[maker] += part
            lost[key] -= part
    return lost


def _nearest(key, producers, rerun):
    """The nearest producers in `rerun` of an instruction's inputs, searched through producers outside of `rerun`."""
    found, waiting, seen = [], deque(producers[key]), {*producers[key]}
    while waiting:
        maker = waiting.popleft()
        if maker in rerun:
            found.append(maker)
            continue
        waiting.extend(other for other in producers[maker] if other not in seen)
        seen.update(producers[maker])
    return found


def _lines(plan, dropped, rerun, on_host, before, after):
    """The sums, and the names of recomputed instructions; `on_host`: key -> bytes, or None without swapping."""
    kept, all_of_them = (bytes_shown(sum(tensor.nbytes for tensor in some)) for some in (after, before))
    if rerun or on_host is None:
        yield (
            f"recompute: {len(rerun)} of {len(operators_in_order(plan))} instructions run again; {kept} of "
            f"{all_of_them} of activations are kept for the backward pass"
        )
    if dropped and not rerun:
        yield f"nothing runs again: {_NOT_NEEDED}"
    texts = operator_texts(plan)
    names = [texts[key] for key in sorted(rerun) if key in texts]
    yield from ["computed again:", *names_shown(names)] if names else []
    if on_host is not None:
        waiting = bytes_shown(sum(on_host.values()))
        yield f"swap: results of {len(on_host)} instructions wait on the host, {waiting} of {kept} that are kept"
        if not on_host:
            yield f"nothing is swapped: {_NOT_NEEDED}"
