"""Texts of errors and reports: what an error says, the nearest known name, numbers of bytes. Pure Python."""

import re
from difflib import get_close_matches
from pathlib import Path

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_RULE = re.compile(r"(?:^|\n)\s*-{20,}\s*")  # between a message of MindSpore and its C++ stack, or around its title
_NO_KERNEL = re.compile(
    r"(?:The kernel (?=\w+ unregistered)|Unsupported op \[|Create kernelmod for op |Not found op )(\w+)"
)


def message_of(error):
    """What an error says, in a sentence: of MindSpore's without the C++ stack, also where it isn't UTF-8."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError) and b"C++ Call Stack" in error.object:
        text = error.object.decode("utf-8", "backslashreplace")
    if "src:meta" in text:
        return "an operator takes sizes or places from the values of a tensor, and a capture has none: give it ints"
    if found := _NO_KERNEL.search(text):
        return (
            f"MindSpore has no kernel of operator '{found[1]}' for this device: write it with operators that have one, "
            "or run it on another device (shard() and explain() run no kernels)"
        )
    parts = _RULE.split(text) if "C++ Call Stack" in text else [text]
    return next(filter(None, map(str.strip, parts)), type(error).__name__)


def nearest(name, known, likeness=0.5):
    """`" (did you mean 'x'?)"` for the entry of `known` most like `name` (0 to 1: at least `likeness`), or `""`."""
    close = get_close_matches(str(name), [str(entry) for entry in known], n=1, cutoff=likeness)
    return f" (did you mean '{close[0]}'?)" if close else ""


def near_multiples(size, count):
    """`"8 or 12"`: what is nearest to a size among those that `count` divides."""
    below = size - size % count
    return f"{below} or {below + count}" if below else str(count)


def first_of(entries, most=8):
    """`"0, 1, 2, …"`: the first entries of a list."""
    return ", ".join(map(str, entries[:most])) + ", …" * (len(entries) > most)


def listed(texts, most, separator="; "):
    """The first of several texts, without repetitions, and how many more there are."""
    texts = list(dict.fromkeys(texts))
    return separator.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def check_loss(loss, where):
    """Raise `ValueError` unless `loss` is the name of a form: `"mean"`, or `"sum"`, with a number of labels."""
    if loss not in ("mean", "sum"):
        raise ValueError(f'{where}(loss={loss!r}): should be "mean" or "sum"')


def install_hint(extra):
    """How to install the packages of one of our extras; the package itself is in no index."""
    return f"pip install -e '{Path(__file__).parents[1]}[{extra}]'"


def any_layer(name):
    """A parameter's path with `*` for the number of a layer."""
    return re.sub(r"\.\d+\.", ".*.", name)


def columns(rows):
    """The lines of a table, for rows of texts."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def bytes_shown(count):
    """`"1.5 MiB"`; `"0"` for none."""
    if not count:
        return "0"
    size, unit = byte_unit(count)
    return f"{count / size:.0f} {unit}" if size == 1 or count / size >= 100 else f"{count / size:.1f} {unit}"


def byte_unit(count):
    """The largest unit that `count` bytes fill, with its size: `(1048576, "MiB")`; bytes themselves for less."""
    return max((1024**place, unit) for place, unit in enumerate(_UNITS) if place == 0 or count >= 1024**place)


def seconds_shown(seconds):
    """`"1.5 ms"`; `"0"` for none."""
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us"))
    return f"{seconds / scale:.3g} {unit}" if seconds else "0"


def rate_shown(rate):
    """Bytes a second, as `"25 GB/s"`."""
    rate /= 1e9
    return f"{rate:.0f} GB/s" if rate >= 100 else f"{rate:.3g} GB/s"
