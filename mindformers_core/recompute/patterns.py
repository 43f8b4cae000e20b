"""Patterns that select Cells and operators of a program by their names. Pure Python.

A pattern is a sequence of segments separated by dots: one segment for each Cell of a path and, for an operator, a last
one for its name: `layers.0-7.mlp.SiLU`. A pattern may begin anywhere in a path; a leading dot anchors it at the root.

    name        with wildcards: `*` for any characters, `?` for one: `*_proj`
    0,3,5-7     numbers of Cells in a list
    *           one segment; as the first segment also none: `*.cast` is a cast in any Cell and in the root
    **          any number of segments, including none
    name[0-2]   as the last segment: the first three of the operators with equal names in one call of a Cell

Cells and variables have their names from the code; for operators, case, underscores and the suffixes Ext, View and
ExtView are ignored. All numbers must exist: `layers.0-7.mlp` of 4 layers is an error, as is an unknown name.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from mindformers_core.hints import nearest
from mindformers_core.program.name_ranges import quoted, ranges_shown
from mindformers_core.program.operator_names import plain_name
from mindformers_core.ranges import parse_ranges
from mindformers_core.scopes import errors_at

_ALLOWED = (
    "a pattern is names with the wildcards * and ?, numbers (3 or 0-7 or 0,3,5-7), * for one segment or ** for any "
    "number of them, with dots between; its last name may have an index: MatMul[1]; it is no regular "
    "expression: docs/recompute.md"
)
_SIGNS = re.compile(r"[\\^$|(){}]|^\.\*|\.\+")  # of regular expressions, in no pattern that could match
_SHOWN = 5  # names in an error


@dataclass(frozen=True)
class Segment:
    """One segment of a pattern.

    Attributes:
        text: the segment as written.
        name: the name, with wildcards; None for numbers of Cells in a list.
        numbers: the numbers, or those in brackets behind a name; None for a plain name.
    """

    text: str
    name: str | None
    numbers: tuple | None = None

    def fits(self, part):
        """Whether the segment matches one Cell of a path, by its name, or an operator, by its `Label`s."""
        if not isinstance(part, str):
            return any(self.fits_label(each) for each in part if self.numbers is None or each.number in self.numbers)
        if self.name is None:
            return bool(re.fullmatch("[0-9]+", part)) and int(part) in self.numbers
        return self.numbers is None and fnmatchcase(part, self.name)

    def fits_label(self, label):
        """Whether the name, without an index, matches a `Label`."""
        if self.name is None:
            return False
        return fnmatchcase(label.plain, self.name if label.variable else plain_name(self.name))


@dataclass(frozen=True)
class Pattern:
    """A checked pattern.

    Attributes:
        text: the pattern as written.
        segments: its `Segment`s; the first is `**` unless it begins at the root.
    """

    text: str
    segments: tuple

    def after(self, parts, reached=(0,)):
        """Lengths of the segment prefixes that match a path (a set); a full match includes all segments.

        Args:
            parts: names of Cells, and perhaps the `Label`s of an operator as the last part.
            reached: the result for the path in front of `parts`.
        """
        reached = self._passing(reached)
        for part in parts:
            ahead = [(place, self.segments[place]) for place in reached if place < len(self.segments)]
            reached = self._passing(place + (each.name != "**") for place, each in ahead if each.fits(part))
        return reached

    def _passing(self, reached):
        """The lengths, and the length after each following `**`, which also matches no segment."""
        reached = set(reached)
        for place, segment in enumerate(self.segments):
            if place in reached and segment.name == "**":
                reached.add(place + 1)
        return reached


def parse_pattern(text, where):
    """The `Pattern` of a text.

    Args:
        text: the pattern.
        where: key of the setting that holds the pattern, for errors: `"recompute.select[1]"`.

    Raises:
        TypeError: `text` is no string.
        ValueError: `text` is no pattern; the error shows the wrong part and the allowed forms.
    """
    if not isinstance(text, str):
        raise TypeError(f"{where}: {text!r} should be a pattern, a text as 'layers.0-7.mlp': {_ALLOWED}")
    if not text.strip():
        raise ValueError(f"{where}: {text!r} is an empty pattern: it should name a Cell or an operator; {_ALLOWED}")
    parts = text.removeprefix(".").split(".")
    with errors_at(f"{where}: {text!r}: ", f"; {_ALLOWED}"):
        segments = [_segment(part, place, place == len(parts)) for place, part in enumerate(parts, 1)]
    if not text.startswith("."):
        segments = [Segment("**", "**"), *segments[segments[0].text == "*" and len(segments) > 1 :]]
    return Pattern(text, tuple(segments))


class Found(NamedTuple):
    """Summary of a pattern's match in one program, for error texts and for other pipeline stages: plain data.

    Attributes:
        matched: whether the pattern selects anything.
        reached: number of leading segments that match the beginning of some path.
        below: names of Cells and operators below these paths.
        numbers: pairs of the position of a segment of numbers, or with an index, and the numbers that exist there: of
            the Cells beside the selected ones, and of such operators in the call of a Cell that has most of them.
    """

    matched: bool
    reached: int
    below: list
    numbers: list


class Match(NamedTuple):
    """Selection of a pattern in a program: all Cells with a matching path or, without any, all matching operators.

    Attributes:
        cells: keys of calls of Cells, in the order of the calls.
        operators: keys of operators, in the order of execution.
        found: the summary as a `Found`.
    """

    cells: tuple
    operators: tuple
    found: Found | None = None


def match(pattern, names, cells):
    """The `Match` of a pattern.

    Args:
        names: the `OperatorName`s of a program.
        cells: `(key, path)` of its Cells, from `called_cells`; keys are distinct.
    """
    names, cells = [(_parts(name.path), name) for name in names], [(key, _parts(path)) for key, path in cells]
    reached, end = {(): pattern.after(())}, len(pattern.segments)
    for path in _beginnings(path for _, path in cells):  # a list of Cells is never called, but is the path of its Cells
        reached[path] = pattern.after(path[-1:], reached[path[:-1]])
    selected = {key: path for key, path in cells if end in reached[path]}
    fitting = [] if selected else [each for each in names if end in pattern.after([each[1].labels], reached[each[0]])]
    operators = {name.place.key: path for path, name in fitting}
    furthest = max(set().union(*reached.values()))
    there = {path for path, places in reached.items() if furthest in places}
    below = dict.fromkeys(path[-1] for path in reached if path and path[:-1] in there)
    labels = [name.labels for path, name in names if path in there]
    below |= {label.name: None for each in labels for label in each if label is each[0] or label.variable}
    numbers = _numbers(pattern, names, reached, {*selected.values(), *operators.values()})
    return Match((*selected,), (*operators,), Found(bool(selected or operators), furthest, list(below), numbers))


def _numbers(pattern, names, reached, chosen):
    """`numbers` of a `Found`; `chosen`: paths of the selected Cells, and of those with selected operators."""
    found, on_the_way = [], _beginnings(chosen)
    for place, segment in enumerate(pattern.segments):
        if segment.name is None:
            lists = {path[:-1] for path in on_the_way if place + 1 in reached[path]}
            beside = {path[-1] for path in reached if path and path[:-1] in lists}
            found.append((place, sorted(int(number) for number in beside if number.isdigit())))
        elif segment.numbers is not None:
            labels = [label for path, name in names if place in reached[path] for label in name.labels]
            found.append((place, list(range(max((e.count for e in labels if segment.fits_label(e)), default=0)))))
    return found


def check_found(where, pattern, found):
    """Raise `ValueError` where a pattern, or a number in it, matches nothing; the text lists existing names.

    Args:
        where: key of the setting that holds the pattern.
        found: a `Found` for each program in which the pattern may match, such as of all stages of a pipeline.
    """
    is_there, there, missing = any(each.matched for each in found), "", ""
    for place, segment in enumerate(pattern.segments):
        known = {number for each in found for number in dict(each.numbers).get(place, ())}
        lacking = {*(segment.numbers or ())} - known
        if known and lacking:
            missing = f", not {quoted(ranges_shown(lacking))}"
            there = f"{_shown_until(pattern, place)} are {quoted(ranges_shown(known))}"
            if segment.name is not None:
                there = f"a call of a Cell has {len(known)} of {segment.name!r} at most"
            break
    hint = "; patterns are no regular expressions: docs/recompute.md" if _SIGNS.search(pattern.text) else ""
    nothing = f"matches no Cell or operator: {there or what_is_there(pattern, found)}{hint}"
    if missing or not is_there:
        partly = f"is only partly there: {there}{missing}"
        raise ValueError(f"{where}: {pattern.text!r} {partly if is_there else nothing}")


def what_is_there(pattern, found):
    """Existing names after the longest matching prefix of an unmatched pattern, with the nearest one."""
    furthest = max(each.reached for each in found)
    below = dict.fromkeys(name for each in found if each.reached == furthest for name in each.below)
    wanted = pattern.segments[furthest].text if furthest < len(pattern.segments) else ""
    shown = ranges_shown({int(name) for name in below if name.isdecimal()})
    shown = quoted([*shown, *(name for name in below if not name.isdecimal())], _SHOWN) or "no names"
    return f"{_shown_until(pattern, furthest)} are {shown}{nearest(wanted, below)}"


def _shown_until(pattern, end):
    """The location that the segments up to `end` match, as text."""
    led = ".".join(segment.text for segment in pattern.segments[int(not pattern.text.startswith(".")) : end])
    return f"below {led!r}" if led else "at the root" if pattern.text.startswith(".") else "there"


def _parts(path):
    return tuple(path.split(".")) if path else ()


def _beginnings(paths):
    """The paths of `a.b`, which are `a` and `a.b`, and of others, without repetitions: shorter ones first."""
    return dict.fromkeys(path[: end + 1] for path in paths for end in range(len(path)))


def _segment(part, place, is_last):
    """The `Segment` at position `place` (from 1); a faulty one raises `ValueError` with the reason."""
    found = re.fullmatch(r"([^][]+)(?:\[([^][]+)\])?", part)
    name, index = found.groups() if found else (part, None)
    is_number = re.fullmatch("[0-9,-]+", name)
    wrong = None if is_number else re.search(r"[\s,/]", name)
    faults = [
        (not part, f"segment {place} is empty"),
        (not found, f"the brackets in {part!r} are not a name with an index behind it"),
        (
            index and not is_last,
            f"{part!r} has an index, which only an operator at the end has: a Cell in a list is {name}.{index}",
        ),
        (index and (name == "**" or is_number), f"{name!r} in {part!r} is not the name of an operator"),
        ("**" in name and name != "**", f"** in {name!r} is not a segment of its own: within a name, write one *"),
        (wrong, f"{wrong and wrong[0]!r} in {name!r} is not part of a name"),
    ]
    for is_faulty, reason in faults:
        if is_faulty:
            raise ValueError(reason)
    return Segment(part, None if is_number else name, parse_ranges(index or part) if index or is_number else None)
