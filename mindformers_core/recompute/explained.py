"""What `explain()` says of results that are kept in another way: a mark for each, and the sums. Pure Python."""

from collections import Counter

from mindformers_core.recompute.links import links_of
from mindformers_core.recompute.operator_names import operator_names
from mindformers_core.recompute.places import called_cells, operators_in_order
from mindformers_core.recompute.prediction import Prediction
from mindformers_core.recompute.wording import names_shown
from mindformers_core.tensor_parallel.activation_policy import ExplainedActivations, Mark
from mindformers_core.tensor_parallel.explaining.wording import bytes_shown

__all__ = ["explained_activations", "keepers_by_key"]


def keepers_by_key(frame):
    """Key of an instruction -> its `Keeper`, of all that have one in a program."""
    places = [place for place in operators_in_order(frame) if place.entry in place.frame.keepers]
    return {place.key: place.frame.keepers[place.entry] for place in places}


def explained_activations(frame, recomputing, algorithm, path="", arguments_need=True):
    """The `ExplainedActivations` of a program.

    Args:
        frame: its `FramePlan`, with keepers.
        recomputing: what the keepers of instructions that are computed again are called; others wait on the host.
        algorithm: as for `saved_activations`.
        arguments_need: as for `saved_activations`.
        path: of a Cell in it; the marks are those in its first call, with their keys in there.
    """
    keepers = keepers_by_key(frame)
    dropped = frozenset(key for key, keeper in keepers.items() if keeper.name == recomputing)
    predicted = Prediction(frame, algorithm, arguments_need)
    again, before, after = predicted.recomputed(dropped), predicted.saved(), predicted.saved(dropped)
    lost = _bytes_not_kept(links_of(frame), again, before, after)
    marks = {key: Mark("kept for others", -nbytes) for key, nbytes in lost.items() if nbytes < 0}
    marks |= {key: Mark("recomputed", max(lost[key], 0), keepers[key].takes_collectives) for key in again}
    on_host = Counter()
    for tensor in after:
        if tensor.key in keepers and tensor.key not in dropped:
            on_host[tensor.key] += tensor.nbytes
    marks |= {key: Mark("on host", nbytes) for key, nbytes in on_host.items()}
    start = next(key for key, cell in called_cells(frame) if cell == path)
    inside = {key[len(start) :]: mark for key, mark in marks.items() if key[: len(start)] == start}
    lines = _lines(frame, again, None if dropped == keepers.keys() else on_host, before, after)
    return ExplainedActivations(tuple(lines), inside)


def _bytes_not_kept(links, again, before, after):
    """Key -> bytes that are kept without and aren't with what runs `again`; negative where they are kept instead.

    An operator that takes a view keeps a copy. What isn't kept by one that doesn't run again counts for who makes that
    view. Together this is all that isn't kept any more, but for copies of what no one of `again` makes.
    """
    lost = Counter()
    for sign, tensors in ((1, before), (-1, after)):
        for tensor in tensors:
            lost[tensor.key] += sign * tensor.nbytes
    for key in [key for key, nbytes in lost.items() if nbytes > 0 and key not in again]:
        for maker in _nearest(key, links.makers, again):
            part = min(lost[key], links.nbytes[maker])
            lost[maker] += part
            lost[key] -= part
    return lost


def _nearest(key, makers, again):
    """Those of `again` that make what an instruction takes, or what that is made of, and so on."""
    found, waiting = {}, list(makers[key])
    while waiting:
        maker = waiting.pop(0)
        if maker in again:
            found[maker] = None
        else:
            waiting.extend(makers[maker])
    return list(found)


def _lines(frame, again, on_host, before, after):
    """The sums, and the names of what is computed again; `on_host`: key -> bytes, or None where nothing is swapped."""
    kept, all_of_them = (bytes_shown(sum(tensor.nbytes for tensor in some)) for some in (after, before))
    if again or on_host is None:
        yield (
            f"recompute: {len(again)} of {len(operators_in_order(frame))} instructions run again; {kept} of "
            f"{all_of_them} of activations are kept for the backward pass"
        )
    texts = {name.place.key: name.text for name in operator_names(frame)}
    names = [texts[key] for key in sorted(again) if key in texts]
    yield from ["computed again:", *names_shown(names)] if names else []
    if on_host is not None:
        waiting = bytes_shown(sum(on_host.values()))
        yield f"swap: results of {len(on_host)} instructions wait on the host, {waiting} of {kept} that are kept"
