"""Writes what the tools say into docs/pipeline.md, and the pictures of the schedules into docs/images.

python docs/make_pipeline.py
"""

import runpy
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from page_blocks import fenced, filled

from mindformers_core.pipeline import (
    ScheduleTable,
    StepCosts,
    draw_schedule,
    schedule_class,
    simulate,
    validate,
)
from mindformers_core.pipeline.tables.lowering import lowered
from mindformers_core.pipeline.tables.step import step_from_text

__all__ = ["EXAMPLE", "IMAGES", "PAGE", "blocks", "draw_pictures"]

DOCS = Path(__file__).resolve().parent
PAGE, IMAGES = DOCS / "pipeline.md", DOCS / "images"
EXAMPLES = DOCS.parent / "examples"
EXAMPLE, TRAINING = EXAMPLES / "own_pipeline_schedule.py", EXAMPLES / "train_own_schedule.py"
SCHEDULES = {  # name in a recipe -> stages on every rank, in the table of figures; pictures show the first
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 4),
    "looped_bfs": (2, 4),
    "zb_h1": (1,),
    "zb_v": (2,),
    "dualpipe_v": (2,),
}
SIZES = ((4, 8), (8, 32))  # ranks, micro-batches
RIGHT = (("F0@0", "SF0@0", "RB0@0", "B0@0"), ("RF0@1", "F0@1", "B0@1", "SB0@1"))
WRONG = (  # what is wrong -> the orders of two ranks, for one micro-batch
    ("A step is missing", (RIGHT[0][:3], RIGHT[1])),
    ("A step comes too early", (RIGHT[0], ("RF0@1", "B0@1", "F0@1", "SB0@1"))),
    ("A receive has no send", (("F0@0", "RB0@0", "B0@0"), RIGHT[1])),
    ("Ranks wait for each other", (("RB0@0", "F0@0", "SF0@0", "B0@0"), RIGHT[1])),
)


def costs_of(chunk_num):
    """Every pass of a micro-batch through all of a rank's stages takes 1: forward, input and weight gradients."""
    return StepCosts(1 / chunk_num, 1 / chunk_num, 1 / chunk_num)


def draw_pictures(folder):
    """A picture of every built-in schedule on 4 ranks, with 8 micro-batches, and of the example's."""
    for name, (chunk_num, *_) in SCHEDULES.items():
        schedule = schedule_class(name).planned(4, 8, chunk_num)
        draw_schedule(schedule, Path(folder) / f"pipeline_{name}.svg", costs_of(chunk_num))
    own = runpy.run_path(str(EXAMPLE))["ScheduleEarly1F1B"]
    costs = StepCosts(transfer=0.5)
    for kind, name in ((schedule_class("1f1b"), "1f1b_transfer"), (own, "own")):
        title = f"{kind.__name__}, messages take 0.5"
        draw_schedule(kind.planned(4, 8), Path(folder) / f"pipeline_{name}.svg", costs, title)


def figures(rank_num, micro_batch_num):
    """The table of what the simulator finds."""
    rows = [["schedule", "stages on a rank", "makespan", "bubble", "within spans", "peak live", "messages"]]
    rows.append(["---", *["---:"] * 6])
    for name, chunk_nums in SCHEDULES.items():
        for chunk_num in chunk_nums:
            schedule = schedule_class(name).planned(rank_num, micro_batch_num, chunk_num)
            timeline = simulate(schedule.table, costs_of(chunk_num))
            within = sum(timeline.span_bubble_fractions) / rank_num
            times = [f"{timeline.makespan:.2f}", f"{100 * timeline.bubble_fraction:.1f} %", f"{100 * within:.1f} %"]
            most = [f"{max(timeline.peak_live):g}", str(max(timeline.messages))]
            rows.append([f"`{name}`", str(chunk_num), *times, *most])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def table_of(*orders):
    """The table of ranks with one stage each."""
    steps = tuple(tuple(step_from_text(text) for text in order) for order in orders)
    return ScheduleTable(steps, tuple(range(len(orders))), 1 + max(step.micro_index for step in steps[0]))


def written(table):
    """A table as text, one line for every rank."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(table.orders))


def lowering():
    """A small 1F1B as its author writes it, and lowered in both ways."""
    schedule = schedule_class("1f1b").planned(2, 3)
    table = ScheduleTable(tuple(tuple(schedule.exec_order[rank]) for rank in range(2)), (0, 1), 3)
    parts = (
        ("as construct_exec_order() writes it", table),
        ("lowered: a send returns at once", lowered(table)),
        ("lowered: a send waits for its receive", lowered(table, buffered=False)),
    )
    return "\n\n".join(f"# {title}\n{written(part)}" for title, part in parts)


def faults():
    """What the validator says of wrong tables."""
    parts = []
    for title, orders in WRONG:
        try:
            validate(table_of(*orders))
        except ValueError as error:
            parts.append(f"# {title}\n{written(table_of(*orders))}\nValueError: {error}")
    return "\n\n".join(parts)


def said_by_the_example():
    """What the example prints where it looks at its schedule."""
    said = StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(said):
        runpy.run_path(str(EXAMPLE))["look"](folder)
    return said.getvalue()


def blocks():
    """Name of a block of the page -> its Markdown."""
    return {
        "lowering": fenced("text", lowering()),
        "faults": fenced("text", faults()),
        **{f"figures of {p} ranks, {m} micro-batches": figures(p, m) for p, m in SIZES},
        "example": fenced("python", EXAMPLE.read_text(encoding="utf-8")),
        "training": fenced("python", TRAINING.read_text(encoding="utf-8")),
        "example's output": fenced("text", said_by_the_example()),
    }


if __name__ == "__main__":
    draw_pictures(IMAGES)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks()), encoding="utf-8")
