"""The passes over the plan of a call, in order: `PASSES`. Nothing else changes a plan between capture and generation.

`write_module` only reads it: it finds what is deferred (`program.deferral`) and who passes weights
(`program.passed_weights`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture_with_state
from mindformers_core.program.partition import calls_of, partition
from mindformers_core.program.plan import joined_path
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.propagation.saved import load_plan
from mindformers_core.sharding.boundary import bind_arguments, undeclared_inputs

_LOG = logging.getLogger("mindformers_core")


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """A call of a Cell, as passes see it.

    Attributes:
        tree: the `ShardedTree`.
        path: of the Cell that is called.
        graph: the captured `CellGraph`.
        arriving: number of every argument's Value -> the `Layout` in which it arrives; only for the first pass.
        saved_plan: see `prepare`.
    """

    tree: object
    path: str
    graph: object
    arriving: dict | None = None
    saved_plan: object = None


@dataclass(frozen=True)
class Pass:
    """A pass over a plan.

    Attributes:
        decides: what, in words.
        run: function of the `PlannedCall` and its plan so far, None before the first pass; returns the plan, the same
            object where nothing changes.
        is_checked: whether `check_plan` reads a plan that the pass has changed.
    """

    decides: str
    run: Callable
    is_checked: bool


def _layouts(call, plan):
    tree, path = call.tree, call.path
    if callable(call.saved_plan):
        return call.saved_plan(call.graph)
    given = call.graph, tree.mesh, call.arriving, below(path, tree.parameter_layouts), below(path, tree.declarations)
    if call.saved_plan is not None:
        return load_plan(call.saved_plan, *given, final=path == "")
    return propagate(*given, tree.device_model, path == "", algorithm_of)


def _keepers(call, plan):
    has_keepers = callable(call.saved_plan)
    return plan if has_keepers else call.tree.activations.annotate(call.path, plan, call.tree.compiling)


def _parts(call, plan):
    compiled = call.tree.compiling
    return partition(plan, *(calls_of(plan, call.path, cells) for cells in compiled)) if compiled else plan


PASSES = (
    Pass("layouts: propagated, replayed from a file, or carried over from another plan", _layouts, True),
    Pass("saved tensors: keepers of instructions, by the tree's `ActivationPolicy`", _keepers, False),
    Pass("parts: which calls and runs of instructions are compiled one by one", _parts, True),
)
LAYOUTS, PLANNED, GENERATED = PASSES[:1], PASSES[:2], PASSES[2:]  # PLANNED make `Program.plan`, GENERATED `.generated`


def run_passes(passes, call, plan=None):
    """The plan of a `PlannedCall` after some passes."""
    for each in passes:
        before, plan = plan, each.run(call, plan)
        if each.is_checked and plan is not before:
            check_plan(plan, final=call.path == "")
    return plan


def planned_call(tree, path, args, kwargs, saved_plan=None, passes=PLANNED):
    """Capture one call of the Cell at `path`, and plan it.

    Args:
        tree, path, args, kwargs, saved_plan: as of `make_program`.
        passes: those that plan it.

    Returns:
        `(CellGraph, CellPlan, PythonState)`.
    """
    bound, arriving = bind_arguments(tree, path, args, kwargs)
    tree.follow_cells()
    try:
        with tree.as_written():
            graph, state = capture_with_state(tree.cells[path], bound.args[1:], bound.kwargs)
    except ValueError as error:
        undeclared = undeclared_inputs(arriving, tree.boundaries[path])
        if not undeclared:
            raise
        raise ValueError(f"{str(error).rstrip('.')}; {tree.label(path)} was called with {undeclared}") from error
    values = tree_leaves(graph.arguments)
    layouts = {value.id: layout for value, (_, _, layout) in zip(values, arriving, strict=True)}
    plan = run_passes(passes, PlannedCall(tree, path, graph, layouts, saved_plan))
    if not tree.programs:
        _warn_of_undivided(tree, path, plan)
    return graph, plan, state


def _warn_of_undivided(tree, path, plan):
    """Warn, once for equal Cells, where tensors are gathered since their sizes don't divide."""
    cells = {}
    for inner, each in plan.walk():
        for why in {move.reason for move in each.redistributions if move.reason.undivided}:
            cells.setdefault(why, []).append(tree.label(joined_path(path, inner)))
    for why, labels in cells.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        _LOG.warning("%s%s gathers what is sharded for %s; explain() shows where", labels[0], more, why)


def below(path, entries):
    """The entries of a dict by Cell path at or below `path`, by their paths from there."""
    if not path:
        return entries
    inner = {name.removeprefix(f"{path}."): entry for name, entry in entries.items() if name.startswith(f"{path}.")}
    return inner | ({"": entries[path]} if path in entries else {})
