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
from dataclasses import dataclass, replace
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
        name: the name, with wildcards; None for numbers.
        numbers: `(first, last)` ranges, for Cells in a list; None for a name.
        indices: the ranges in brackets; None without brackets.
    """

    text: str
    name: str | None
    numbers: tuple | None = None
    indices: tuple | None = None

    @property
    def many(self):
        """Whether the segment matches any number of parts of a path."""
        return self.name == "**"

    def fits_cell(self, part):
        """Whether the segment matches one part of a Cell's path."""
        if self.numbers is not None:
            return bool(re.fullmatch("[0-9]+", part)) and _is_in(int(part), self.numbers)
        return self.indices is None and fnmatchcase(part, self.name)

    def fits_operator(self, labels):
        """Whether the segment matches an operator with these `Label`s."""
        indexed = [each for each in labels if self.indices is None or _is_in(each.number, self.indices)]
        return self.numbers is None and any(
            fnmatchcase(label.plain, self.name if label.variable else plain_name(self.name)) for label in indexed
        )


@dataclass(frozen=True)
class Pattern:
    """A checked pattern.

    Attributes:
        text: the pattern as written.
        where: key of the setting that holds the pattern, as `"recompute.select[1]"`.
        segments: its `Segment`s; the first is `**` unless it begins at the root.
    """

    text: str
    where: str
    segments: tuple

    def after(self, path):
        """Lengths of the segment prefixes that match the path of a Cell (a set); a full match includes all segments."""
        reached = self._passing({0})
        for part in path.split(".") if path else ():
            reached = self._next(reached, lambda segment, part=part: segment.fits_cell(part))
        return reached

    def matches_operator(self, reached, labels):
        """Whether the pattern matches an operator with these labels; `reached`: `after` of its Cell's path."""
        return len(self.segments) in self._next(reached, lambda segment: segment.fits_operator(labels))

    def _next(self, reached, fits):
        ahead = [(place, self.segments[place]) for place in reached if place < len(self.segments)]
        stay = {place for place, segment in ahead if segment.many}
        return self._passing(stay | {place + 1 for place, segment in ahead if not segment.many and fits(segment)})

    def _passing(self, reached):
        """The lengths, and the length after each following `**`, which also matches no segment."""
        reached = set(reached)
        for place, segment in enumerate(self.segments):
            if place in reached and segment.many:
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
        raise TypeError(f"{where}: {text!r} should be a text, as 'layers.*.mlp': {_ALLOWED}")
    with errors_at(f"{where}: {text!r}: ", f"; {_ALLOWED}"):
        if not text.strip():
            raise ValueError("an empty pattern")
        rooted = text.startswith(".")
        parts = text[rooted:].split(".")
        segments = [_segment(part, place, len(parts)) for place, part in enumerate(parts, 1)]
    if not rooted:
        begins_anywhere = segments[0].name == "*" and segments[0].indices is None and len(segments) > 1
        segments = [Segment("**", "**"), *segments[begins_anywhere:]]
    return Pattern(text, where, tuple(segments))


class Found(NamedTuple):
    """Summary of a pattern's match in one program, for error texts and for other pipeline stages: plain data.

    Attributes:
        cells, operators: whether the pattern selects Cells, or operators.
        reached: number of leading segments that match the beginning of some path.
        below: names of Cells and operators below these paths.
        numbers: pairs of the position of a segment of numbers and the numbers that exist there.
        alike: for a pattern with an index, the largest number of such operators in one call of a Cell.
    """

    cells: bool
    operators: bool
    reached: int
    below: list
    numbers: list
    alike: int


@dataclass(frozen=True)
class Match:
    """Selection of a pattern in a program: all Cells with a matching path or, without any, all matching operators.

    Attributes:
        pattern: the `Pattern`.
        cells: keys of calls of Cells, in the order of the calls.
        operators: keys of operators, in the order of execution.
        found: the summary as a `Found`.
    """

    pattern: Pattern
    cells: tuple
    operators: tuple
    found: Found


def match(pattern, names, cells):
    """The `Match` of a pattern.

    Args:
        pattern: the `Pattern`.
        names: the `OperatorName`s of a program.
        cells: `(key, path)` of its Cells, from `called_cells`; keys are distinct.
    """
    reached = {path: pattern.after(path) for path in _beginnings(cells)}
    selected = tuple(key for key, path in cells if len(pattern.segments) in reached[path])
    fitting = [name for name in names if pattern.matches_operator(reached[name.path], name.labels)]
    operators = () if selected else tuple(name.place.key for name in fitting)
    furthest = max(place for places in reached.values() for place in places)
    there = {path for path, places in reached.items() if furthest in places}
    below = dict.fromkeys(_last(path) for path in reached if path and _above(path) in there)
    labels = [name.labels for name in names if name.path in there]
    below |= {label.name: None for each in labels for label in each if label is each[0] or label.variable}
    keys = {*selected, *operators}
    chosen = {path for key, path in cells if key in keys} | {n.path for n in names if n.place.key in keys}
    numbers, alike = _numbers(pattern, reached, chosen), _alike(pattern, names)
    found = Found(bool(selected), bool(operators), furthest, list(below), numbers, alike)
    return Match(pattern, selected, operators, found)


def check_found(pattern, found):
    """Raise `ValueError` where a pattern, or a number in it, matches nothing; the text lists existing names.

    Args:
        pattern: the `Pattern`.
        found: a `Found` for each program in which the pattern may match, such as of all stages of a pipeline.
    """
    problem = _problem(pattern, found)
    if problem:
        raise ValueError(f"{pattern.where}: {pattern.text!r} {problem}")


def _problem(pattern, found):
    """The fault of a pattern, as the end of a sentence; empty for a correct one."""
    most, last = max(each.alike for each in found), pattern.segments[-1]
    has = f"a call of a Cell has {most} of {last.name!r} at most"
    if not any(each.cells or each.operators for each in found):
        hint = "; patterns are no regular expressions: docs/recompute.md" if _SIGNS.search(pattern.text) else ""
        if most:
            return f"matches no Cell or operator: {has}{hint}"
        return f"matches no Cell or operator: {what_is_there(pattern, found)}{hint}"
    for place, segment in enumerate(pattern.segments):
        known = {number for each in found for number in dict(each.numbers).get(place, ())}
        if segment.numbers is not None and (missing := _missing(segment.numbers, known)):
            where = _shown_until(pattern, place)
            return f"is only partly there: {where} are {quoted(ranges_shown(known))}, not {missing}"
    missing = _missing(last.indices or (), range(most))
    return f"is only partly there: {has}, not {missing}" if missing else ""


def what_is_there(pattern, found):
    """Existing names after the longest matching prefix of an unmatched pattern, with the nearest one."""
    furthest = max(each.reached for each in found)
    below = dict.fromkeys(name for each in found if each.reached == furthest for name in each.below)
    wanted = pattern.segments[furthest].text if furthest < len(pattern.segments) else ""
    return f"{_shown_until(pattern, furthest)} are {_listed(below)}{nearest(wanted, below)}"


def _numbers(pattern, reached, chosen):
    """Position of each segment of numbers, with the numbers of all sibling Cells on the paths of `chosen`."""
    found = []
    for place, segment in enumerate(pattern.segments):
        if segment.numbers is None:
            continue
        head = replace(pattern, segments=pattern.segments[: place + 1])
        leading = [path for path in reached if any(f"{each}.".startswith(f"{path}.") for each in chosen)]
        used = {_above(path) for path in leading if place + 1 in head.after(path)}
        beside = {_last(path) for path in reached if _above(path) in used}
        found.append((place, sorted(int(number) for number in beside if number.isdigit())))
    return found


def _alike(pattern, names):
    """Largest number of operators in one call of a Cell that match the pattern without its index."""
    *before, last = pattern.segments
    if last.indices is None:
        return 0
    pattern = replace(pattern, segments=(*before, replace(last, text=last.name, indices=None)))
    reached = {path: pattern.after(path) for path in {name.path for name in names}}
    labels = (label for name in names for label in name.labels if pattern.matches_operator(reached[name.path], [label]))
    return max((label.count for label in labels), default=0)


def _missing(ranges, there):
    """The missing numbers of some ranges, as ranges in quotes; empty if all exist."""
    numbers = {number for first, last in ranges for number in range(first, last + 1)}
    return quoted(ranges_shown(numbers - set(there)))


def _shown_until(pattern, end):
    """The location that the segments up to `end` match, as text."""
    led = ".".join(segment.text for segment in pattern.segments[int(not pattern.text.startswith(".")) : end])
    return f"below {led!r}" if led else "at the root" if pattern.text.startswith(".") else "there"


def _beginnings(cells):
    """Prefixes of `a.b`: the empty one, `a` and `a.b`; a list of Cells is never called and exists as a prefix only."""
    found = {"": None}
    for _, path in cells:
        parts = path.split(".") if path else []
        found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return list(found)


def _above(path):
    return path.rpartition(".")[0]


def _last(path):
    return path.rpartition(".")[2]


def _listed(known):
    """The first few names; numbers among them as ranges."""
    shown = ranges_shown({int(name) for name in known if name.isdecimal()})
    shown += [name for name in known if not name.isdecimal()]
    return quoted(shown[:_SHOWN]) + (", …" if len(shown) > _SHOWN else "") if shown else "no names"


def _is_in(number, ranges):
    return any(first <= number <= last for first, last in ranges)


def _segment(part, place, count):
    """The `Segment` at position `place` (from 1) of `count`; a faulty one raises `ValueError` with the reason."""
    if not part:
        raise ValueError(f"segment {place} is empty")
    name, bracket, rest = part.partition("[")
    if bracket or "]" in part:
        return _indexed(part, name, rest, place == count)
    if re.fullmatch("[0-9,-]+", part):
        return Segment(part, None, parse_ranges(part))
    _check_name(part)
    return Segment(part, part)


def _indexed(part, name, rest, is_last):
    if not name or "]" in name or not rest or rest.find("]") != len(rest) - 1:
        raise ValueError(f"the brackets in {part!r} are not a name with an index behind it")
    if not is_last:
        raise ValueError(
            f"{part!r} has an index, which only an operator at the end has: a Cell in a list is {name}.{rest[:-1]}"
        )
    if name == "**" or re.fullmatch("[0-9,-]+", name):
        raise ValueError(f"{name!r} in {part!r} is not the name of an operator")
    _check_name(name)
    return Segment(part, name, None, parse_ranges(rest[:-1]))


def _check_name(name):
    if "**" in name and name != "**":
        raise ValueError(f"** in {name!r} is not a segment of its own: within a name, write one *")
    wrong = re.search(r"[\s,/]", name)
    if wrong:
        raise ValueError(f"{wrong[0]!r} in {name!r} is not part of a name")
