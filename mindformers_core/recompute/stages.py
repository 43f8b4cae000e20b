"""What the stages of a pipeline tell each other, so that what is asked for and on none is found out. Pure Python.

A stage alone can't judge a pattern: what it doesn't have may be on another one. Layers are known when the stages meet,
operators when all of them have a program.
"""

from mindformers_core.recompute.choosing import full_layers
from mindformers_core.recompute.operator_names import Label, OperatorName, operator_names
from mindformers_core.recompute.patterns import select
from mindformers_core.recompute.places import Place, called_cells

__all__ = ["check_stages", "stage_told"]


def stage_told(layers, frame):
    """What others have to know of a stage, as JSON can hold it.

    Args:
        layers: what `layers_of` gives.
        frame: the `FramePlan` of the last program of the stage's Cell; None before there is one.
    """
    paths = [path for number in sorted(layers) for path in layers[number]]
    told = {
        "layers": sorted(layers),
        "unnumbered": [path for path in paths if not path.rpartition(".")[2].isdigit()],
        "cells": None,
        "operators": [],
    }
    if frame is not None:
        told["cells"] = list(dict.fromkeys(path for _, path in called_cells(frame)))
        told["operators"] = [
            [name.path, [[label.name, label.variable, label.number, label.count] for label in name.labels]]
            for name in operator_names(frame)
        ]
    return told


def check_stages(settings, swapping, told):
    """Raise `ValueError` for a layer or a pattern that is on no stage, with the nearest names of all stages.

    Patterns are checked once all stages have a program. Of a stage with which neither `recompute()` nor `swap()` was
    called, nothing is known.

    Args:
        settings: the `RecomputeSettings` of a stage.
        swapping: its `SwapSettings`.
        told: what every stage of the pipeline tells, see `stage_told`, ascending; None of stages without settings.
    """
    stages = [stage for stage, each in enumerate(told) if each is not None]
    known = [told[stage] for stage in stages]
    try:
        _check_layers(settings, swapping, known)
        if all(each["cells"] is not None for each in known):
            _check_patterns(settings, swapping, known)
    except ValueError as error:
        if len(stages) == len(told):
            raise
        raise ValueError(
            f"{error}; looked for on stages {stages} of {len(told)}: recompute() or swap() was called with no other"
        ) from None


def _check_layers(settings, swapping, known):
    layers = {number: [] for each in known for number in each["layers"]}
    unnumbered = [path for each in known for path in each["unnumbered"]]
    asked = [("recompute.full", settings.full)]
    if swapping.is_on:
        asked += [(f"swap.layer_swap[{place}].layers", e.layers) for place, e in enumerate(swapping.layer_swap)]
        narrowed = [entry for entry in swapping.op_swap if entry.layers is not True]
        asked += [(f"swap.op_swap[{entry.op_name!r}].layers", entry.layers) for entry in narrowed]
    for where, numbers in asked:
        if numbers and numbers is not True and unnumbered:
            raise ValueError(
                f"{where}: '{unnumbered[0]}' has no number, and its place on a stage isn't that in the model: call "
                "layers by their number in the model, give true for all, or name them in a pattern"
            )
        full_layers(numbers, layers, where=where)


def _check_patterns(settings, swapping, known):
    cells = [((), path) for path in dict.fromkeys(path for each in known for path in each["cells"])]
    operators = [
        OperatorName(Place((), path, None, None), path, "", tuple(Label(*label) for label in labels))
        for each in known
        for path, labels in each["operators"]
    ]
    select(settings.select, operators, cells, "recompute.select")
    select(settings.exclude, operators, cells, "recompute.exclude")
    for entry in swapping.op_swap if swapping.is_on else ():
        select((entry.op_name,), operators, cells, f"swap.op_swap[{entry.op_name!r}]")
