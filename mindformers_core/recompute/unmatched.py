"""What there is in place of what a pattern asks for in vain, for the error. Pure Python."""

from dataclasses import replace

from mindformers_core.hints import nearest
from mindformers_core.recompute.wording import quoted, ranges_shown

__all__ = ["what_is_missing", "what_is_there"]

_SHOWN = 5


def what_is_there(pattern, names, cells):
    """The names where a pattern that matches nothing leads no further, the nearest one among them.

    Args:
        pattern: a `Pattern`.
        names, cells: see `select`.
    """
    last = pattern.segments[-1]
    most = _most_alike(pattern, names) if last.indices is not None else 0
    if most:
        return f"a call of a Cell has {most} of {last.name!r} at most"
    paths = _all_beginnings(cells)
    reached = {path: pattern.after(path) for path in paths}
    furthest = max(place for places in reached.values() for place in places)
    there = {path for path in paths if furthest in reached[path]}
    known = dict.fromkeys(_last(path) for path in paths if path and _above(path) in there)
    labels = [name.labels for name in names if name.path in there]
    known |= {label.name: None for each in labels for label in each if label is each[0] or label.variable}
    if furthest == len(pattern.segments):
        return f"{pattern.text!r} is a list of Cells, which is never called itself: below it are {_listed(known)}"
    return f"{_below(pattern, furthest)} are {_listed(known)}{nearest(pattern.segments[furthest].text, known)}"


def what_is_missing(pattern, selected, names, cells):
    """Which numbers in a pattern stand for nothing, though it matches something: the end of a sentence, or nothing.

    Args:
        pattern: a `Pattern`.
        selected: `(keys of Cells, keys of operators)` that it matches.
        names, cells: see `select`.
    """
    chosen = {path for key, path in cells if key in selected[0]}
    chosen |= {name.path for name in names if name.place.key in selected[1]}
    paths = _all_beginnings(cells)
    for place, segment in enumerate(pattern.segments):
        if segment.numbers is None:
            continue
        head = replace(pattern, segments=pattern.segments[: place + 1])
        used = {_above(path) for path in paths if place + 1 in head.after(path) and _holds_any(path, chosen)}
        known = {int(_last(path)) for path in paths if _last(path).isdigit() and _above(path) in used}
        missing = _missing(segment.numbers, known)
        if missing:
            return f"is only partly there: {_below(pattern, place)} are {quoted(ranges_shown(known))}, not {missing}"
    last = pattern.segments[-1]
    most = _most_alike(pattern, names) if last.indices is not None else 0
    missing = _missing(last.indices or (), range(most))
    has = f"a call of a Cell has {most} of {last.name!r} at most"
    return f"is only partly there: {has}, not {missing}" if missing else ""


def _missing(ranges, there):
    """The numbers of some ranges that are not there, as ranges in quotes; nothing where all are."""
    numbers = {number for first, last in ranges for number in range(first, last + 1)}
    return quoted(ranges_shown(numbers - set(there)))


def _most_alike(pattern, names):
    """How many operators a call of a Cell has at most that a pattern matches but for its index."""
    *before, last = pattern.segments
    pattern = replace(pattern, segments=(*before, replace(last, text=last.name, indices=None)))
    reached = {path: pattern.after(path) for path in {name.path for name in names}}
    labels = (label for name in names for label in name.labels if pattern.matches_operator(reached[name.path], [label]))
    return max((label.count for label in labels), default=0)


def _below(pattern, end):
    """Where a pattern leads by its segments up to `end`."""
    led = ".".join(segment.text for segment in pattern.segments[int(not pattern.text.startswith(".")) : end])
    if led:
        return f"below {led!r}"
    return "at the root" if pattern.text.startswith(".") else "there"


def _all_beginnings(cells):
    """Of `a.b`: nothing, `a` and `a.b`; a list of Cells is never called and only there as a beginning."""
    found = {"": None}
    for _, path in cells:
        parts = path.split(".") if path else []
        found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return list(found)


def _above(path):
    return path.rpartition(".")[0]


def _last(path):
    return path.rpartition(".")[2]


def _holds_any(path, paths):
    """Whether one of some Cells is this one, or lies in it."""
    return any(f"{each}.".startswith(f"{path}.") for each in paths)


def _listed(known):
    """The first of some names; all numbers among them as ranges."""
    shown = ranges_shown({int(name) for name in known if name.isdecimal()})
    shown += [name for name in known if not name.isdecimal()]
    return quoted(shown[:_SHOWN]) + (", …" if len(shown) > _SHOWN else "") if shown else "no names"
