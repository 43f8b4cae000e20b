"""Values of single settings, checked: flags, numbers and patterns; an error says what is allowed. Pure Python."""

from numbers import Real

from mindformers_core.ranges import check_range

__all__ = ["check_budget", "check_flag", "check_pattern", "checked_patterns", "checked_prefetch"]


def check_budget(budget, where="recompute.budget"):
    """Raise unless `budget` is a number above 0, and 1 at the most.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of this range.
    """
    allowed = "a number above 0 and at most 1: the part of the saved activations' bytes that may stay (1: all)"
    if isinstance(budget, bool) or not isinstance(budget, Real):
        raise TypeError(f"{where}: {budget!r} ({type(budget).__name__}) has to be {allowed}")
    if not 0 < budget <= 1:
        raise ValueError(f"{where}: {budget!r} has to be {allowed}")


def check_flag(given, where):
    """Raise `TypeError` unless `given` is true or false."""
    if not isinstance(given, bool):
        raise TypeError(f"{where}: {given!r} ({type(given).__name__}) should be true or false")


def checked_prefetch(given, where):
    """How many saved tensors ahead of its use one is copied back: at least 1, else an error."""
    if type(given) is not int:
        raise TypeError(f"{where}: {given!r} ({type(given).__name__}) should be a whole number of tensors")
    check_range(given, {"at_least": 1, "at_most": 10**6}, where)
    return given


def checked_patterns(given, where):
    """One pattern or several, as a tuple; what they mean is checked where Cells are known."""
    if given is None:
        return ()
    entries = [given] if isinstance(given, str) else given
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f"{where}: {given!r} should be a pattern, or a list of patterns, as ['layers.0-7.mlp']")
    for index, pattern in enumerate(entries):
        check_pattern(pattern, where if isinstance(given, str) else f"{where}[{index}]")
    return tuple(entries)


def check_pattern(pattern, where):
    """Raise unless `pattern` is a text with something in it."""
    if not isinstance(pattern, str):
        raise TypeError(f"{where}: {pattern!r} should be a pattern, a text as 'layers.0-7.mlp'")
    if not pattern.strip():
        raise ValueError(f"{where}: {pattern!r} is an empty pattern: it should name a Cell or an operator")
