"""A picture of a budget's Pareto curve: saved bytes against recomputed time. Pure Python."""

from html import escape
from math import floor, log10

from mindformers_core.explaining.style import HUES, STYLE
from mindformers_core.hints import byte_unit, bytes_shown, seconds_shown

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 690, 78, 382  # of the axes
_TICKS = 6  # about
_LOOK = f"""
svg {{ background: var(--card); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }}
text {{ fill: var(--soft); }}
.title {{ font-size: 15px; font-weight: 600; fill: var(--text); }}
.grid {{ stroke: var(--line); }}
.guide {{ stroke: var(--faint); stroke-dasharray: 4 4; }}
.curve {{ fill: none; stroke: hsl({HUES[0]} 70% var(--bar)); stroke-width: 2; }}
.point {{ fill: hsl({HUES[0]} 70% var(--bar)); }}
.chosen {{ fill: hsl({HUES[1]} 90% var(--bar)); stroke: var(--card); stroke-width: 2; }}
.label {{ fill: var(--text); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }}
"""


def curve_picture(choice):
    """The curve of a `Choice` as an SVG picture (text), light or dark as the reader's system.

    The horizontal axis has the saved bytes, the vertical axis the recomputed time as a part of the forward pass.
    Each point is Pareto-optimal among all evaluated sets; the large point is the choice.
    """
    size, unit = byte_unit(choice.all_bytes)
    across = max(choice.all_bytes, 1) / size
    forward = choice.forward_seconds or 1
    up = max([100 * seconds / forward for _, seconds in choice.curve] + [1e-9])
    columns, rows = _ticks(across), _ticks(up)
    right, top = max(across, columns[-1]), max(up, rows[-1])

    def x_of(nbytes):
        return _LEFT + (_RIGHT - _LEFT) * nbytes / size / right

    def y_of(seconds):
        return _BOTTOM - (_BOTTOM - _TOP) * 100 * seconds / forward / top

    points = [(x_of(nbytes), y_of(seconds)) for nbytes, seconds in choice.curve]
    chosen = x_of(choice.saved_bytes), y_of(choice.seconds)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
            f'height="{_HEIGHT}" role="img">',
            f"<style>{escape(STYLE + _LOOK, quote=False)}</style>",
            *_heading(choice),
            *_grid([(x_of(tick * size), f"{tick:g}") for tick in columns], f"saved activations, {unit}"),
            *_rows([(y_of(tick / 100 * forward), f"{tick:g} %") for tick in rows]),
            f'<polyline class="curve" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>',
            *(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points),
            *_marked(*chosen, choice),
            "</svg>\n",
        ]
    )


def _heading(choice):
    part = choice.saved_bytes / max(choice.all_bytes, 1)
    yield f'<text class="title" x="{_LEFT}" y="28">Activations kept against computed again</text>'
    yield (
        f'<text x="{_LEFT}" y="48">chosen: {bytes_shown(choice.saved_bytes)} of {bytes_shown(choice.all_bytes)} stay '
        f"({100 * part:.1f} %); what is computed again takes {seconds_shown(choice.seconds)}</text>"
    )


def _grid(columns, title):
    """The axis of bytes."""
    for x, text in columns:
        yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM}"/>'
        yield f'<text class="column" x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{text}</text>'
    yield f'<text x="{(_LEFT + _RIGHT) / 2:.1f}" y="{_BOTTOM + 42}" text-anchor="middle">{title}</text>'


def _rows(rows):
    """The axis of time."""
    for y, text in rows:
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}"/>'
        yield f'<text class="row" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    middle = (_TOP + _BOTTOM) / 2
    yield (
        f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">'
        "computed again, of the forward pass</text>"
    )


def _marked(x, y, choice):
    """The chosen point, with lines to both axes and its label."""
    share = choice.seconds / (choice.forward_seconds or 1)
    yield f'<path class="guide" fill="none" d="M {_LEFT} {y:.1f} H {x:.1f} V {_BOTTOM}"/>'
    yield f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="7"/>'
    anchor, shift = ("end", -12) if x > (_LEFT + _RIGHT) / 2 else ("start", 12)
    yield (
        f'<text class="label" x="{x + shift:.1f}" y="{max(y - 12, _TOP + 12):.1f}" text-anchor="{anchor}">'
        f"{bytes_shown(choice.saved_bytes)}, {100 * share:.1f} %</text>"
    )


def _ticks(largest):
    """About 6 round numbers from 0, the last one at most a step below `largest`."""
    rough = largest / _TICKS
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(floor(largest / step + 1e-9) + 1)]
