"""Inspection of the programs of a sharded Cell: make one ahead of time, list all, explain one."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.explaining.page import page
from mindformers_core.explaining.report import make_report
from mindformers_core.explaining.text import explain_plan
from mindformers_core.padding import padding_note
from mindformers_core.program.plan import joined_path
from mindformers_core.sharding.sharded_cells import EagerCell, tree_and_path, tree_of


def prepare(cell, *inputs, saved_plan=None, compiled=False, **named_inputs):
    """Make the program of `cell(*inputs, **named_inputs)`, without computing anything.

    Args:
        cell: a Cell of a sharded tree.
        inputs, named_inputs: the arguments of the call, this rank's parts; of tensors only shapes and dtypes are used,
            and a `TensorMeta` can stand for one.
        saved_plan: a file written by `save_plan(program.plan, path)`, whose choices the propagation repeats; or a
            function of the captured `CellGraph` that returns its plan, with keepers. Default: propagate, unless there
            is a program for such inputs.
        compiled: whether the program is for a compiled function; only under `recompute()` a different one.

    Returns:
        The `Program`: `.file` is the generated module, `.plan` the plan.

    Raises:
        TypeError: `cell` isn't sharded. ValueError: it runs eagerly, or can't be captured (`CaptureError`);
            or the saved plan is for something else.
    """
    tree, path = tree_and_path(cell)
    if isinstance(cell, EagerCell):
        raise ValueError(f"{tree.label(path)} runs operator by operator (eager): it has no programs, its children have")
    with tree.for_compiled() if compiled else nullcontext():
        return tree.program(path, inputs, named_inputs, saved_plan)


def programs(cell):
    """The programs that the sharded tree of `cell` has so far, one for every signature; that used last at the end.

    There are at most 64 for each Cell that is called from outside; beyond that the one that was used longest ago is
    forgotten, with a warning.
    """
    return list(tree_of(cell).programs.values())


def explain(cell, *inputs, html=None, **named_inputs):
    """The plan of a sharded Cell as text: its computation and its communication.

    For every Cell each operator with global and local shapes and layouts, and each redistribution with its collectives
    and bytes forward and backward; in total the bytes per mesh axis and the peak memory of activations. For a root Cell
    under `zero.hsdp()` also the sharded parameters, bucket by bucket, the unsharded ones, and the bytes that a step
    sends for them. Under `recompute()` or `swap()` each operator and redistribution that is recomputed, or whose saved
    tensors are on the host, has a note with the saved bytes, `[recomputed: 1.5 MiB not kept]`; for a root Cell these
    are summed up at the end. In the program of a compiled function the recomputed Cells have the note.

    Args:
        cell: a Cell of a sharded tree.
        inputs, named_inputs: as for `prepare`. Default: the last program with this Cell is explained; for a Cell below
            the called one, its part of the program.
        html: path of a file to which the same is also written as a self-contained page. Default: none.

    Raises:
        TypeError: `cell` isn't sharded. ValueError: no inputs are given, and no program was made yet.
    """
    tree, path = tree_and_path(cell)
    whole, inner = _plan(cell, inputs, named_inputs)
    plan = dict(reversed([*whole.walk()]))[inner]
    needed = bool(inner) or not tree.storage.takes_gradients
    activations = replace(tree.activations.explained(whole, inner), arguments_need=needed)
    (stored, *step), kept = (tree.storage.explained(), activations.lines) if path == "" else (((),), ())
    report = make_report(plan, algorithm_of, activations, *step)
    named = ((name, padding_note(each)) for name, each in cell.parameters_and_names())
    padded = [f"{name} is padded with zeros, {note}" for name, note in named if note]
    stored = [*stored, *padded]
    if html is not None:
        Path(html).write_text(page(report, tree.label(path), stored, kept), encoding="utf-8")
    return explain_plan(report, [*stored, *kept])


def explain_activations(cell, *inputs, **named_inputs):
    """The summary of `recompute()` and `swap()`: the last lines of `explain(cell, *inputs)`; empty without them.

    Args:
        cell: the root of a sharded tree.
        inputs, named_inputs: as for `prepare`. Default: the last program.

    Raises:
        ValueError: settings with which the backward pass would fail; or no inputs are given, and no program was made.
    """
    tree = tree_of(cell)
    if not tree.activations.is_active:
        return ()
    plan, _ = _plan(cell, inputs, named_inputs)
    tree.activations.validate_for_backward()
    return tree.activations.explained(plan).lines


def _plan(cell, inputs, named_inputs):
    """`(CellPlan, path in it of the Cell)`: of a call, or without inputs of the last program with this Cell."""
    if inputs or named_inputs:
        return prepare(cell, *inputs, **named_inputs).plan, ""
    tree, path = tree_and_path(cell)
    for program in reversed(tree.programs.values()):
        for inner, _ in program.plan.walk():
            if joined_path(program.path, inner) == path:
                return program.plan, inner
    raise ValueError(f"{tree.label(path)} has no program yet: give explain() inputs, or call the Cell before")
