"""A plan as text for a terminal of 120 columns. Pure Python."""

from textwrap import wrap

from mindformers_core.explaining import wording
from mindformers_core.explaining.wording import call_path, folded, note_shown, others_shown, sent_shown, step_shown
from mindformers_core.hints import bytes_shown
from mindformers_core.operators.registry import algorithm_named
from mindformers_core.program.plan import OperatorPlan, Redistribution

_WIDTH = 120
_COLUMNS = (52, 92)  # where the shapes and the layouts start


def explain_plan(report, storage=()):
    """The operators, redistributions and memory of a plan, Cell by Cell, as text for a terminal.

    Each tensor is printed with its dtype, its shape (global -> local, where they differ) and its layout. A line with an
    arrow is a redistribution that communicates in the forward or the backward pass; a line with a dot is local. Bytes
    are those that one rank sends. Equal Cells are printed once. Of five and more operators of one source line, as of a
    loss of MindSpore's, the last is printed, after the names of the others. Brackets mark results that are recomputed
    in the backward pass, or wait for it on the host, with the bytes that the device saves by that; `for others`: no
    bytes, the operator runs, or its result is kept, for other recomputed operators.

    Args:
        report: the `Report` of the root's plan.
        storage: lines about how parameters and activations are stored, to follow the rest.
    """
    lines = _cell_lines(report.root, "", report.root.path or "(root)", 0, {}, report.note)
    stored = ["", *storage] if storage else []
    about = [wording.about(report), *wrap(wording.decided(report), _WIDTH)]
    return "\n".join([*about, "", *lines, "", *_total_lines(report), *stored])


def _cell_lines(report, path, title, depth, shown, note=None):
    """The lines of a Cell; of one that was `shown` (the identity of its report -> its path) where to look."""
    pad = "  " * depth
    if id(report) in shown:
        return _noted([f"{pad}{title}  {report.class_name}: as {shown[id(report)]}"], note)
    shown[id(report)] = path or title
    sent = sent_shown(report.traffic)
    lines = _noted([f"{pad}{title}  {report.class_name}" + (f"  (sends {sent})" if sent else "")], note)
    pad += "  "
    entering = {"input": report.arguments, "parameter": report.parameters, "lifted": report.lifted}
    for kind, entries in entering.items():
        for entry in entries:
            lines += _line(f"{pad}{kind} {entry.name}", entry)
    for group in folded(report.rows):
        lines += _group_lines(group, path, depth + 1, shown)
    returned = ", ".join(entry.name for entry in report.results)
    return [*lines, f"{pad}return {returned}"] if returned else lines


def _group_lines(group, path, depth, shown):
    row, pad = group[0], "  " * depth
    if isinstance(row.entry, Redistribution):
        return _noted(_move_lines(row, pad), row.note)
    if isinstance(row.entry, OperatorPlan):
        inner = [others_shown(group)] if group[1:] else []
        shown = {"initial_indent": f"{pad}· ", "subsequent_indent": f"{pad}  "}
        return [*(line for text in inner for line in wrap(text, _WIDTH, **shown)), *_operator_lines(group[-1], pad)]
    if row.report is None:
        lines = [f"{pad}{row.child}({row.taken})  has a bprop: on whole tensors  {row.source}"]
        return lines + [line for entry in row.results for line in _line(f"{pad}  {entry.name}", entry)]
    lines = _cell_lines(row.report, call_path(path, row.child), row.child, depth, shown, row.note)
    if len(group) > 1:
        title = group[1].child + (f" … {group[-1].child}" if len(group) > 2 else "")
        lines += _noted([f"{pad}{title}  {row.report.class_name}: as {shown[id(row.report)]}"], row.note)
    return lines


def _operator_lines(row, pad):
    plan, node = row.entry, row.entry.node
    named = f" {node.attribute}" if node.attribute else ""
    call = f"{node.operator}({row.taken}){named}  {row.source}"
    lines = []
    for place, entry in enumerate(row.results):
        left, note = (f"{pad}{entry.name} = {call}", row.note) if place == 0 else (f"{pad}{entry.name}", None)
        lines += _line(left, entry, note)
    lines += [f"{pad}  {row.whole}"] * bool(row.whole)
    if plan.algorithm is not None:
        over = f" over {', '.join(plan.cut_axes)}" if plan.cut_axes else ""
        text = algorithm_named(plan.algorithm).text
        lines.append(f"{pad}  by the distributed algorithm '{plan.algorithm}'{over}: {text}")
        lines += [_arrow([step], f"{pad}  ") + "; backward: ".join(step_shown(step)) for step in row.steps]
    return lines


def _move_lines(row, pad):
    """One line where it fits."""
    is_mark = [entry.step.kind for entry in row.steps] == ["mark_varying"]
    move = row.entry
    what = row.taken if is_mark else f"{row.taken} {move.source} -> {move.target}:"
    steps = ["; backward: ".join(step_shown(step)) for step in row.steps] or ["no communication"]
    arrow = _arrow(row.steps, pad)
    reason = f"(for {move.reason})"
    lines = [f"{arrow}{what}", *(f"{pad}    {step}" for step in steps)]
    ways = [[f"{lines[0]} {steps[0]}  {reason}"]] if len(steps) == 1 else []
    ways.append([*lines[:-1], f"{lines[-1]}  {reason}"])
    return next((way for way in ways if len(way[-1]) <= _WIDTH), [*lines, f"{pad}    {reason}"])


def _noted(lines, note):
    """Lines with a note at the right of the first one that it fits on; else it has a line of its own."""
    if note is None or not note.kind:
        return lines
    shown = f"  [{note_shown(note)}]"
    for place, line in enumerate(lines):
        if len(line) + len(shown) <= _WIDTH:
            return [*lines[:place], line + shown.rjust(_WIDTH - len(line)), *lines[place + 1 :]]
    return [*lines, shown.rjust(_WIDTH)]


def _arrow(steps, pad):
    return f"{pad}{'→' if any(step.collectives for step in steps) else '·'} "


def _line(left, entry, note=None):
    """A tensor's line: its name, shapes, layout and note; on several lines where it is too long."""
    local = "" if entry.local_shape == entry.shape else f" -> {list(entry.local_shape)}"
    shapes = f"{entry.dtype} {list(entry.shape)}{local}"
    line = f"{left:{_COLUMNS[0] - 1}} {shapes}"
    whole = f"{line:{_COLUMNS[1] - 1}} {entry.layout}"
    line = f"{line} {entry.layout}"
    rest = f"{shapes}  {entry.layout}"
    two = [left, " " * max(min(_COLUMNS[0], _WIDTH - len(rest)), 4) + rest]
    ways = [_noted(lines, note) for lines in ([whole], [line], two)]
    fitting = [lines for lines in ways if max(map(len, lines)) <= _WIDTH]
    return min(fitting or ways[2:], key=len)


def _total_lines(report):
    """The bytes that one rank sends in a step, by axes, and its peak memory."""
    totals = wording.totals(report.traffic)
    lines = ["Nothing is communicated."]
    if totals:
        lines = [f"One rank sends in {wording.period(report)}:"]
        lines.append(f"  {'over':16}{'forward':>12}{'backward':>12}   collectives forward + backward")
    for axes, both, collectives in totals:
        forward, backward = map(bytes_shown, both)
        lines.append(f"  {', '.join(axes or ['all']):16}{forward:>12}{backward:>12}   {collectives}")
    training, evaluation = map(bytes_shown, (report.training_bytes, report.evaluation_bytes))
    held = "Activations that one rank holds at the peak"
    if report.undropped_bytes is None:
        return [*lines, f"{held}: {training} in training, {evaluation} in evaluation."]
    undropped = bytes_shown(report.undropped_bytes)
    lines.append(f"{held} of the forward pass: {training} in training ({undropped} without")
    return [*lines, f"recompute and swap), {evaluation} in evaluation."]
