"""The plan of a call, and the passes over it, in order: `PASSES`. Nothing else changes a plan before it is generated.

A pass takes a whole plan and returns one, the same object where nothing changes. `write_module` only reads it: it finds
what is deferred (`program.deferral`) and who passes weights (`program.passed_weights`).
"""

import logging
from functools import partial

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture_with_state
from mindformers_core.communication.world import process_state
from mindformers_core.program.partition import calls_of, partition
from mindformers_core.program.plan import joined_path
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.checking import check_plan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.propagation.saved import load_plan
from mindformers_core.sharding.boundary import bind_arguments, undeclared_inputs

_LOG = logging.getLogger("mindformers_core")


def keepers(tree, path, plan):
    """Saved tensors: keepers of instructions, by the tree's `ActivationPolicy`."""
    return tree.activations.annotate(path, plan, tree.compiling)


def parts(tree, path, plan):
    """Parts: which calls and runs of instructions are compiled one by one."""
    if not tree.compiling:
        return plan
    found = partition(plan, *(calls_of(plan, path, cells) for cells in tree.compiling))
    check_plan(found)
    return found


PASSES = (keepers, parts)
PLANNED, GENERATED = PASSES[:1], PASSES[1:]  # those that make `Program.plan`, and of that `Program.generated`


def run_passes(passes, tree, path, plan):
    """The plan of a call of the Cell at `path` of a `ShardedTree` after some passes."""
    for each in passes:
        plan = each(tree, path, plan)
    return plan


def planned_call(tree, path, args, kwargs, saved_plan=None, passes=PLANNED):
    """Capture one call of the Cell at `path`, and plan it.

    Args:
        tree, path, args, kwargs, saved_plan: as of `make_program`.
        passes: those that follow; a plan in memory has its keepers.

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
    given = graph, tree.mesh, layouts, below(path, tree.parameter_layouts), below(path, tree.declarations)
    load = partial(load_plan, final=path == "", algorithm=algorithm_of)
    if callable(saved_plan):
        plan, passes = saved_plan(graph), ()
    elif saved_plan is not None:
        plan = load(saved_plan, *given)
    else:
        propagated = partial(propagate, *given, tree.device_model, path == "", algorithm_of)
        plan = _kept(tree, path, given, load, propagated)
    check_plan(plan, final=path == "")
    if not tree.programs:
        _warn_of_undivided(tree, path, plan)
    return graph, run_passes(passes, tree, path, plan), state


def _kept(tree, path, given, load, make):
    """The plan that `make()` gives, or one that is kept: in a file, or by simulated ranks that share plans."""
    graph, *others = given
    plans = process_state().world.ranks.plans if process_state().is_simulated else None
    if tree.kept is None and plans is None:
        return make()
    facts = repr((path, graph.key, str(graph), tuple(graph.uses.parameters.values()), others, tree.device_model))

    def shared():
        if facts not in plans:
            plans[facts] = make()
        return plans[facts]

    make_one = make if plans is None else shared
    return tree.kept.plan(facts, given, tree.device_model, load, make_one) if tree.kept else make_one()


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
