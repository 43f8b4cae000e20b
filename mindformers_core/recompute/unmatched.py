"""What there is in place of what a pattern asks for in vain, for the error. Pure Python."""

import re
from dataclasses import replace
from difflib import SequenceMatcher

from mindformers_core.recompute.operator_names import Label, plain_name
from mindformers_core.recompute.wording import quoted, ranges_shown

__all__ = ["what_is_missing", "what_is_there"]

_SHOWN = 5
_LIKENESS = 0.6  # of 1; those less like are no help
_NEAREST = 3


def what_is_there(pattern, names, cells, classes):
    """The end of the sentence that a pattern matches no …, with the nearest names.

    Args:
        pattern: a `Pattern` that matches nothing.
        names, cells, classes: see `select`.
    """
    last = pattern.segments[-1]
    if last.indices is not None:
        pattern = _without_index(pattern)
        most = _most_alike(pattern, names)
        if most:
            return f"operator: a call of a Cell has {most} of {last.name!r} at most, the last one is [{most - 1}]"
        if any(len(pattern.segments) in pattern.after(path) for _, path in cells):
            return f"operator: {last.name!r} is a Cell, and an index counts operators; a Cell in a list is name.0"
    return "Cell or operator: " + _nearest_names(pattern, names, cells, classes)


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
        missing, rest = _parted(segment.numbers, known)
        if missing:
            led = _led(pattern, place)
            there = f"{f'below {led!r}' if led else 'there'} are {quoted(ranges_shown(known))}"
            return _partly(there, missing, _rewritten(pattern, place, ",".join(rest)))
    last = pattern.segments[-1]
    if last.indices is not None:
        most = _most_alike(_without_index(pattern), names)
        missing, rest = _parted(last.indices, range(most))
        if missing:
            better = _rewritten(pattern, len(pattern.segments) - 1, f"{last.name}[{','.join(rest)}]")
            return _partly(f"a call of a Cell has {most} of {last.name!r} at most", missing, better)
    return ""


def _partly(there, missing, better):
    return f"is only partly there: {there}, not {quoted(missing)}: write {better!r}"


def _parted(ranges, there):
    """`(those that are not there, the others)` of the numbers of some ranges, as ranges in texts."""
    numbers = {number for first, last in ranges for number in range(first, last + 1)}
    return ranges_shown(numbers - set(there)), ranges_shown(numbers & set(there))


def _rewritten(pattern, place, written):
    """The text of a pattern with another segment at a place."""
    parts = pattern.text.split(".")
    parts[place - len(pattern.segments)] = written  # from its end: what it may begin with isn't in all texts
    return ".".join(parts)


def _without_index(pattern):
    *before, last = pattern.segments
    return replace(pattern, segments=(*before, replace(last, text=last.name, indices=None)))


def _most_alike(pattern, names):
    """How many operators a call of a Cell has at most that a pattern matches, by one of their names."""
    reached = {path: pattern.after(path) for path in {name.path for name in names}}
    return max(
        (
            label.count
            for name in names
            for label in name.labels
            if pattern.matches_operator(reached[name.path], [label])
        ),
        default=0,
    )


def _nearest_names(pattern, names, cells, classes):
    """How far a pattern leads, and the names that can stand there."""
    paths = _all_beginnings(cells)
    reached = {path: pattern.after(path) for path in paths}
    furthest = max(place for places in reached.values() for place in places)
    there = {path for path in paths if furthest in reached[path]}
    labels = [name.labels for name in names if name.path in there]
    known = dict.fromkeys(_last(path) for path in paths if path and _above(path) in there)
    known |= dict.fromkeys(label.name for each in labels for label in each if label is each[0] or label.variable)
    led = _led(pattern, furthest)
    if furthest == len(pattern.segments):
        return f"{led!r} holds Cells but is itself never called: write '{led}.*'; below it are {_listed(known)}"
    wrong = pattern.segments[furthest]
    if any(wrong.fits_operator(each) for each in labels):
        return f"{_led(pattern, furthest + 1)!r} is an operator, nothing is below it"
    alike = [path for path in paths if path in classes and _above(path) in there and _has_class(wrong, classes[path])]
    if alike:
        better = dict.fromkeys(_rewritten(pattern, furthest, _named(path, pattern, led)) for path in alike)
        return f"{wrong.text!r} is a class, but Cells are called by their names: write {quoted(better)}"
    nearest = _nearest(wrong.text, known)
    deeper = _deeper(pattern, furthest, names, paths) if led else ""
    if deeper:
        return f"{led!r} is there, and {wrong.text!r} is further down: write {deeper!r}"
    if led:
        return f"{led!r} is there, below it are {_listed(known)}{nearest}"
    if pattern.text.startswith("."):
        return f"at the root are {_listed(known)}{nearest}; without the dot at its beginning it may begin anywhere"
    return f"nothing is called {wrong.text!r}{nearest or ', but there are ' + _listed(known)}"


def _deeper(pattern, place, names, paths):
    """The text of a pattern that has `**` before one of its segments, if that matches anything; else none."""
    many, *_ = pattern.segments
    other = replace(pattern, segments=(*pattern.segments[:place], many, *pattern.segments[place:]))
    is_cell = any(len(other.segments) in other.after(path) for path in paths)
    if not many.many or not is_cell and not _most_alike(other, names):
        return ""
    parts = pattern.text.split(".")
    parts.insert(len(parts) + place - len(pattern.segments), "**")
    return ".".join(parts)


def _has_class(segment, name):
    return segment.fits_operator([Label(name, False)])


def _named(path, pattern, led):
    """What stands in a pattern for a Cell at a path, and for those like it in other layers; behind `led`."""
    name = _last(path)
    if name.isdigit():
        return "*" if led or not _above(path) else f"{_last(_above(path))}.*"
    return name if "." in pattern.text else f"*.{name}"


def _led(pattern, end):
    """The text of a pattern up to one of its segments."""
    start = int(not pattern.text.startswith("."))
    return ".".join(segment.text for segment in pattern.segments[start:end])


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
    shown = ranges_shown({int(name) for name in known if re.fullmatch("[0-9]+", name)})
    shown += [name for name in known if not re.fullmatch("[0-9]+", name)]
    return quoted(shown[:_SHOWN]) + (", …" if len(shown) > _SHOWN else "") if shown else "no names"


def _nearest(name, known):
    """Those of `known` that may have been meant, nearest first."""
    likely = sorted(((_likeness(name, other), other) for other in known), key=lambda entry: -entry[0])
    close = [f"'{other}'" for likeness, other in likely[:_NEAREST] if likeness >= _LIKENESS]
    if not close:
        return ""
    return f" (did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}?)"


def _likeness(name, other):
    """From 0 to 1; `attention` and `self_attn` are alike: a word of one is short for one of the other's."""
    alike = SequenceMatcher(None, plain_name(name), plain_name(other)).ratio()
    words = re.findall("[a-z]+", name.lower())
    short = [
        word
        for word in re.findall("[a-z]+", other.lower())
        if any(_is_short_for(*sorted((word, given), key=len)) for given in words)
    ]
    return max(alike, *(0.5 + 0.5 * len(word) / len(other) for word in short), 0)


def _is_short_for(short, word):
    letters = iter(word)
    return len(short) > 2 and short[0] == word[0] and all(letter in letters for letter in short)
