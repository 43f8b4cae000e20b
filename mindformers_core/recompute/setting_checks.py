"""Values of single settings, checked: flags, numbers and patterns; an error says what would be right. Pure Python."""

import re
from numbers import Real

from mindformers_core.recompute.expression_dicts import patterns_of
from mindformers_core.recompute.layers import are_numbers

__all__ = ["check_budget", "check_flag", "check_pattern", "checked_patterns", "checked_prefetch"]

_FLAGS = {"true": True, "false": False}
_DEFAULT_OPERATORS = "; MindSpore Transformers' default operators are ['*.mlp.Mul', '*.mlp.SiLU'] here"
_SIZE = re.compile(r"[0-9.]+\s*([kmgtp]i?)?b(ytes?)?|[0-9.]+\s*[kmgtp]i?", re.IGNORECASE)


def check_budget(budget, where="recompute.budget"):
    """Raise unless `budget` is a number above 0, and 1 at the most.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of this range.
    """
    allowed = "a number above 0 and at most 1: the part of the saved activations' bytes that may stay (1: all)"
    if isinstance(budget, bool) or not isinstance(budget, Real):
        better = _unquoted(budget, float) or f"; {_as_part(budget)}"
        raise TypeError(f"{where}: {budget!r} ({type(budget).__name__}) has to be {allowed}{better}")
    if not 0 < budget <= 1:
        raise ValueError(f"{where}: {budget!r} has to be {allowed}; {_per_cent(budget)}")


def _as_part(budget):
    """What to write for what is no number."""
    if isinstance(budget, str) and _SIZE.fullmatch(budget.strip()):
        return "it is a part of these bytes, not a size: half of them is 0.5"
    return _per_cent(budget)


def _per_cent(budget):
    """How a percentage is given: the one that is likely to be meant."""
    text = str(budget).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = 0
    likely = number if 2 <= number <= 100 or text.endswith("%") and 0 < number <= 100 else 50
    return f"{likely:g} % is {likely / 100:g}"


def check_flag(given, where):
    """Raise `TypeError` unless `given` is true or false."""
    if not isinstance(given, bool):
        better = _unquoted(given, lambda text: _FLAGS[text.lower()])
        raise TypeError(f"{where}: {given!r} should be true or false{better}")


def checked_prefetch(given, where):
    """How many saved tensors ahead of its use one is copied back: at least 1, else an error."""
    if type(given) is not int:
        raise TypeError(f"{where}: {given!r} should be a whole number of tensors{_unquoted(given, int)}")
    if given < 1:
        raise ValueError(f"{where}: {given} should be at least 1: tensors ahead of the one that is needed")
    return given


def checked_patterns(given, where):
    """One pattern or several, as a tuple; what they mean is checked where Cells are known."""
    if given is None:
        return ()
    entries = [given] if isinstance(given, str) else given
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f"{where}: {given!r} {_in_patterns(given, where)}")
    for index, pattern in enumerate(entries):
        check_pattern(pattern, where if isinstance(given, str) else f"{where}[{index}]")
    return tuple(entries)


def _in_patterns(given, where):
    """How patterns are given, for an error about something else: the end of a sentence."""
    patterns = patterns_of(given) if isinstance(given, dict) else None
    if given is False or patterns == []:
        return "names nothing: leave it out"
    form = "should be a pattern, or a list of patterns"
    if patterns:
        numbers = any(map(are_numbers, given.values()))
        about = "; layers are numbers in the whole model, not how many of each pipeline stage" if numbers else ""
        return f"{form}: write {patterns}{about}"
    layers = "; whole layers are given to full" if isinstance(given, (bool, int)) else ""
    usual = _DEFAULT_OPERATORS if given is True and where == "select" else ""
    return f"{form}, as ['layers.0-7.mlp']{layers}{usual}"


def check_pattern(pattern, where):
    """Raise unless `pattern` is a text with something in it."""
    if not isinstance(pattern, str):
        raise TypeError(f"{where}: {pattern!r} should be a pattern, a text as 'layers.0-7.mlp'")
    if not pattern.strip():
        raise ValueError(f"{where}: {pattern!r} is an empty pattern: it should name a Cell or an operator")


def _unquoted(given, read):
    """What to write in the place of a text that has to be a value: the same, where `read` makes one of it."""
    try:
        return f"; write {given}, without quotes" if isinstance(given, str) and read(given.strip()) is not None else ""
    except (KeyError, ValueError):
        return ""
