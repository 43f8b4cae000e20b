"""What the stages of a pipeline tell each other, so that what is asked for and on none is found out. Pure Python.

A stage alone can't judge a pattern: what it doesn't have may be on another one. Layers are known when the stages meet,
operators when all of them have a program. What no compiled stage can do is known when they meet, too.
"""

from mindformers_core.program.operator_names import Label, OperatorName, operator_names
from mindformers_core.program.places import Place
from mindformers_core.program.plan import called_cells
from mindformers_core.recompute.budget import out_of_reach
from mindformers_core.recompute.choosing import INSTEAD_OF_GRAPHS, check_for_graphs, full_layers
from mindformers_core.recompute.contradictions import check_something_left
from mindformers_core.recompute.patterns import parse_patterns, select
from mindformers_core.recompute.swapped import check_narrowed
from mindformers_core.recompute.unmatched import what_is_there

__all__ = ["check_compiled_stage", "check_stages", "stage_told"]


def stage_told(layers, frame, paths=(), short=None):
    """What others have to know of a stage, as JSON can hold it.

    Args:
        layers: what `layers_of` gives.
        frame: the `FramePlan` of the last program of the stage's Cell; None before there is one.
        paths: of all Cells of the stage.
        short: `(bytes that can be kept at the least, all bytes)` of the training program that is beyond the budget;
            None where none is.
    """
    told = {
        "layers": [[number, path] for number in sorted(layers) for path in layers[number]],
        "paths": list(paths),
        "cells": None,
        "operators": [],
        "short": short and list(short),
    }
    if frame is not None:
        told["cells"] = list(dict.fromkeys(path for _, path in called_cells(frame)))
        told["operators"] = [
            [name.path, [[label.name, label.variable, label.number, label.count] for label in name.labels]]
            for name in operator_names(frame)
        ]
    return told


def check_stages(settings, swapping, told):
    """Raise `ValueError` for a layer or a pattern, or a number in one, that is on no stage; with names of all stages.
    The same where `exclude` leaves nothing on any stage.

    And for a budget that is out of reach on some stage, with what would do for all of them.

    Patterns are checked once all stages have a program. Of a stage with which neither `recompute()` nor `swap()` was
    called, nothing is known.

    Args:
        settings: the `RecomputeSettings` of a stage.
        swapping: its `SwapSettings`.
        told: what every stage of the pipeline tells, see `stage_told`, ascending; None of stages without settings.
    """
    stages = [stage for stage, each in enumerate(told) if each is not None]
    known = [told[stage] for stage in stages]
    layers = {}
    for number, path in sorted(entry for each in known for entry in each["layers"]):
        layers.setdefault(number, []).append(path)
    try:
        paths = list(dict.fromkeys(path for each in known for path in each["paths"]))
        _check_layers(settings, swapping, layers, paths, is_whole=len(told) == 1)
        if all(each["cells"] is not None for each in known):
            _check_patterns(settings, swapping, known, layers)
    except ValueError as error:
        if len(stages) == len(told):
            raise
        raise ValueError(
            f"{error}; looked for on stages {stages} of {len(told)}: recompute() or swap() was called with no other"
        ) from None
    _check_budget(settings, told)


def _check_budget(settings, told):
    short = {stage: each["short"] for stage, each in enumerate(told) if each is not None and each.get("short")}
    if settings.budget is not None and short:
        stage = max(short, key=lambda stage: short[stage][0] / short[stage][1])
        raise ValueError(out_of_reach(settings.budget, *short[stage], f" on stage {stage}", "all stages"))


def check_compiled_stage(settings, swapping, gaps, told):
    """Raise `ValueError` for what a compiled stage can't do, as far as it shows before there are programs.

    That is all but whole Cells. A pattern that matches no Cell of any stage selects operators, or nothing; where other
    stages run in PyNative these may be theirs.

    Args:
        settings, swapping: as of `check_stages`.
        gaps: as of `check_for_graphs`.
        told: what the stages tell that have settings, each with `"compiled"`.
    """
    check_for_graphs(settings, swapping, gaps)
    if not all(each["compiled"] for each in told):
        return
    cells = [(path, path) for path in dict.fromkeys(path for each in told for path in each["paths"])]
    for where in ("select", "exclude"):
        for pattern in parse_patterns(getattr(settings, where), f"recompute.{where}"):
            if not select((pattern,), [], cells, required=False).cells:
                there = what_is_there(pattern, [], cells)
                raise ValueError(
                    f"{pattern.where}: {pattern.text!r} matches no Cell of any stage, and compiled stages recompute "
                    f"whole Cells, no operators: {there}; name Cells, {INSTEAD_OF_GRAPHS}"
                )


def _check_layers(settings, swapping, layers, paths, is_whole):
    """Layers that are asked for: all there, and by numbers that they have; `paths`: of all Cells, for errors."""
    named = [path for each in layers.values() for path in each if not path.rpartition(".")[2].isdigit()]
    unnumbered = [] if is_whole else named
    asked = [("recompute.full", settings.full)]
    if swapping.is_on:
        asked += [(f"swap.layer_swap[{place}].layers", e.layers) for place, e in enumerate(swapping.layer_swap)]
        narrowed = [entry for entry in swapping.op_swap if entry.layers is not True]
        asked += [(f"{swapping.where(entry)}.layers", entry.layers) for entry in narrowed]
    for where, numbers in asked:
        if numbers and numbers is not True and unnumbered:
            raise ValueError(
                f"{where}: '{unnumbered[0]}' has no number, and its place on a stage isn't that in the model: call "
                "layers by their number in the model, give true for all, or name them in a pattern"
            )
        full_layers(numbers, layers, where=where, paths=paths)


def _check_patterns(settings, swapping, known, layers):
    paths = dict.fromkeys(path for each in known for path in each["cells"])
    labels = [operator for each in known for operator in each["operators"]]
    cells = [((place,), path) for place, path in enumerate(paths)]
    names = [
        OperatorName(Place((len(cells) + place,), path, None, None), path, "", tuple(Label(*label) for label in each))
        for place, (path, each) in enumerate(labels)
    ]
    selected = select(settings.select, names, cells, "recompute.select")
    excluded = select(settings.exclude, names, cells, "recompute.exclude")
    check_something_left(settings, full_layers(settings.full, layers, True), names, cells, selected, excluded)
    for entry in swapping.op_swap if swapping.is_on else ():
        where = swapping.where(entry)
        selected = select((entry.op_name,), names, cells, where)
        if entry.layers is not True:
            check_narrowed(entry, where, selected, names, cells, layers)
