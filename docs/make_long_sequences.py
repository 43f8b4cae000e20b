"""Draws who sends what in the ring of attention into docs/images: the pictures of docs/long_sequences.md.

python docs/make_long_sequences.py
"""

from pathlib import Path

from mindformers_core.batches import static_order
from mindformers_core.explaining import pictures
from mindformers_core.operators.sequence_exchange import chunk_blocks, chunk_order, exchanges

__all__ = ["IMAGES", "PAGE", "draw_pictures"]

DOCS = Path(__file__).resolve().parent
PAGE, IMAGES = DOCS / "long_sequences.md", DOCS / "images"
RANKS, LENGTH = 4, 16  # and tokens of a chunk
MASKS = {
    "causal mask": ((None, 0), True),
    "window of 2 chunks": ((2 * LENGTH - 1, 0), True),
}  # reach, and whether it is exact
PICTURES = (("contiguous", "causal mask"), ("zigzag", "causal mask"), ("contiguous", "window of 2 chunks"))
OWN, CAME = "#f7e9b0", "#bcdcff"
LEFT, TOP, BOTTOM, WIDE, HIGH = 1.35, 1.05, 0.45, 1.62, 0.72  # margins and cells, inches


def cells(order, ranks, found):
    """(distance, rank) -> for each chunk of the giver its number, and those of the queries that take it, in order."""
    each, cells = len(order) // ranks, {}
    for exchange in found:
        for rank in range(ranks):
            giver = (rank - exchange.distance) % ranks
            slots = [slot for product in exchange.products for slot in product.slots[rank] if slot[2]]
            takers = [
                sorted(order[rank * each + query] for query, key, _ in slots if key == own) for own in range(each)
            ]
            sent = [giver in givers for givers in exchange.givers]
            assert sent == [bool(those) for those in takers], "ranks get what they multiply"
            cells[exchange.distance, rank] = [*zip(order[giver * each : (giver + 1) * each], takers)]
    return cells


def draw(path, balance, mask):
    """The picture of one order and mask: ranks as rows, steps as columns."""
    order, (reach, is_exact) = chunk_order(static_order(balance, RANKS), RANKS), MASKS[mask]
    found = exchanges(order, RANKS, chunk_blocks(LENGTH, order, reach, is_exact, LENGTH))
    pictures.write_picture(path, path.suffix[1:], lambda: figure_of(balance, mask, order, found))


def figure_of(balance, mask, order, found):
    """The whole picture."""
    from matplotlib.figure import Figure

    steps, each = [exchange.distance for exchange in found], len(order) // RANKS
    width, height = LEFT + WIDE * len(steps) + 0.15, TOP + HIGH * RANKS + BOTTOM
    figure = Figure(figsize=(width, height), dpi=150)
    place = LEFT / width, BOTTOM / height, WIDE * len(steps) / width, HIGH * RANKS / height
    axes = figure.add_axes(place, xlim=(0, len(steps)), ylim=(RANKS, 0), xticks=[], yticks=[])
    soft = {"fontsize": pictures.TEXT_SIZE, "color": pictures.SOFT_INK, "annotation_clip": False}
    for column, distance in enumerate(steps):
        head = f"step {distance}" if distance else "step 0: its own"
        axes.annotate(head, (column + 0.5, -0.12), ha="center", **soft)
    for rank in range(RANKS):
        own = ", ".join(map(str, order[rank * each : (rank + 1) * each]))
        for text, down in ((f"rank {rank}", 0.4), (f"chunk{'s' * (each > 1)} {own}", 0.62)):
            axes.annotate(text, (-0.08, rank + down), ha="right", va="center", **soft)
    for (distance, rank), chunks in cells(order, RANKS, found).items():
        draw_cell(axes, steps.index(distance), rank, distance, chunks)
    sent = sum(len(givers) for exchange in found if exchange.distance for givers in exchange.givers)
    share = f"{sent} chunks sent, {100 * sent / (len(order) * (RANKS - 1)):.0f} % of a whole ring"
    pictures.dress(figure, 0.15 / width, f"{balance.capitalize()}, {mask}", (f"{RANKS} ranks", share))
    legend = "0 → 2: keys and values of chunk 0, for queries of chunk 2; yellow: a rank's own"
    small = {"fontsize": pictures.SMALL_SIZE, "color": pictures.SOFT_INK}
    figure.text(0.15 / width, 0.16 / height, legend, **small)
    return figure


def draw_cell(axes, column, rank, distance, chunks):
    """What a rank gets in a step: a box for each chunk that it multiplies."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column + 0.03, rank + 0.05), 0.94, 0.9, facecolor=pictures.PALE, edgecolor="none"))
    middle = {"ha": "center", "va": "center"}
    if not any(takers for _, takers in chunks):
        axes.text(column + 0.5, rank + 0.5, "nothing", fontsize=pictures.SMALL_SIZE, color=pictures.SOFT_INK, **middle)
        return
    giver = f"from rank {(rank - distance) % RANKS}" if distance else ""
    axes.text(column + 0.5, rank + 0.2, giver, fontsize=pictures.SMALL_SIZE, color=pictures.SOFT_INK, **middle)
    size = 0.86 / len(chunks)
    for number, (chunk, takers) in enumerate(chunks):
        if takers:
            left = column + 0.07 + number * size
            corner, colour = (left + 0.01, rank + 0.34), CAME if distance else OWN
            axes.add_patch(Rectangle(corner, size - 0.02, 0.52, facecolor=colour, edgecolor="none"))
            at = left + size / 2, rank + 0.6
            axes.text(*at, f"{chunk} → {', '.join(map(str, takers))}", fontsize=9, color=pictures.INK, **middle)


def draw_pictures(folder, suffix="svg"):
    """All pictures."""
    for balance, mask in PICTURES:
        draw(Path(folder) / f"ring_{balance}_{mask.split()[0]}.{suffix}", balance, mask)


if __name__ == "__main__":
    draw_pictures(IMAGES)
