"""Checks of settings against the whole model: its program, or the programs of all pipeline stages. Pure Python.

One stage can't check a pattern: its matches may be on another stage. Layers are checked when the stages exchange their
summaries, operators when all stages have a program. Limits of compiled stages are checked at the first exchange.
"""

from mindformers_core.recompute.budget import out_of_reach
from mindformers_core.recompute.patterns import Found, check_found, match, parse_pattern, what_is_there
from mindformers_core.recompute.selection import chosen_keys, excluded_keys, full_layers, operator_swap_keys


def stage_summary(settings, swapping, layers, paths=(), program=None, full=(), short=None):
    """Summary of a stage for the other stages, as JSON values.

    Args:
        settings, swapping: the `RecomputeSettings`, and the `SwapSettings`.
        layers: the result of `layers_of`.
        paths: paths of all Cells of the stage.
        program: the `NamedProgram` of the stage's last program; None before the first one.
        full: paths of the fully recomputed Cells.
        short: `(least bytes, all bytes)` of a training program that can't reach the budget; else None.
    """
    return {
        "layers": [[number, path] for number in sorted(layers) for path in layers[number]],
        "paths": list(paths),
        "found": program and _found(settings, swapping, layers, program, full),
        "short": short and list(short),
    }


def _found(settings, swapping, layers, program, full):
    """Matches of the settings' patterns in a program, by pattern."""
    chosen = chosen_keys(settings, program, full)
    swapped = {}
    for entry in swapping.op_swap if swapping.is_on else ():
        (one,) = program.matches((entry.op_name,), swapping.where(entry))
        is_in_layers = entry.layers is True or bool(operator_swap_keys(entry, one, program, layers))
        swapped[_entry_key(entry)] = [one.found, is_in_layers]
    return {
        "select": {m.pattern.text: m.found for m in program.matches(settings.select, "recompute.select")},
        "exclude": {m.pattern.text: m.found for m in program.matches(settings.exclude, "recompute.exclude")},
        "chosen": [len(chosen), len(chosen - excluded_keys(settings, program))],
        "swapped": swapped,
    }


def _entry_key(entry):
    """Identity of an entry of `op_swap`: one pattern may have several entries, for different layers."""
    return f"{entry.op_name} in {entry.layers}"


def check_stages(settings, swapping, summaries):
    """Raise `ValueError` for a layer, a pattern or a number in a pattern that no stage has; for an `exclude` that
    leaves nothing on any stage; and for a budget below the least of some stage, with the least budget of all stages.

    Patterns are checked once all stages have a program, on the stages that received them. A stage without a call of
    `recompute()` or `swap()` has no summary.

    Args:
        settings: the `RecomputeSettings` of a stage.
        swapping: its `SwapSettings`.
        summaries: `stage_summary` of each pipeline stage, ascending; None for a stage without settings.
    """
    known = [summary for summary in summaries if summary is not None]
    try:
        _check_layers(settings, swapping, known, is_whole=len(summaries) == 1)
        found = [summary["found"] for summary in known]
        if all(each is not None for each in found):
            _check_recompute(settings, found)
            _check_swap(swapping, found)
    except ValueError as error:
        if len(known) == len(summaries):
            raise
        stages = [stage for stage, summary in enumerate(summaries) if summary is not None]
        raise ValueError(
            f"{error}; looked for on stages {stages} of {len(summaries)}: recompute() or swap() was called with no "
            "other"
        ) from None
    short = {stage: each["short"] for stage, each in enumerate(summaries) if each is not None and each["short"]}
    if settings.budget is not None and short:
        stage = max(short, key=lambda stage: short[stage][0] / short[stage][1])
        raise ValueError(out_of_reach(settings.budget, *short[stage], f" on stage {stage}", "all stages"))


def _check_layers(settings, swapping, known, is_whole):
    """Raise `ValueError` for layer numbers that no stage has."""
    layers, paths = {}, dict.fromkeys(path for summary in known for path in summary["paths"])
    for number, path in sorted(entry for summary in known for entry in summary["layers"]):
        layers.setdefault(number, []).append(path)
    unnumbered = [path for each in layers.values() for path in each if not path.rpartition(".")[2].isdigit()]
    asked = [("recompute.full", settings.full)]
    if swapping.is_on:
        asked += [(f"swap.layer_swap[{place}].layers", e.layers) for place, e in enumerate(swapping.layer_swap)]
        asked += [(f"{swapping.where(e)}.layers", e.layers) for e in swapping.op_swap if e.layers is not True]
    for where, numbers in asked:
        if numbers and numbers is not True and unnumbered and not is_whole:
            raise ValueError(
                f"{where}: '{unnumbered[0]}' has no number, and its place on a stage isn't that in the model: call "
                "layers by their number in the model, give true for all, or name them in a pattern"
            )
        full_layers(numbers, layers, where=where, paths=paths)


def _check_recompute(settings, found):
    for key in ("select", "exclude"):
        patterns = getattr(settings, key)
        for number, text in enumerate(patterns):
            where = f"recompute.{key}[{number}]" if len(patterns) > 1 else f"recompute.{key}"
            check_found(parse_pattern(text, where), [Found(*each[key][text]) for each in found if text in each[key]])
    chosen, left = (sum(each["chosen"][place] for each in found) for place in (0, 1))
    if chosen and not left:
        given = {"full": settings.full, "select": settings.select}
        shown = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
        asked = " and ".join(f"{key} ({value})" for key, value in shown.items() if value)
        raise ValueError(
            f"recompute.exclude: {list(settings.exclude)} takes out all that is asked for by {asked}, so nothing is "
            "recomputed: exclude less, or leave recompute out"
        )


def _check_swap(swapping, found):
    for entry in swapping.op_swap if swapping.is_on else ():
        where = swapping.where(entry)
        key = _entry_key(entry)
        found_there = [each["swapped"][key] for each in found if key in each["swapped"]]
        check_found(parse_pattern(entry.op_name, where), [Found(*match) for match, _ in found_there])
        if not any(is_in_layers for _, is_in_layers in found_there):
            layers = list(entry.layers)
            raise ValueError(f"{where}.layers: nothing that {entry.op_name!r} selects is in layers {layers}")


def check_compiled_stages(settings, summaries):
    """Raise `ValueError` for a pattern that matches no Cell of any compiled stage: it selects operators, or nothing."""
    cells = [(path, path) for path in dict.fromkeys(path for summary in summaries for path in summary["paths"])]
    patterns = [("select", text) for text in settings.select] + [("exclude", text) for text in settings.exclude]
    for key, text in patterns:
        found = match(parse_pattern(text, f"recompute.{key}"), [], cells)
        if not found.cells:
            raise ValueError(
                f"recompute.{key}: {text!r} matches no Cell of any stage, and compiled stages recompute whole Cells, "
                f"no operators: {what_is_there(found.pattern, [found.found])}; name Cells, or run in PyNative (recipe: "
                "context.mode: 1)"
            )
