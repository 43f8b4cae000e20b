"""Texts of errors and reports: the nearest known name, numbers of bytes and of operations. Pure Python."""

import math
from difflib import get_close_matches

__all__ = ["bytes_shown", "first_of", "nearest", "operations_shown"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_POWERS = ("", "k", "M", "G", "T", "P", "E")


def nearest(name, known, likeness=0.5):
    """`" (did you mean 'x'?)"` for the entry of `known` most like `name` (0 to 1: at least `likeness`), or `""`."""
    close = get_close_matches(str(name), [str(entry) for entry in known], n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""


def first_of(entries, most=8):
    """`"0, 1, 2, …"`: the first entries of a list."""
    return ", ".join(map(str, entries[:most])) + ", …" * (len(entries) > most)


def bytes_shown(count):
    """`"1.5 MiB"`; `"0"` for none."""
    if not count:
        return "0"
    unit = next(place for place in range(len(_UNITS)) if count < 1024 ** (place + 1) or place == len(_UNITS) - 1)
    scaled = count / 1024**unit
    return f"{scaled:.0f} {_UNITS[unit]}" if unit == 0 or scaled >= 100 else f"{scaled:.1f} {_UNITS[unit]}"


def operations_shown(count):
    """`"1.5 GFLOP"`; `"0"` for none."""
    if not count:
        return "0"
    unit = min(int(math.log10(count) / 3 + 1e-12), len(_POWERS) - 1)
    scaled = count / 1000**unit
    return f"{scaled:.3g} {_POWERS[unit]}FLOP" if scaled < 100 else f"{scaled:.0f} {_POWERS[unit]}FLOP"
