"""Patterns that select Cells and operators of a program by their names. Pure Python.

A pattern is made of segments with dots between, one for each Cell on the way and, where it names an operator, one for
that: `layers.0-7.mlp.SiLU`. It may begin anywhere in a path; one that starts with a dot begins at the root.

    name        with wildcards: `*` for any characters, `?` for one: `*_proj`
    0,3,5-7     numbers of Cells in a list
    *           one segment; at the beginning of others also none: `*.cast` is a cast in any Cell and in the root
    **          any number of segments, also none
    name[0-2]   as the last segment: of the operators alike in one call of a Cell the first three

Cells and variables are called as they are in the code; of operators, case, underscores and the suffixes Ext, View and
ExtView don't matter. All numbers have to be there: `layers.0-7.mlp` of 4 layers is an error, as is a name that isn't.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from mindformers_core.hints import nearest
from mindformers_core.program.name_ranges import quoted, ranges_shown
from mindformers_core.program.operator_names import plain_name
from mindformers_core.ranges import parse_ranges

__all__ = ["Found", "Match", "Pattern", "Segment", "check_found", "match", "parse_pattern", "what_is_there"]

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
        text: as written.
        name: with wildcards; None for numbers.
        numbers: `(first, last)` ranges, for Cells in a list; None for a name.
        indices: the ranges in brackets; None without brackets.
    """

    text: str
    name: str | None
    numbers: tuple | None = None
    indices: tuple | None = None

    @property
    def many(self):
        """Whether it stands for any number of segments."""
        return self.name == "**"

    def fits_cell(self, part):
        """Whether it stands for one part of a Cell's path."""
        if self.numbers is not None:
            return bool(re.fullmatch("[0-9]+", part)) and _is_in(int(part), self.numbers)
        return self.indices is None and bool(self._exact.fullmatch(part))

    def fits_operator(self, labels):
        """Whether it stands for an operator with these `Label`s."""
        return any(self._fits_label(label) for label in labels)

    def _fits_label(self, label):
        if self.numbers is not None or not (self.indices is None or _is_in(label.number, self.indices)):
            return False
        return bool((self._exact if label.variable else self._plain).fullmatch(label.plain))

    @cached_property
    def _exact(self):
        return _expression(self.name)

    @cached_property
    def _plain(self):
        return _expression(plain_name(self.name))


@dataclass(frozen=True)
class Pattern:
    """A pattern, checked.

    Attributes:
        text: as written.
        where: where it was given, as `"recompute.select[1]"`.
        segments: its `Segment`s; the first is `**` unless it begins at the root.
    """

    text: str
    where: str
    segments: tuple

    def after(self, path):
        """How many segments the path of a Cell may be (a set): all of them where the pattern matches the Cell."""
        reached = self._passing({0})
        for part in path.split(".") if path else ():
            reached = self._next(reached, lambda segment, part=part: segment.fits_cell(part))
        return reached

    def matches_operator(self, reached, labels):
        """Whether it matches an operator with these labels in a Cell, given what `after` says of the Cell's path."""
        return len(self.segments) in self._next(reached, lambda segment: segment.fits_operator(labels))

    def _next(self, reached, fits):
        ahead = [(place, self.segments[place]) for place in reached if place < len(self.segments)]
        stay = {place for place, segment in ahead if segment.many}
        return self._passing(stay | {place + 1 for place, segment in ahead if not segment.many and fits(segment)})

    def _passing(self, reached):
        """With the places behind every `**`, which may stand for nothing."""
        reached = set(reached)
        for place, segment in enumerate(self.segments):
            if place in reached and segment.many:
                reached.add(place + 1)
        return reached


def parse_pattern(text, where):
    """The `Pattern` of a text.

    Args:
        text: the pattern.
        where: where it was given, for errors: `"recompute.select[1]"`.

    Raises:
        TypeError: `text` is no string.
        ValueError: it is no pattern; the error shows the part that is wrong and what is allowed.
    """
    if not isinstance(text, str):
        raise TypeError(f"{where}: {text!r} should be a text, as 'layers.*.mlp': {_ALLOWED}")
    try:
        if not text.strip():
            raise ValueError("an empty pattern")
        rooted = text.startswith(".")
        parts = text[rooted:].split(".")
        segments = [_segment(part, place, len(parts)) for place, part in enumerate(parts, 1)]
    except ValueError as error:
        raise ValueError(f"{where}: {text!r}: {error}; {_ALLOWED}") from None
    if not rooted:
        begins_anywhere = segments[0].name == "*" and segments[0].indices is None and len(segments) > 1
        segments = [Segment("**", "**"), *segments[begins_anywhere:]]
    return Pattern(text, where, tuple(segments))


class Found(NamedTuple):
    """What a pattern found in one program, for the error and for the stages of a pipeline: plain data.

    Attributes:
        cells, operators: whether it selects Cells, or operators.
        reached: number of its segments that lead somewhere.
        below: names of what is there, where it leads no further.
        numbers: pairs of the place of a segment of numbers and the numbers that are there.
        alike: for an index, how many such operators a call of a Cell has at most.
    """

    cells: bool
    operators: bool
    reached: int
    below: list
    numbers: list
    alike: int


@dataclass(frozen=True)
class Match:
    """What a pattern selects in a program: all Cells that it matches, or, if it matches none, all operators.

    Attributes:
        pattern: the `Pattern`.
        cells: keys of calls of Cells, in the order of the calls.
        operators: keys of operators, in the order of execution.
        found: the same as `Found`.
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
        cells: its Cells, as `called_cells` gives them: `(key, path)`; no two have the same key.
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
    """Raise `ValueError` where a pattern, or a number in it, matches nothing; names what is there instead.

    Args:
        pattern: the `Pattern`.
        found: a `Found` of every program in which it may match, such as of all stages of a pipeline.
    """
    problem = _problem(pattern, found)
    if problem:
        raise ValueError(f"{pattern.where}: {pattern.text!r} {problem}")


def _problem(pattern, found):
    """What is wrong with a pattern, as the end of a sentence; nothing where it is right."""
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
    """The names where a pattern that matches nothing leads no further, the nearest one among them."""
    furthest = max(each.reached for each in found)
    below = dict.fromkeys(name for each in found if each.reached == furthest for name in each.below)
    wanted = pattern.segments[furthest].text if furthest < len(pattern.segments) else ""
    return f"{_shown_until(pattern, furthest)} are {_listed(below)}{nearest(wanted, below)}"


def _numbers(pattern, reached, chosen):
    """The place of every segment of numbers, with those of the Cells beside the ones that lead to the `chosen`."""
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
    """Of a pattern with an index, how many operators a call of a Cell has at most that it matches but for the index."""
    *before, last = pattern.segments
    if last.indices is None:
        return 0
    pattern = replace(pattern, segments=(*before, replace(last, text=last.name, indices=None)))
    reached = {path: pattern.after(path) for path in {name.path for name in names}}
    labels = (label for name in names for label in name.labels if pattern.matches_operator(reached[name.path], [label]))
    return max((label.count for label in labels), default=0)


def _missing(ranges, there):
    """The numbers of some ranges that are not there, as ranges in quotes; nothing where all are."""
    numbers = {number for first, last in ranges for number in range(first, last + 1)}
    return quoted(ranges_shown(numbers - set(there)))


def _shown_until(pattern, end):
    """Where a pattern leads by its segments up to `end`."""
    led = ".".join(segment.text for segment in pattern.segments[int(not pattern.text.startswith(".")) : end])
    return f"below {led!r}" if led else "at the root" if pattern.text.startswith(".") else "there"


def _beginnings(cells):
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


def _listed(known):
    """The first of some names; all numbers among them as ranges."""
    shown = ranges_shown({int(name) for name in known if name.isdecimal()})
    shown += [name for name in known if not name.isdecimal()]
    return quoted(shown[:_SHOWN]) + (", …" if len(shown) > _SHOWN else "") if shown else "no names"


def _is_in(number, ranges):
    return any(first <= number <= last for first, last in ranges)


def _expression(name):
    """A compiled regular expression for a name with wildcards."""
    wildcards = {"*": ".*", "?": "."}
    return re.compile("".join(wildcards.get(letter, re.escape(letter)) for letter in name), re.DOTALL)


def _segment(part, place, count):
    """The `Segment` that is the `place`-th (from 1) of `count`; `ValueError` says what is wrong with it."""
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
