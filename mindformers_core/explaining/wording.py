"""The common parts of text and page: totals, steps, notes, groups of rows. Pure Python."""

from mindformers_core.analysis.traffic import bytes_by_axes, collectives_of
from mindformers_core.hints import bytes_shown, rate_shown, seconds_shown
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.redistribution.steps import COLLECTIVES, LOCAL_OPERATIONS, STEP_KINDS

_MANY = 5  # operators of one line that come together


def about(report):
    """A line about a `Report`: of which Cell, on which mesh, in which mode."""
    mode = "training" if report.training else "evaluation"
    return f"{report.root.class_name} on the mesh {report.mesh}, captured in {mode}: {report.cells} calls of Cells"


def decided(report):
    """Sentences about a `Report`: by which device model layouts were chosen, and which declarations came before."""
    model, price, batch, weights = report.decision
    links = [("others" if model.axis_links else "all axes", model.link), *model.axis_links]
    shown = ", ".join(f"{rate_shown(link.bandwidth)} over {axis}" for axis, link in reversed(links))
    declared = (("of the batch", batch), ("of weights", weights))
    kept = [f"{what} over {', '.join(axes)}" for what, axes in declared if axes]
    text = (
        f"Layouts are chosen by the prices of the device model {model.name} ({shown}): by them a micro-step takes "
        f"{seconds_shown(price.communication)} of collectives and {seconds_shown(price.computation)} of computation."
    )
    return text + (f" Declared cuts come before prices: {' and '.join(kept)}." if kept else "")


def period(report):
    """The period of the totals of a `Report`: `"a step"`, or `"a step of 2 micro-steps"`."""
    return "a step" if report.micro_steps == 1 else f"a step of {report.micro_steps} micro-steps"


def totals(traffic):
    """`(axes, (bytes forward, bytes backward), collectives in words)` of all axes; of several, their sum under None."""
    sums = bytes_by_axes(traffic)
    if len(sums) > 1:
        sums[None] = [sum(column) for column in zip(*sums.values())]
    return [
        (axes, both, ", ".join(f"{name} {counts[0]} + {counts[1]}" for name, counts in collectives.items()))
        for axes, both in sums.items()
        for collectives in [collectives_of(traffic, axes)]
    ]


def sent_shown(traffic):
    """`"192 KiB forward, 1.5 MiB backward"`, or `""` for nothing."""
    sums = [sum(column) for column in zip(*bytes_by_axes(traffic).values())]
    return ", ".join(f"{bytes_shown(count)} {way}" for count, way in zip(sums, ("forward", "backward")) if count)


def call_path(path, child):
    """Path of a called Cell from the root."""
    return child[1:] if child.startswith("/") else f"{path}.{child}" if path else child


def step_shown(entry):
    """The operations of one `StepEntry`: `(forward, backward)`, as `("all_gather dim 1 over tp, 16 KiB", "slice")`."""
    step, (name, count) = entry.step, entry.step.forward
    over = f"over {', '.join(step.axes)}" if step.axes else ""
    if name in COLLECTIVES:
        forward = f"{' '.join([name, *step.words()])} {over}, {bytes_shown(count)}"
    else:
        text = STEP_KINDS[step.kind].text or LOCAL_OPERATIONS[name]
        forward = f"{' '.join([text, *step.words(('dim', 'to_dim'))])} {over}"
    if not entry.forward:
        return "of the gradient", forward
    backward = "no gradient"
    if entry.gradient:
        back, sent = step.backward
        backward = f"{back}, {bytes_shown(sent)}" if back in COLLECTIVES else LOCAL_OPERATIONS[back]
    if entry.recomputed and name in COLLECTIVES:
        backward = f"{name} again, {bytes_shown(count)}; {backward}"
    return forward, backward


def note_shown(note):
    """`"recomputed: 1.5 MiB not kept"`, `"recomputed for others"` where that is nothing, `"on host: 1.5 MiB"`, …."""
    if note.kind == "recomputed" and not note.nbytes:
        return "recomputed for others"
    return f"{note.kind}: {bytes_shown(note.nbytes)}" + " not kept" * note.kind.startswith("recomputed")


def folded(rows):
    """The rows of a Cell in groups: equal calls in a row come together, and many operators of one line of code."""
    groups = []
    for row in rows:
        if groups and (_equal_calls(groups[-1][-1], row) or _one_line(groups[-1][-1], row)):
            groups[-1].append(row)
        else:
            groups.append([row])
    few = [isinstance(group[0].entry, OperatorPlan) and len(group) < _MANY for group in groups]
    return [part for group, apart in zip(groups, few) for part in ([[row] for row in group] if apart else [group])]


def others_shown(group):
    """The operators of a group but the last: `"5 operators: Cast, Exp, …"`."""
    return f"{len(group) - 1} operators: " + ", ".join(row.entry.node.operator for row in group[:-1])


def _equal_calls(last, row):
    return row.report is last.report is not None and row.child != last.child and row.note == last.note


def _one_line(last, row):
    plain = all(
        isinstance(each.entry, OperatorPlan) and each.entry.algorithm is each.note is None for each in (last, row)
    )
    return plain and not last.whole and not row.whole and row.source == last.source != ""
