"""Checks of settings against the whole model: its program, or the programs of all pipeline stages. Pure Python.

One stage can't check a pattern: its matches may be on another stage. Layers are checked when the stages exchange their
summaries, operators when all stages have a program. Limits of compiled stages are checked at the first exchange.
"""

from mindformers_core.grouping import grouped
from mindformers_core.hints import nearest
from mindformers_core.program.name_ranges import cells_together, quoted
from mindformers_core.recompute.budget import out_of_reach
from mindformers_core.recompute.patterns import Found, check_found, match, what_is_there
from mindformers_core.scopes import errors_at

_SHOWN = 5  # Cells in an error


def stage_summary(settings, swapping, layers, paths=(), program=None):
    """Summary of a stage for the other stages, as JSON values.

    Args:
        settings, swapping: the `RecomputeSettings`, and the `SwapSettings`.
        layers: the result of `layers_of`.
        paths: paths of all Cells of the stage.
        program: the `NamedProgram` of the stage's last program; None before the first one.

    Returns:
        A dict; its `"short"` is for `[least bytes, all bytes]` of a training program that can't reach the budget.
    """
    numbered = [[number, path] for number in sorted(layers) for path in layers[number]]
    summary = {"layers": numbered, "paths": list(paths), "found": None, "chosen": None, "short": None}
    if program is not None:
        requests, chosen = (*settings.requests, *swapping.requests), program.asked("recompute", settings)
        summary["found"] = {_name_of(each): [program.match(each).found, bool(program.keys(each))] for each in requests}
        summary["chosen"] = [len(chosen), len(chosen - program.asked("exclude", settings))]
    return summary


def _name_of(request):
    """Identity of a `Request` among stages; one pattern may have several, for different layers."""
    return f"{request.pattern and request.pattern.text} in {request.layers}"


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
    requests, stages = [*settings.requests, *swapping.requests], [n for n, e in enumerate(summaries) if e is not None]
    known = [summaries[stage] for stage in stages]
    others = f"; looked for on stages {stages} of {len(summaries)}: recompute() or swap() was called with no other"
    with errors_at("", others * (len(known) < len(summaries))):
        _check_layers(requests, known, is_whole=len(summaries) == 1)
        if all(summary["found"] is not None for summary in known):
            _check_matches(requests, [summary["found"] for summary in known])
            _check_not_idle(settings, [summary["chosen"] for summary in known])
    short = {stage: each["short"] for stage, each in enumerate(summaries) if each and each["short"]}
    if settings.budget is not None and short:
        stage = max(short, key=lambda stage: short[stage][0] / short[stage][1])
        raise ValueError(out_of_reach(settings.budget, *short[stage], f" on stage {stage}", "all stages"))


def _check_layers(requests, known, is_whole):
    """Raise `ValueError` for layer numbers that no stage has."""
    paths = [path for summary in known for path in summary["paths"] if path and "." not in path]
    layers = grouped(sorted(entry for summary in known for entry in summary["layers"]))
    inside = [path for number in layers for path in layers[number]]
    unnumbered = [path for path in inside if not path.rpartition(".")[2].isdigit()]
    for each in requests:
        where, numbers = each.where + ".layers" * (each.kind == "swap"), () if each.layers is True else each.layers
        if numbers and unnumbered and not is_whole:
            raise ValueError(
                f"{where}: '{unnumbered[0]}' has no number, and its place on a stage isn't that in the model: call "
                "layers by their number in the model, give true for all, or name them in a pattern"
            )
        if not layers and (numbers or each.pattern is None):
            names = quoted(cells_together(dict.fromkeys(paths)), _SHOWN)
            instead = f"; its Cells are {names}, which select can name in patterns" if names else ""
            raise ValueError(
                f"{where}: the model has no layers, Cells in a CellList or CellDict, or in a SequentialCell with more "
                f"in it than single Cells of MindSpore, such as Dense and GELU{instead}"
            )
        for missing in [number for number in numbers if number not in layers]:
            raise ValueError(
                f"{where}: there is no layer {missing}: the layers are {min(layers)} to {max(layers)}, "
                f"{quoted(cells_together(inside), _SHOWN)}{nearest(str(missing), list(map(str, layers)))}"
            )


def _check_matches(requests, found):
    """Raise `ValueError` for a pattern, or a number in it, that no stage has, and for one with none in its layers."""
    for each in requests:
        if each.pattern is not None:
            there = [stage[_name_of(each)] for stage in found if _name_of(each) in stage]
            check_found(each.where, each.pattern, [Found(*summary) for summary, _ in there])
            if each.layers is not True and not any(is_in_layers for _, is_in_layers in there):
                selected = f"nothing that {each.pattern.text!r} selects"
                raise ValueError(f"{each.where}.layers: {selected} is in layers {list(each.layers)}")


def _check_not_idle(settings, chosen):
    """Raise `ValueError` where all that should be recomputed is excluded; `chosen`: with it and without, by stage."""
    asked, left = map(sum, zip(*chosen))
    if asked and not left:
        asked = " and ".join(f"{key} ({settings.shown(key)})" for key in ("full", "select") if settings.shown(key))
        raise ValueError(
            f"recompute.exclude: {list(settings.exclude)} takes out all that is asked for by {asked}, so nothing is "
            "recomputed: exclude less, or leave recompute out"
        )


def check_compiled_stages(settings, summaries):
    """Raise `ValueError` for a pattern that matches no Cell of any compiled stage: it selects operators, or nothing."""
    cells = [(path, path) for path in dict.fromkeys(path for summary in summaries for path in summary["paths"])]
    for each in settings.requests:
        found = match(each.pattern, [], cells) if each.pattern else None
        if found and not found.cells:
            raise ValueError(
                f"{each.where}: {each.pattern.text!r} matches no Cell of any stage, and compiled stages recompute "
                f"whole Cells, no operators: {what_is_there(each.pattern, [found.found])}; name Cells, or run in "
                "PyNative (recipe: context.mode: 1)"
            )
