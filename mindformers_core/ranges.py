"""Ranges of numbers, as data beside the fields of a dataclass, and their errors. Pure Python."""

from dataclasses import field, fields

__all__ = ["bounded", "check_range", "check_ranges"]

_WORDS = {"at_least": "at least", "above": "greater than", "at_most": "at most", "below": "below"}
_HOLDS = {
    "at_least": lambda value, limit: value >= limit,
    "above": lambda value, limit: value > limit,
    "at_most": lambda value, limit: value <= limit,
    "below": lambda value, limit: value < limit,
}
_LONGEST = 40  # characters of a number that are shown


def bounded(default, at_least=None, at_most=None, above=None, below=None):
    """A dataclass field with a range, an end of two kinds on either side; of a tuple, the range of each entry."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    given = {kind: limit for kind, limit in limits.items() if limit is not None}
    assert len(given) == 2, given
    return field(default=default, metadata=given)


def check_ranges(section):
    """`check_range` for each field of a dataclass object."""
    for entry in fields(section):
        check_range(getattr(section, entry.name), entry.metadata, entry.name)


def check_range(value, limits, path):
    """Raise `ValueError` unless `value`, None, or each entry of a tuple, is in the range; inf and nan are in none.

    Args:
        value: what was given.
        limits: those of `bounded`; other entries are left alone, and without any all is allowed.
        path: the key, for the error.
    """
    limits = {kind: limit for kind, limit in limits.items() if kind in _HOLDS}
    if isinstance(value, tuple):
        for index, entry in enumerate(value):
            check_range(entry, limits, f"{path}[{index}]")
    elif value is not None and not all(_HOLDS[kind](value, limit) for kind, limit in limits.items()):
        allowed = " and ".join(f"{_WORDS[kind]} {limit}" for kind, limit in limits.items())
        raise ValueError(f"{path}: {_shown(value)} should be {allowed}")


def _shown(value):
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} digits)"
