"""Ranges of numbers, beside the fields of a dataclass or as texts, and their errors. Pure Python."""

import re
from dataclasses import field, fields
from operator import ge, gt, le, lt

_WORDS = {"at_least": "at least", "above": "greater than", "at_most": "at most", "below": "below"}
_HOLDS = {"at_least": ge, "above": gt, "at_most": le, "below": lt}
_PLAIN = {int: (int, "an int"), float: (int | float, "a number"), bool: (bool, "true or false")}
_PLAIN |= {kind | None: (allowed | None, words) for kind, (allowed, words) in _PLAIN.items()}
_LONGEST = 40  # characters of a number that are shown
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?")


def bounded(default, at_least=None, at_most=None, above=None, below=None):
    """A dataclass field with a lower limit, inclusive or not, and an upper one; for a tuple, those of each entry."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    given = {kind: limit for kind, limit in limits.items() if limit is not None}
    assert len(given) == 2, given
    return field(default=default, metadata=given)


def check_fields(section):
    """Check the fields of a dataclass that are numbers, true or false, or None.

    Raises:
        TypeError: a value of another type than its field's; True isn't a number. ValueError: out of its range.
    """
    for entry in fields(section):
        value, (allowed, words) = getattr(section, entry.name), _PLAIN.get(entry.type, (object, ""))
        if not isinstance(value, allowed) or (words.endswith(("int", "number")) and isinstance(value, bool)):
            raise TypeError(f"{entry.name}: expected {words}, not {value!r}")
        check_range(value, entry.metadata, entry.name)


def check_range(value, limits, path):
    """Raise `ValueError` for a number, or an entry of a tuple, out of its range. None and texts are allowed, not NaN.

    Args:
        value: the number, tuple of numbers, text or None; of any type where there are no limits.
        limits: metadata of a field that `bounded` made; other entries are ignored.
        path: the key, for the error.
    """
    limits = {kind: limit for kind, limit in limits.items() if kind in _HOLDS}
    if isinstance(value, tuple):
        for index, entry in enumerate(value):
            check_range(entry, limits, f"{path}[{index}]")
    elif not isinstance(value, (str, type(None))) and not all(
        _HOLDS[kind](value, limit) for kind, limit in limits.items()
    ):
        allowed = " and ".join(f"{_WORDS[kind]} {limit}" for kind, limit in limits.items())
        raise ValueError(f"{path}: {_shown(value)} should be {allowed}")


def _shown(value):
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} digits)"


def parse_ranges(text):
    """The numbers of `"0,3,5-7"`, both ends of a range included: `(0, 3, 5, 6, 7)`.

    Raises:
        ValueError: another text, or a number of more than five digits: its range could fill the memory.
    """
    numbers = []
    for entry in text.split(","):
        found = _RANGE.fullmatch(entry.strip())
        if not found:
            raise ValueError(f"'{_shown(entry)}' is neither a number from 0 to 99999 nor a range")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {entry.strip()!r} ends before it begins: write {last}-{first}")
        numbers += range(first, last + 1)
    return tuple(numbers)
