"""What there is in place of what a pattern asks for in vain, for the error. Pure Python."""

import re
from dataclasses import replace
from difflib import SequenceMatcher

from mindformers_core.recompute.operator_names import plain_name

__all__ = ["what_is_there"]

_SHOWN = 5
_LIKENESS = 0.6  # of 1; those less like are no help
_NEAREST = 3


def what_is_there(pattern, names, cells):
    """The end of the sentence that a pattern matches no …, with the nearest names.

    Args:
        pattern: a `Pattern` that matches nothing.
        names, cells: see `select`.
    """
    *before, last = pattern.segments
    if last.indices is not None:
        pattern = replace(pattern, segments=(*before, replace(last, text=last.name, indices=None)))
        reached = {path: pattern.after(path) for _, path in cells}
        alike = [
            label.count
            for name in names
            for label in name.labels
            if pattern.matches_operator(reached[name.path], [label])
        ]
        if alike:
            most = max(alike)
            return f"operator: a call of a Cell has {most} of {last.name!r} at most, the last one is [{most - 1}]"
        if any(len(pattern.segments) in places for places in reached.values()):
            return f"operator: {last.name!r} is a Cell, and an index counts operators; a Cell in a list is name.0"
    return "Cell or operator: " + _nearest_names(pattern, names, cells)


def _nearest_names(pattern, names, cells):
    """How far a pattern leads, and the names that can stand there."""
    paths = dict.fromkeys(beginning for path in ["", *(path for _, path in cells)] for beginning in _beginnings(path))
    reached = {path: pattern.after(path) for path in paths}
    furthest = max(place for places in reached.values() for place in places)
    there = {path for path in paths if furthest in reached[path]}
    labels = [name.labels for name in names if name.path in there]
    known = dict.fromkeys(
        part for above, _, part in (path.rpartition(".") for path in paths) if part and above in there
    )
    known |= dict.fromkeys(label.name for each in labels for label in each if label is each[0] or label.variable)
    texts = [segment.text for segment in pattern.segments]
    start = int(not pattern.text.startswith("."))
    led = ".".join(texts[start:furthest])
    if furthest == len(texts):
        return f"{led!r} holds Cells but is itself never called: write '{led}.*'; below it are {_listed(known)}"
    wrong = pattern.segments[furthest]
    if any(wrong.fits_operator(each) for each in labels):
        return f"{'.'.join(texts[start : furthest + 1])!r} is an operator, nothing is below it"
    nearest = _nearest(wrong.text, known)
    if led:
        return f"{led!r} is there, below it are {_listed(known)}{nearest}"
    if not start:
        return f"at the root are {_listed(known)}{nearest}; without the dot at its beginning it may begin anywhere"
    return f"nothing is called {wrong.text!r}{nearest or ', but there are ' + _listed(known)}"


def _beginnings(path):
    """Of `a.b`: nothing, `a` and `a.b`; a list of Cells is never called and only there as a beginning."""
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def _listed(known):
    """The first of some names; all numbers among them as ranges."""
    numbers = sorted(int(name) for name in known if re.fullmatch("[0-9]+", name))
    ranges = []
    for number in numbers:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == number - 1 else number
        ranges.append((first, number))
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in ranges]
    shown += [name for name in known if not re.fullmatch("[0-9]+", name)]
    more = ", …" if len(shown) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in shown[:_SHOWN]) + more if shown else "no names"


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
