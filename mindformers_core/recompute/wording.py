"""Names of many operators in few lines: those of layers in a row together. Pure Python."""

import re

__all__ = ["layers_together"]


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
            shown = "" if run == [None] else f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}"
            lines.append((f"{before}{shown}{after}", [place for number in run for place in places[number]]))
    return lines


def _runs(numbers):
    """Numbers in a row together."""
    runs = []
    for number in numbers:
        if runs and number is not None and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
