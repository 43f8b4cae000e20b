"""Names of many operators in few lines: those of layers in a row together. Pure Python."""

import re
import textwrap

__all__ = ["cells_together", "layers_together", "names_shown", "quoted", "ranges_shown"]

_WIDTH = 120
_UNBROKEN = {"break_long_words": False, "break_on_hyphens": False}


def layers_together(names):
    """Equal names of layers in a row in one: `model.layers.0-7.mlp.silu`.

    Args:
        names: of operators, `"model.layers.0.mlp.silu"`; may come more than once.

    Returns:
        A list of `(text, places of the names that it stands for)`, in the order in which they appear first.
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
    """Paths of Cells, those of layers in a row in one: `model.layers.0-7`, `model.layers.0-7.mlp`."""
    return [text.removesuffix(".") for text, _ in layers_together(f"{path}." for path in paths)]


def names_shown(names):
    """Names of operators as lines of at most 120 columns, indented: by Cells, those of layers in a row together.

    Args:
        names: as of `layers_together`.
    """
    operators = {}
    for text, _ in layers_together(names):
        cell, _, operator = text.rpartition(".")
        operators.setdefault(cell or "(root)", []).append(operator)
    lines = []
    for cell, inside in operators.items():
        text = f"{cell}: {', '.join(dict.fromkeys(inside))}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", **_UNBROKEN)
    return lines


def ranges_shown(numbers):
    """Numbers as texts, ascending, those in a row together: `["0-3", "7"]`."""
    return [_range_shown(run) for run in _runs(sorted(numbers))]


def quoted(texts):
    """Texts in quotes, with commas between."""
    return ", ".join(f"'{text}'" for text in texts)


def _range_shown(run):
    return f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}"


def _runs(numbers):
    """Numbers in a row together."""
    runs = []
    for number in numbers:
        if runs and number is not None and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
