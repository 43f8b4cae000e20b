"""Draws the loads of ranks with and without `moe.placement` into docs/images: the picture of docs/experts.md.

python docs/make_experts.py
"""

from pathlib import Path

import numpy as np

from mindformers_core.explaining import pictures
from mindformers_core.models.expert_placement import PlacementSettings, placed_by_loads, rank_loads

__all__ = ["IMAGES", "PAGE", "TRACES", "draw_pictures", "followed"]

DOCS = Path(__file__).resolve().parent
PAGE, IMAGES = DOCS / "experts.md", DOCS / "images"
EXPERTS, RANKS, CHOICES, STEPS = 64, 8, 16_384, 400  # choices of a step
SETTINGS = PlacementSettings(interval=10, threshold=1.05)
_NUMBERS = np.arange(EXPERTS)
TRACES = {  # what experts are chosen for, by the step
    "Zipf: the n-th expert by n^-0.5": lambda step: (1 + _NUMBERS) ** -0.5,
    "a hot group: 16 experts, 6 times as often": lambda step: 1 + 5 * ((_NUMBERS >= 20) & (_NUMBERS < 36)),
    "drifting: to the next expert in 100 steps": lambda step: (
        1 + 6 * np.exp(-(((_NUMBERS - step / 100 + 32) % EXPERTS - 32) ** 2) / 32)
    ),
}


def followed(share, settings=SETTINGS):
    """The busiest rank's load over the mean in every interval, of experts that stay, and of those that move."""
    draws, still, experts, found = np.random.default_rng(0), _NUMBERS, _NUMBERS, []
    for first in range(0, STEPS, settings.interval):
        steps = [share(step) for step in range(first, first + settings.interval)]
        loads = sum(draws.multinomial(CHOICES, each / each.sum()) for each in steps)
        of_ranks = [rank_loads(loads, each, RANKS) for each in (still, experts)]
        found.append([each.max() / each.mean() for each in of_ranks])
        experts = placed_by_loads(loads, RANKS, experts, settings.threshold)
    return np.array(found).T


def figure_of():
    """The whole picture: a panel for each trace."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=150)
    place = {"left": 0.05, "right": 0.98, "top": 0.68, "bottom": 0.12, "wspace": 0.12}
    for axes, (name, share) in zip(figure.subplots(1, len(TRACES), sharey=True, gridspec_kw=place), TRACES.items()):
        still, moved = followed(share)
        steps = np.arange(len(still)) * SETTINGS.interval
        for loads, colour in ((still, pictures.YELLOW), (moved, pictures.BLUE)):
            axes.step(steps, loads, where="post", color=colour, linewidth=1.5)
        words = f"{still[1:].mean():.2f} where they stay, {moved[1:].mean():.2f} where they move"
        for text, up, colour in ((name, 1.12, pictures.INK), (words, 1.02, pictures.SOFT_INK)):
            axes.text(0, up, text, transform=axes.transAxes, fontsize=pictures.SMALL_SIZE, color=colour)
        axes.set_ylim(1, None)
        axes.grid(axis="y", color=pictures.PALE)
    words = (f"{EXPERTS} experts on {RANKS} ranks", f"a look at the loads every {SETTINGS.interval} steps",
             "yellow: experts stay, blue: they move")  # fmt: skip
    pictures.dress(figure, 0.05, "Load of the busiest rank over the mean", words)
    return figure


def draw_pictures(folder, suffix="svg"):
    """The picture."""
    pictures.write_picture(Path(folder) / f"experts_placement.{suffix}", suffix, figure_of)


if __name__ == "__main__":
    draw_pictures(IMAGES)
