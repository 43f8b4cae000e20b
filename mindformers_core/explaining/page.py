"""A plan as one page for a browser: it needs nothing from outside, and no script. Pure Python."""

from html import escape

from mindformers_core.analysis.traffic import bytes_by_axes, collectives_of
from mindformers_core.explaining import wording
from mindformers_core.explaining.style import HUES, STYLE
from mindformers_core.explaining.wording import call_path, folded, note_shown, others_shown, step_shown
from mindformers_core.hints import bytes_shown
from mindformers_core.program.plan import OperatorPlan, Redistribution

_OPEN_DEPTH = 3  # Cells so far below the root are open at first
_NOTES = {  # kind of an `Annotation` -> its sign, and what it means
    "recomputed": ("↻", "runs again in the backward pass, and bytes that aren't kept because of that"),
    "recomputed whole": ("↻", "all in it runs again in the backward pass, and bytes that by the plan aren't kept"),
    "kept for others": ("▪", "kept, since others are computed again from it"),
    "on host": ("⇅", "waits for the backward pass on the host"),
}


def page(report, title, storage=(), kept=()):
    """The totals of a plan and its tree of Cells, with all tensors and all communication, as one HTML page.

    A sharded dim is a chip in the colour of its axis, `512→128 tp`; a partial sum has a solid frame, a varying mark a
    dashed one. Coloured bands are redistributions that communicate. Results that are recomputed in the backward pass,
    or wait for it on the host, have a note with bytes. Equal Cells are shown once; a group of operators of one source
    line can be expanded.

    Args:
        report: the `Report` of the root's plan.
        title: of the page.
        storage: lines of text about the storage of parameters: a title, then the content of the card.
        kept: lines of text about recomputed results and results on the host, likewise.

    Returns:
        The page's source, all text in it escaped.
    """
    tree = _Tree(report.mesh)
    content = [
        _tag("h1", escape(title)),
        _tag("p", escape(f"{wording.about(report)}. {wording.decided(report)}"), "about"),
        _tag("div", _totals(report) + _figures(report), "cards"),
        *_stored(storage),
        *_stored(kept, open=""),
        _legend(report.mesh, report.kinds),
        _tag("div", tree.cell(report.root, "", report.root.path or report.root.class_name, 0, report.note), "tree"),
    ]
    hues = "".join(f".axis-{place} {{ --hue: {hue}; }}\n" for place, hue in enumerate(HUES))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{hues}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(content)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tag(name, content, kind="", **attributes):
    """An element around `content`, which is HTML already; its attributes are plain text."""
    if kind:
        attributes = {"class": kind, **attributes}
    shown = "".join(f' {key}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{shown}>{content}</{name}>"


def _hue(mesh, axes):
    """The class that gives an element the colour of an axis, of several that of the first."""
    return f"axis-{_place(mesh, axes[0])}"


def _place(mesh, axis):
    """Number of the colour of an axis; a name that is no axis, as hsdp, has the next."""
    names = (*mesh.axis_names, axis)
    return names.index(axis) % len(HUES)


def _chip(mesh, axes, text, kind="", title=""):
    """A word in the colour of its axis; of two, where there are more, in a run from one to the other."""
    joint = {}
    if len(axes) > 1:
        kind, joint = f"{kind} joint", {"style": f"--other: {HUES[_place(mesh, axes[1])]}"}
    named = {"title": title} if title else {}
    return _tag("span", text, f"chip {_hue(mesh, axes)} {kind}".strip(), **named, **joint)


def _totals(report):
    """A table of the bytes that one rank sends, by axes, with bars."""
    totals = wording.totals(report.traffic)
    most = max((sum(both) for axes, both, _ in totals if axes), default=0)
    heads = [_tag("th", "over"), _tag("th", ""), _tag("th", "forward", "number"), _tag("th", "backward", "number")]
    rows = [_tag("tr", "".join(heads) + _tag("th", "collectives, forward + backward"))]
    for axes, both, collectives in totals:
        numbers = "".join(_tag("td", bytes_shown(part), "number") for part in both)
        numbers += _tag("td", escape(collectives), "counts")
        if axes is None:
            rows.append(_tag("tr", _tag("td", "all") + _tag("td", "") + numbers, "sum"))
            continue
        parts = [
            _tag("i", "", way, style=f"width: {100 * part / most:.2f}%", title=f"{bytes_shown(part)} {way}")
            for way, part in zip(("forward", "backward"), both)
        ]
        bar = _tag("td", _tag("div", "".join(parts), f"bar {_hue(report.mesh, axes)}"))
        rows.append(_tag("tr", _tag("td", _chip(report.mesh, axes, escape(", ".join(axes)))) + bar + numbers))
    table = _tag("table", "\n".join(rows)) if totals else _tag("p", "Nothing is communicated.", "nothing")
    return _tag("div", _tag("h2", f"What one rank sends in {wording.period(report)}") + table, "card")


def _figures(report):
    numbers = [sum(column) for column in zip(*collectives_of(report.traffic).values())] or [0, 0]
    figures = [(bytes_shown(report.training_bytes), "of activations at most, in training")]
    if report.undropped_bytes is not None:
        undropped = "of them without recompute and swap; all in the forward pass"
        figures.append((bytes_shown(report.undropped_bytes), undropped))
    figures += [
        (bytes_shown(report.evaluation_bytes), "of activations at most, in evaluation"),
        (f"{numbers[0]} + {numbers[1]}", "collectives, forward + backward"),
    ]
    shown = [_tag("div", _tag("b", escape(figure)) + _tag("span", text), "figure") for figure, text in figures]
    return _tag("div", _tag("h2", "One rank") + _tag("div", "".join(shown), "figures"), "card")


def _stored(lines, **attributes):
    """A card that can be opened, or nothing."""
    if not lines:
        return []
    content = _tag("summary", escape(lines[0])) + _tag("pre", escape("\n".join(lines[1:])))
    return [_tag("details", content, "card stored", **attributes)]


def _note(kind, text):
    """A pill for the note of a result."""
    return _tag("span", f"{_NOTES[kind][0]} {escape(text)}", f"mark {kind.removesuffix(' whole').replace(' ', '-')}")


def _note_of(note):
    """A pill for the note of a row; empty without a note."""
    return _note(note.kind, note_shown(note)) if note is not None and note.kind else ""


def _legend(mesh, kinds):
    axes = [
        _tag("span", _chip(mesh, (axis,), f"{escape(axis)}<small>{size}</small>"))
        for axis, size in zip(mesh.axis_names, mesh.shape)
    ]
    sample = mesh.axis_names[:1]
    samples = (
        (f"{4 * mesh.shape[0]}→4<small>{{}}</small>", "", "a dim cut, global → local"),
        ("Σ {}", "partial", "one term of a sum"),
        ("≈ {}", "varying", "whole, used differently by each rank"),
    )
    for text, kind, meaning in samples:
        axes.append(_tag("span", f"{_chip(mesh, sample, text.format(escape(sample[0])), kind)} {meaning}"))
    axes += [_tag("span", f"{_note(kind, kind)} {escape(_NOTES[kind][1])}") for kind in _NOTES if kind in kinds]
    return _tag("div", "".join(axes), "legend")


class _Tree:
    """Writes the tree of Cells; knows which it has written already.

    Attributes:
        shown: identity of a `CellReport` -> (anchor, path) of the place where it is.
    """

    def __init__(self, mesh):
        self.mesh = mesh
        self.shown = {}

    def cell(self, report, path, name, depth, note=None):
        """A Cell that can be opened, or where to look for one that is like it."""
        if id(report) in self.shown:
            return self.again(report, name, note)
        anchor = f"cell-{len(self.shown)}"
        self.shown[id(report)] = anchor, path or name
        head = _tag("span", escape(name), "child", title=path or name)
        head += _tag("span", escape(report.class_name), "class") + self._sent(report.traffic) + _note_of(note)
        arriving = [("input", entry) for entry in (*report.arguments, *report.lifted)]
        arriving += [("parameter", entry) for entry in report.parameters]
        body = [self._entering(kind, entry) for kind, entry in arriving]
        body += [self._group(group, path, depth + 1) for group in folded(report.rows)]
        returned = ", ".join(escape(entry.name) for entry in report.results)
        body.append(self._row(f'<span class="name">return</span> {returned}', "", "", "input"))
        opened = {"open": "open"} if depth < _OPEN_DEPTH else {}
        content = _tag("summary", head) + _tag("div", "\n".join(body), "body")
        return _tag("details", content, "cell", id=anchor, **opened)

    def again(self, report, name, note):
        """A Cell that was shown before."""
        anchor, path = self.shown[id(report)]
        link = "as " + _tag("a", escape(path), href=f"#{anchor}")
        parts = _tag("code", escape(name)) + _tag("span", escape(report.class_name), "class") + _tag("span", link)
        return _tag("div", parts + self._sent(report.traffic) + _note_of(note), "again")

    def _group(self, group, path, depth):
        row = group[0]
        if isinstance(row.entry, Redistribution):
            return self._move(row)
        if isinstance(row.entry, OperatorPlan):
            inner = "".join(map(self._operator, group[:-1]))
            names = _tag("summary", escape(others_shown(group)))
            inner = _tag("details", names + inner, "inner") if inner else ""
            return inner + self._operator(group[-1])
        call = f"{escape(row.child)}({escape(row.taken)})"
        if row.report is None:
            shapes = "<br>".join(map(self._tensor, row.results))
            return self._row(f'{call} <span class="name">has a bprop</span>', shapes, row.source)
        content = self.cell(row.report, call_path(path, row.child), row.child, depth, row.note)
        if len(group) > 1:
            last = f" … {group[-1].child}" if len(group) > 2 else ""
            content += self.again(row.report, f"{group[1].child}{last}  ×{len(group) - 1}", row.note)
        return content

    def _operator(self, row):
        names = ", ".join(entry.name for entry in row.results)
        plan, node = row.entry, row.entry.node
        attribute = f' <span class="attribute">self.{escape(node.attribute)}</span>' if node.attribute else ""
        whole = row.whole and f" {row.whole}"
        call = f'<span class="name">{escape(names)} =</span> {escape(node.operator)}({escape(row.taken)}){whole}'
        shapes = "<br>".join(map(self._tensor, row.results))
        content = self._row(call + attribute, shapes, row.source, note=row.note)
        if plan.algorithm is None:
            return content
        over = f" over {', '.join(plan.cut_axes)}" if plan.cut_axes else ""
        algorithm = f"distributed {escape(plan.algorithm)}{escape(over)}"
        return content + self._band(row.steps, algorithm, "", "inside of the operator")

    def _move(self, row):
        ends = *row.inputs, *row.results
        before, after = (self._layout(each.shape, each.local_shape, each.layout) for each in ends)
        layouts = _tag("span", f"{before} → {after}", "shape", title=f"{row.entry.source} -> {row.entry.target}")
        return self._band(row.steps, escape(row.taken), layouts, f"for {row.entry.reason}", row.note)

    def _band(self, steps, what, layouts, reason, note=None):
        """Steps that communicate, in the colour of their axis; local steps, in grey."""
        sending = next((step for step in steps if step.collectives), None)
        kind = "local" if sending is None else f"sends {_hue(self.mesh, sending.step.axes)}"
        lines = [line for step in steps for line in self._step(step)] or ["no communication"]
        left = _tag("div", f"{_tag('code', what)} {'<br>'.join(lines)}")
        about = "<br>".join(filter(None, (layouts, _tag("span", escape(reason), "reason"))))
        right = _tag("div", _note_of(note) + about)
        return _tag("div", left + right, f"move {kind}")

    @staticmethod
    def _step(step):
        """Lines of a step: the forward operation, the backward operation."""
        forward, backward = map(escape, step_shown(step))
        sends = {way for way, _, _ in step.collectives}
        if not sends:
            return [forward]
        forward = _tag("b", forward) if "forward" in sends else forward
        return [forward, f"backward: {_tag('b', backward) if 'backward' in sends else backward}"]

    def _sent(self, traffic):
        """The bytes that a Cell sends, as chips."""
        chips = []
        for axes, (forward, backward) in bytes_by_axes(traffic).items():
            title = f"over {', '.join(axes)}: {bytes_shown(forward)} forward, {bytes_shown(backward)} backward"
            both = f"{bytes_shown(forward)} + {bytes_shown(backward)}"
            chips.append(_chip(self.mesh, axes, f"{escape(', '.join(axes))} {both}", title=title))
        return _tag("span", "".join(chips), "sent") if chips else ""

    def _entering(self, kind, entry):
        return self._row(f'<span class="name">{kind}</span> {escape(entry.name)}', self._tensor(entry), "", "input")

    @staticmethod
    def _row(call, shapes, source, kind="", note=None):
        parts = _tag("span", call, "operator") + _tag("span", _note_of(note) + shapes)
        parts += _tag("span", escape(source), "source")
        return _tag("div", parts, f"row {kind}".strip())

    def _tensor(self, entry):
        local = f"{entry.dtype}{list(entry.shape)} -> {list(entry.local_shape)} {entry.layout}"
        shape = self._layout(entry.shape, entry.local_shape, entry.layout)
        return _tag("span", _tag("span", escape(entry.dtype), "dtype") + shape, "shape", title=local)

    def _layout(self, shape, local_shape, layout):
        """A shape with sharded dims as chips, followed by chips for partial and varying axes."""
        dims = []
        for dim, (size, local, axes) in enumerate(zip(shape, local_shape, layout.axes)):
            names = escape(", ".join(axes))
            title = f"dim {dim}: {size} over {', '.join(axes)} = {local}"
            cut = f"{size}→{local}<small>{names}</small>"
            dims.append(_chip(self.mesh, axes, cut, title=title) if axes else str(size))
        chips = [
            _chip(self.mesh, (axis,), f"{'Σ' if op == 'sum' else op} {escape(axis)}", "partial")
            for axis, op in layout.partial
        ]
        chips += [_chip(self.mesh, (axis,), f"≈ {escape(axis)}", "varying") for axis in layout.varying]
        return " ".join([f"[{', '.join(dims)}]", *chips])
