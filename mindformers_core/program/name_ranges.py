"""Short lists of many operator names: consecutive layers are shown as a range. Pure Python."""

import re
import textwrap
from itertools import groupby

from mindformers_core.grouping import grouped

_WIDTH = 120
_UNBROKEN = {"break_long_words": False, "break_on_hyphens": False}


def layers_together(names):
    """Merge equal names in consecutive layers: `model.layers.0-7.mlp.silu`.

    Args:
        names: of operators, `"model.layers.0.mlp.silu"`; may contain duplicates.

    Returns:
        A list of `(text, places of the merged names)`, in the order of first appearance.
    """
    found = {}  # name without the layer's number -> number -> places
    for place, name in enumerate(names):
        number = re.search(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name)
        parts = (name, "") if number is None else (name[: number.start()], name[number.end() :])
        found.setdefault(parts, {}).setdefault(None if number is None else int(number[0]), []).append(place)
    lines = []
    for (before, after), places in found.items():
        for run in _runs(sorted(places, key=lambda number: -1 if number is None else number)):
            shown = "" if run == [None] else _range_shown(run)
            lines.append((f"{before}{shown}{after}", [place for number in run for place in places[number]]))
    return lines


def cells_together(paths):
    """Paths of Cells, with consecutive layers merged: `model.layers.0-7`, `model.layers.0-7.mlp`."""
    return [text.removesuffix(".") for text, _ in layers_together(f"{path}." for path in paths)]


def names_shown(names):
    """Names of operators as indented lines of at most 120 columns: grouped by Cell, with consecutive layers merged.

    Args:
        names: as of `layers_together`.
    """
    parts = (text.rpartition(".") for text, _ in layers_together(names))
    operators = grouped((cell or "(root)", operator) for cell, _, operator in parts)
    lines = []
    for cell, inside in operators.items():
        text = f"{cell}: {', '.join(dict.fromkeys(inside))}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", **_UNBROKEN)
    return lines


def ranges_shown(numbers):
    """Ascending numbers as texts, with consecutive ones merged: `["0-3", "7"]`."""
    return [_range_shown(run) for run in _runs(sorted(numbers))]


def quoted(texts, most=None):
    """Quoted texts, separated by commas; `most`: how many of a longer list are shown."""
    return ", ".join(f"'{text}'" for text in texts[:most]) + ", …" * (most is not None and len(texts) > most)


def _range_shown(run):
    return f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}"


def _runs(numbers):
    """Lists of consecutive numbers; None, which may come first, is a list of its own."""
    grouped = groupby(enumerate(numbers), lambda pair: None if pair[1] is None else pair[1] - pair[0])
    return [[number for _, number in run] for _, run in grouped]
