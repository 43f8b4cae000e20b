"""Pictures that matplotlib draws in one style, whatever the user's own. Pure Python."""

import io

from mindformers_core.files import write_whole
from mindformers_core.hints import install_hint

BLUE, YELLOW = "#368be8", "#e6b800"
INK, SOFT_INK, PALE = "#1f2328", "#656d76", "#f3f4f6"
TEXT_SIZE, SMALL_SIZE = 8.5, 7.5  # points
_SVG = {"svg.hashsalt": "mindformers_core", "svg.fonttype": "none"}
_STYLE = {**_SVG, "font.sans-serif": ["DejaVu Sans"], "hatch.linewidth": 0.7}
_FITTING = b'<svg style="max-width: max(100%, 960px); height: auto" '  # in a browser: all of it, or zoomed in


def write_picture(path, suffix, figure_of):
    """Write the figure that `figure_of()` returns, as SVG or PNG; with one release of matplotlib equal ones are equal.

    Raises:
        ModuleNotFoundError: without matplotlib (the extra `plot`).
    """
    try:
        from matplotlib import style
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{path}: a picture needs matplotlib: {install_hint('plot')}") from error
    file, undated = io.BytesIO(), {"Date": None, "Creator": None} if suffix == "svg" else {"Software": None}
    with style.context(["default", _STYLE]):
        figure_of().savefig(file, format=suffix, metadata=undated)
    picture = file.getvalue()
    write_whole(path, picture.replace(b"<svg ", _FITTING, 1) if suffix == "svg" else picture)


def dress(figure, left, title, words):
    """Write the title and, below it, the words at `left` of the width; axes get small soft numbers and no frame."""
    height = figure.get_figheight()
    figure.text(left, 1 - 0.34 / height, title, fontsize=13, fontweight="bold", color=INK)
    figure.text(left, 1 - 0.58 / height, "   ·   ".join(words), fontsize=9, color=SOFT_INK)
    for axes in figure.axes:
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=SMALL_SIZE, colors=SOFT_INK, length=3)
