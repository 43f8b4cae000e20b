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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mindformers_core.program.operator_names import plain_name
from mindformers_core.recompute.unmatched import what_is_missing, what_is_there

__all__ = ["Pattern", "Segment", "Selection", "parse_pattern", "parse_patterns", "select"]

_ALLOWED = (
    "a pattern is names with the wildcards * and ?, numbers (3 or 0-7 or 0,3,5-7), * for one segment or ** for any "
    "number of them, with dots between; its last name may have an index: MatMul[1]; it is no regular "
    "expression: docs/recompute.md"
)
_SIGNS = re.compile(r"[\\^$|(){}]|^\.\*|\.\+")  # of regular expressions, in no pattern that could match
# five digits: a mistyped end shouldn't make a list that fills the memory
_RANGE = re.compile("([0-9]{1,5})(?:-([0-9]{1,5}))?")


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


@dataclass(frozen=True)
class Selection:
    """What patterns select.

    Attributes:
        cells: keys of calls of Cells, in the order of the calls.
        operators: keys of operators, in the order of execution.
        by_pattern: text of every pattern -> (keys of Cells, keys of operators) that it selects.
    """

    cells: tuple
    operators: tuple
    by_pattern: dict


def parse_pattern(text, where):
    """Read a pattern.

    Args:
        text: the pattern.
        where: where it was given, for errors: `"recompute.select[1]"`.

    Returns:
        The `Pattern`.

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


def parse_patterns(patterns, where):
    """The `Pattern`s of a list of texts, or of `Pattern`s; `where` it stands, in which several are told by number."""
    several = len(patterns) > 1
    return [
        given if isinstance(given, Pattern) else parse_pattern(given, f"{where}[{place}]" if several else where)
        for place, given in enumerate(patterns)
    ]


def select(patterns, names, cells, where="select", required=True):
    """What patterns select: each all Cells that it matches, or, if it matches none, all operators.

    Args:
        patterns: texts, or `Pattern`s.
        names: the `OperatorName`s of a program.
        cells: its Cells, as `called_cells` gives them: `(key, path)`; no two have the same key.
        where: what `patterns` are, for errors: `"recompute.select"`.
        required: whether a pattern, or a number in one, that matches nothing is an error.

    Returns:
        A `Selection`.

    Raises:
        TypeError: a pattern is no string.
        ValueError: one is no pattern, or it, or a number in it, matches nothing; the error names what is there instead.
    """
    if isinstance(patterns, (str, Pattern)) or not isinstance(patterns, Iterable):
        raise TypeError(f"{where}: {patterns!r} should be a list of patterns")
    by_pattern = {}
    for pattern in parse_patterns(list(patterns), where):
        found = by_pattern[pattern.text] = _selected(pattern, names, cells)
        problem = _problem(pattern, found, names, cells) if required else ""
        if problem:
            raise ValueError(f"{pattern.where}: {pattern.text!r} {problem}")
    chosen_cells = {key for keys, _ in by_pattern.values() for key in keys}
    chosen = {key for _, keys in by_pattern.values() for key in keys}
    return Selection(
        tuple(key for key, _ in cells if key in chosen_cells),
        tuple(name.place.key for name in names if name.place.key in chosen),
        by_pattern,
    )


def _problem(pattern, found, names, cells):
    """What is wrong with a pattern that selects `found`, as the end of a sentence; nothing where it is right."""
    if any(found):
        return what_is_missing(pattern, found, names, cells)
    hint = "; patterns are no regular expressions: docs/recompute.md" if _SIGNS.search(pattern.text) else ""
    return f"matches no Cell or operator: {what_is_there(pattern, names, cells)}{hint}"


def _selected(pattern, names, cells):
    """`(keys of Cells, keys of operators)`; one of them is empty."""
    reached = {path: pattern.after(path) for _, path in cells}
    selected = tuple(key for key, path in cells if len(pattern.segments) in reached[path])
    if selected:
        return selected, ()
    fitting = (name for name in names if pattern.matches_operator(reached[name.path], name.labels))
    return (), tuple(name.place.key for name in fitting)


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
        return Segment(part, None, _ranges(part, part))
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
    return Segment(part, name, None, _ranges(rest[:-1], part))


def _check_name(name):
    if "**" in name and name != "**":
        raise ValueError(f"** in {name!r} is not a segment of its own: within a name, write one *")
    wrong = re.search(r"[\s,/]", name)
    if wrong:
        raise ValueError(f"{wrong[0]!r} in {name!r} is not part of a name")


def _ranges(text, part):
    """`0,3,5-7` as pairs `(first, last)`; `part`: the segment that it stands in."""
    ranges = []
    for entry in text.split(","):
        found = _RANGE.fullmatch(entry)
        if not found:
            raise ValueError(f"{entry!r} in {part!r} is neither a number from 0 to 99999 nor a range")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {entry!r} ends before it begins: write {last}-{first}")
        ranges.append((first, last))
    return tuple(ranges)
