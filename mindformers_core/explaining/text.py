"""A plan as text for a terminal of 120 columns. Pure Python."""

from textwrap import wrap

from mindformers_core.analysis.traffic import bytes_by_axes, collectives_of
from mindformers_core.explaining.report import CallRow, MoveRow
from mindformers_core.explaining.wording import (
    call_path,
    dims_shown,
    folded,
    mark_shown,
    sent_shown,
    step_shown,
)
from mindformers_core.hints import bytes_shown

__all__ = ["explain_plan"]

_WIDTH = 120
_COLUMNS = (52, 92)  # where the shapes and the layouts start


def explain_plan(report, storage=()):
    """What a plan does, Cell by Cell, as text for a terminal.

    Operators and other tensors come with their dtype, their shape (global -> of a rank, where these differ) and layout.
    A line with an arrow is a redistribution that communicates, now or for the gradient; one with a dot is local. Bytes
    are what one rank sends. Cells that are alike are shown once; of five and more
    operators of one line of code, as of a loss of MindSpore's, the last one, after the names of the others. What is in
    brackets is computed again in the backward pass, or waits for it on the host, with the bytes that the device doesn't
    keep because of that; `for others`: none, it runs, or is kept, since others that are computed again need it.

    Args:
        report: the `Report` of the root's plan.
        storage: lines about how parameters and activations are stored, to follow the rest.
    """
    mode = "training" if report.training else "evaluation"
    lines = [
        f"{report.root.class_name} on the mesh {report.mesh}, captured in {mode}: {report.cells} calls of Cells",
        "",
    ]
    lines += _cell_lines(report.root, "", report.root.path or "(root)", 0, {}, report.mark)
    return "\n".join([*lines, "", *_total_lines(report), *(["", *storage] if storage else [])])


def _cell_lines(report, path, title, depth, shown, mark=None):
    """The lines of a Cell; of one that was `shown` (the identity of its report -> its path) where to look."""
    pad = "  " * depth
    if id(report) in shown:
        return _marked([f"{pad}{title}  {report.class_name}: as {shown[id(report)]}"], mark)
    shown[id(report)] = path or title
    sent = sent_shown(report.traffic)
    lines = _marked([f"{pad}{title}  {report.class_name}" + (f"  (sends {sent})" if sent else "")], mark)
    pad += "  "
    lifted = [("lifted", entry) for entry in report.lifted]
    for kind, entry in (
        [("input", e) for e in report.arguments] + [("parameter", e) for e in report.parameters] + lifted
    ):
        lines += _line(f"{pad}{kind} {entry.name}", entry)
    for group in folded(report.rows):
        lines += _group_lines(group, path, depth + 1, shown)
    returned = ", ".join(entry.name for entry in report.results)
    return [*lines, f"{pad}return {returned}"] if returned else lines


def _group_lines(group, path, depth, shown):
    row, pad = group[0], "  " * depth
    if isinstance(row, MoveRow):
        return _marked(_move_lines(row, pad), row.mark)
    if not isinstance(row, CallRow):
        inner = [f"{len(group) - 1} operators: " + ", ".join(row.operator for row in group[:-1])] if group[1:] else []
        shown = {"initial_indent": f"{pad}· ", "subsequent_indent": f"{pad}  "}
        return [*(line for text in inner for line in wrap(text, _WIDTH, **shown)), *_operator_lines(group[-1], pad)]
    if row.report is None:
        lines = [f"{pad}{row.child}({', '.join(row.inputs)})  has a bprop: on whole tensors  {row.source}"]
        return lines + [line for entry in row.results for line in _line(f"{pad}  {entry.name}", entry)]
    lines = _cell_lines(row.report, call_path(path, row.child), row.child, depth, shown, row.mark)
    if len(group) > 1:
        title = group[1].child + (f" … {group[-1].child}" if len(group) > 2 else "")
        lines += _marked([f"{pad}{title}  {row.report.class_name}: as {shown[id(row.report)]}"], row.mark)
    return lines


def _operator_lines(row, pad):
    named = f" {row.attribute}" if row.attribute else ""
    call = f"{row.operator}({', '.join(row.inputs)}){named}  {row.source}"
    lines = []
    for place, entry in enumerate(row.results):
        left, mark = (f"{pad}{entry.name} = {call}", row.mark) if place == 0 else (f"{pad}{entry.name}", None)
        lines += _line(left, entry, mark)
    if row.algorithm is not None:
        over = f" over {', '.join(row.axes)}" if row.axes else ""
        lines.append(f"{pad}  by the distributed algorithm '{row.algorithm}'{over}")
        lines += [_arrow(step, f"{pad}  ") + "; backward: ".join(step_shown(step)) for step in row.steps]
    return lines


def _move_lines(row, pad):
    """One line where it fits."""
    marks = [step.kind for step in row.steps] == ["mark_varying"]
    what = row.tensor.name if marks else f"{row.tensor.name} {row.tensor.layout} -> {row.target}:"
    steps = ["; backward: ".join(step_shown(step)) for step in row.steps] or ["no communication"]
    arrow = f"{pad}{'→' if any(step.collectives for step in row.steps) else '·'} "
    reason = f"(for {row.reason})"
    line = f"{arrow}{what} {steps[0]}  {reason}"
    if len(steps) == 1 and len(line) <= _WIDTH:
        return [line]
    lines = [f"{arrow}{what}", *(f"{pad}    {step}" for step in steps)]
    if len(f"{lines[-1]}  {reason}") <= _WIDTH:
        return [*lines[:-1], f"{lines[-1]}  {reason}"]
    return [*lines, f"{pad}    {reason}"]


def _marked(lines, mark):
    """Lines with a mark at the right of the first one that it fits on; else it has a line of its own."""
    if mark is None or not mark.kind:
        return lines
    shown = f"  [{mark_shown(mark)}]"
    for place, line in enumerate(lines):
        if len(line) + len(shown) <= _WIDTH:
            return [*lines[:place], line + shown.rjust(_WIDTH - len(line)), *lines[place + 1 :]]
    return [*lines, shown.rjust(_WIDTH)]


def _arrow(step, pad):
    return f"{pad}{'→' if step.collectives else '·'} "


def _line(left, entry, mark=None):
    """A tensor's line: what it is, its shapes, its layout, its mark; on several lines where it is too long."""
    local = "" if entry.local_shape == entry.shape else f" -> {dims_shown(entry.local_shape)}"
    shapes = f"{entry.dtype} {dims_shown(entry.shape)}{local}"
    line = f"{left:{_COLUMNS[0] - 1}} {shapes}"
    whole = f"{line:{_COLUMNS[1] - 1}} {entry.layout}"
    line = f"{line} {entry.layout}"
    rest = f"{shapes}  {entry.layout}"
    two = [left, " " * max(min(_COLUMNS[0], _WIDTH - len(rest)), 4) + rest]
    ways = [_marked(lines, mark) for lines in ([whole], [line], two)]
    fitting = [lines for lines in ways if max(map(len, lines)) <= _WIDTH]
    return min(fitting or ways[2:], key=len)


def _total_lines(report):
    """What one rank sends in a step, by axes, and what it holds."""
    traffic = report.traffic
    step = "a step" if report.micro_steps == 1 else f"a step of {report.micro_steps} micro-steps"
    lines = [f"One rank sends in {step}:" if traffic else "Nothing is communicated."]
    if traffic:
        lines.append(f"  {'over':16}{'forward':>12}{'backward':>12}   collectives forward + backward")
    for axes, (forward, backward) in bytes_by_axes(traffic).items():
        lines.append(_total_line(", ".join(axes), forward, backward, collectives_of(traffic, axes)))
    if len(bytes_by_axes(traffic)) > 1:
        both = [sum(column) for column in zip(*bytes_by_axes(traffic).values())]
        lines.append(_total_line("all", *both, collectives_of(traffic)))
    training, evaluation = map(bytes_shown, (report.training_bytes, report.evaluation_bytes))
    held = "Activations that one rank holds at the peak"
    if report.undropped_bytes is None:
        return [*lines, f"{held}: {training} in training, {evaluation} in evaluation."]
    undropped = bytes_shown(report.undropped_bytes)
    lines.append(f"{held} of the forward pass: {training} in training ({undropped} without")
    return [*lines, f"recompute and swap), {evaluation} in evaluation."]


def _total_line(over, forward, backward, collectives):
    counts = ", ".join(f"{name} {numbers[0]} + {numbers[1]}" for name, numbers in collectives.items())
    return f"  {over:16}{bytes_shown(forward):>12}{bytes_shown(backward):>12}   {counts}"
