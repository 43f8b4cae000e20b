"""Pictures of pipeline schedules: ranks as rows, time to the right. Pure Python; drawn with matplotlib."""

from typing import NamedTuple

from mindformers_core.explaining import pictures
from mindformers_core.pipeline.tables.simulating import timeline_of
from mindformers_core.pipeline.tables.step import MetaStepType
from mindformers_core.pipeline.tables.table_files import checked_suffix

# Far apart in normal vision and for protanopes, deuteranopes and tritanopes, in their lighter shades as well (smallest
# CIE76 distance, with the simulation of Machado et al. 2009: 21, and 13 for tritanopes).
_KINDS = {
    MetaStepType.FWD: ("forward", pictures.BLUE),
    MetaStepType.BWD: ("backward", pictures.YELLOW),
    MetaStepType.BWD_INPUT: ("input gradient", "#c41961"),
    MetaStepType.BWD_WEIGHT: ("weight gradient", "#639f4d"),
}
_TRANSFER = ("send, receive", "#4a4f57")
_WAITING = {"facecolor": pictures.PALE, "edgecolor": "#c3c8cf", "hatch": "/////", "linewidth": 0}
_WHITER, _WHITEST = 0.45, 0.6  # from one stage of a rank to the next at most; the last one at most
_BOX_INCHES = (0.13, 0.08)  # width of the shortest step, and for every digit, if the picture may be as wide
_LANE_INCHES = (7.0, 24.0)  # least and largest width of a row
_ROW_INCHES, _ROWS_INCHES = 0.42, 16.0  # height of a row, and of all rows at most
_TOP, _RIGHT, _BOTTOM = 0.92, 0.9, 0.82  # margins, inches
_SMALLEST_SIZE = 5.0  # points
_CHARACTER_WIDTH = 0.64  # of a digit, in parts of the text's size
_MANY_BOXES = 20_000


class _Box(NamedTuple):
    """One step in the picture; `chunk` numbers the rank's stages from 0."""

    kind: MetaStepType
    chunk: int
    rank: int
    micro_index: int
    start: float
    end: float


def draw_schedule(schedule, path, costs=None, title=None):
    """Draw the steps of every rank over time, into an SVG or PNG file.

    Colours stand for forward, backward, input gradient and weight gradient, shades for the stages of one rank, from
    dark to light; numbers are those of micro-batches, left out where they don't fit; a waiting rank is hatched. The
    subtitle has the bubble, as a fraction of ranks x makespan, and the peak of live micro-batches, which is on the
    right for every rank.

    The size of the picture is limited; with more than 20,000 steps the boxes are an image inside of the SVG. Equal
    arguments result in equal files with the same release of matplotlib.

    Args:
        schedule: a schedule, a `ScheduleTable`, or a `Timeline`.
        path: of the file; its suffix is .svg or .png.
        costs: `StepCosts`; default: every forward, input-gradient and weight-gradient step takes 1, transfers 0.
        title: default: the name of the schedule's class.

    Raises:
        ModuleNotFoundError: without matplotlib (the extra `plot`).
        TypeError: another object than a schedule, table or timeline.
        ValueError: another suffix, a table or costs that `simulate` rejects, or no compute step that takes time.
    """
    suffix = checked_suffix(path, ("svg", "png"))
    timeline = timeline_of(schedule, costs)
    boxes = _boxes(timeline)
    if not any(box.kind in _KINDS for box in boxes):
        raise ValueError(f"{path}: there is no forward or backward step that takes time: nothing to draw")
    name = title or (type(schedule).__name__ if hasattr(schedule, "table") else "Pipeline schedule")
    pictures.write_picture(path, suffix, lambda: _figure(timeline, boxes, name))


def _boxes(timeline):
    """The boxes of all steps that take time."""
    return [
        _Box(step.type, stages.index(step.stage_index), rank, step.micro_index, start, end)
        for rank, stages in enumerate(_rank_stages(timeline))
        for step, start, end in timeline.spans[rank]
        if end > start
    ]


def _rank_stages(timeline):
    """For every rank its stages in ascending order."""
    return [sorted({span.step.stage_index for span in spans}) for spans in timeline.spans]


def _figure(timeline, boxes, name):
    """The whole picture; its size comes from the number of ranks and the shortest step."""
    from matplotlib.figure import Figure

    computes, stages = [box for box in boxes if box.kind in _KINDS], _rank_stages(timeline)
    chunk_num = max(map(len, stages))
    start, end = min(box.start for box in boxes), max(box.end for box in boxes)
    shortest = min(box.end - box.start for box in computes)
    digits = len(str(max(box.micro_index for box in computes)))
    lane = (end - start) / shortest * (_BOX_INCHES[0] + _BOX_INCHES[1] * digits)
    lane = min(max(lane, _LANE_INCHES[0]), _LANE_INCHES[1])
    scale = lane / (end - start)  # inches for a unit of time
    several = [f" (stages {', '.join(map(str, own))})" * (len(own) > 1) for own in stages]
    labels = [f"rank {rank}{text}" for rank, text in enumerate(several)]
    left = 0.3 + pictures.TEXT_SIZE / 72 * _CHARACTER_WIDTH * max(map(len, labels))
    row = min(_ROW_INCHES, _ROWS_INCHES / len(labels))
    width, height = left + lane + _RIGHT, _TOP + row * len(labels) + _BOTTOM
    figure = Figure(figsize=(width, height), dpi=150)
    place = left / width, _BOTTOM / height, lane / width, row * len(labels) / height
    axes = figure.add_axes(place, xlim=(start, end), ylim=(len(labels) - 0.5, -0.5), yticks=[])
    size, colours = min(pictures.TEXT_SIZE, row * 72 * 0.6), _colours(chunk_num)
    _draw_lanes(axes, labels, timeline.peak_live, size)
    _draw_boxes(axes, boxes, colours, min(0.8, 0.1 * 72 * scale * shortest))
    _write_numbers(axes, computes, colours, scale, size)
    pictures.dress(figure, left / width, name, _words(timeline, chunk_num))
    _draw_legend(figure, left / width, colours, {box.kind for box in boxes})
    return figure


def _draw_lanes(axes, labels, peak_live, size):
    """A hatched row for every rank, with its label on the left and its peak on the right; below, the time axis."""
    from matplotlib.patches import Rectangle

    start, end = axes.get_xlim()
    place = {"annotation_clip": False, "textcoords": "offset points"}
    for rank, label in enumerate(labels):
        axes.add_patch(Rectangle((start, rank - 0.42), end - start, 0.84, **_WAITING))
        if size >= _SMALLEST_SIZE:
            middle = place | {"va": "center", "fontsize": size, "color": pictures.INK}
            axes.annotate(label, (start, rank), (-7, 0), ha="right", **middle)
            axes.annotate(f"{peak_live[rank]:.4g}", (end, rank), (12, 0), **middle)
    place |= {"fontsize": pictures.SMALL_SIZE, "color": pictures.SOFT_INK}
    axes.annotate("peak live", (end, -0.5), (12, 5), **place)
    axes.annotate("time", (end, len(labels) - 0.5), (12, -5), va="top", **place)
    axes.xaxis.get_major_locator().set_params(nbins=12, integer=end - start >= 4, min_n_ticks=3)


def _colours(chunk_num):
    """Type of a compute step -> its colours, lighter for later chunks."""
    whites = [chunk * min(_WHITER, _WHITEST / max(1, chunk_num - 1)) for chunk in range(chunk_num)]
    channels = {kind: bytes.fromhex(colour[1:]) for kind, (_, colour) in _KINDS.items()}
    return {
        kind: ["#" + bytes(round(each + (255 - each) * white) for each in dark).hex() for white in whites]
        for kind, dark in channels.items()
    }


def _draw_boxes(axes, boxes, colours, edge):
    """The steps; transfers are thinner."""
    from matplotlib.collections import PolyCollection

    groups = {}
    for kind, chunk, rank, _, start, end in boxes:
        low, high = (rank + half for half in ((-0.42, 0.42) if kind in _KINDS else (-0.12, 0.12)))
        groups.setdefault((kind, chunk), []).append(((start, low), (end, low), (end, high), (start, high)))
    for (kind, chunk), corners in sorted(groups.items()):
        colour = colours[kind][chunk] if kind in _KINDS else _TRANSFER[1]
        collection = PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=edge)
        collection.set_rasterized(len(boxes) > _MANY_BOXES)
        axes.add_collection(collection)


def _write_numbers(axes, computes, colours, scale, most):
    """Micro-batch numbers, in the boxes of each type whose narrowest box is wide enough, of `most` points."""
    digits, narrowest = len(str(max(box.micro_index for box in computes))), {}
    for box in computes:
        narrowest[box.kind] = min(box.end - box.start, narrowest.get(box.kind, box.end - box.start))
    sizes = {kind: 0.9 * 72 * scale * length / (digits * _CHARACTER_WIDTH) for kind, length in narrowest.items()}
    size = min([each for each in sizes.values() if each >= _SMALLEST_SIZE] + [most])
    for box in computes if size >= _SMALLEST_SIZE else ():
        if sizes[box.kind] >= _SMALLEST_SIZE:
            colour = _ink_on(colours[box.kind][box.chunk])
            place = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": colour}
            axes.text((box.start + box.end) / 2, box.rank, str(box.micro_index), **place)


def _ink_on(colour):
    """Black or white text on `colour`, by the colour's luma (ITU-R BT.601)."""
    red, green, blue = bytes.fromhex(colour[1:])
    return pictures.INK if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "white"


def _words(timeline, chunk_num):
    """The numbers of the whole schedule."""
    rank_num = len(timeline.spans)
    micro_batch_num = len({span.step.micro_index for spans in timeline.spans for span in spans})
    return (
        f"{rank_num} rank{'s' * (rank_num > 1)}"
        + (f" × {chunk_num} stages (dark to light)" if chunk_num > 1 else "")
        + f", {micro_batch_num} micro-batch{'es' * (micro_batch_num > 1)}",
        f"bubble {100 * timeline.bubble_fraction:.1f} %",
        f"peak live {max(timeline.peak_live):.4g}",
        f"makespan {timeline.makespan:.6g}",
    )


def _draw_legend(figure, left, colours, kinds):
    """The colours of the types of steps."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries = {
        name: tuple(Patch(facecolor=each) for each in colours[kind])
        for kind, (name, _) in _KINDS.items()
        if kind in kinds
    }
    if kinds - set(_KINDS):
        entries[_TRANSFER[0]] = (Patch(facecolor=_TRANSFER[1]),)
    entries["waiting"] = (Patch(**_WAITING),)
    place = {"loc": "lower left", "bbox_to_anchor": (left, 0.15 / figure.get_figheight()), "ncols": len(entries)}
    wide = 0.6 + 0.7 * len(colours[MetaStepType.FWD])
    handles = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)}, "handlelength": wide}
    plain = {"frameon": False, "borderpad": 0, "borderaxespad": 0, "columnspacing": 1.8}
    text = {"fontsize": pictures.TEXT_SIZE, "labelcolor": pictures.INK}
    figure.legend(entries.values(), entries, **handles, **place, **plain, **text)
