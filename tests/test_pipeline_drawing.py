"""Pictures of pipeline schedules show what the simulator found."""

import os
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread
from support.svg_pictures import SVG, number_in, shapes, step_boxes, words

from mindformers_core.pipeline import (
    MetaStepType,
    ScheduleGPipe,
    StepCosts,
    draw_schedule,
    save_chrome_trace,
    schedule_class,
    simulate,
)
from mindformers_core.pipeline.tables import drawing

COMPUTES = (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
SMALL = [
    *(("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("looped_bfs", 2)),
    *(("zb_h1", 1), ("zb_v", 2), ("dualpipe_v", 2)),
]


@pytest.mark.parametrize(("name", "chunk_num"), SMALL)
def test_every_step_has_its_box(name, chunk_num, tmp_path):
    """At its time, in its rank's row, with its micro-batch's number, and a colour for each type and chunk."""
    schedule = schedule_class(name).planned(4, 8, chunk_num)
    timeline = simulate(schedule.table)
    path = tmp_path / "schedule.svg"
    draw_schedule(schedule, path)
    boxes, left, right = step_boxes(path)
    texts = shapes(path)[1]
    tops = sorted({box[3] for box in boxes})
    places = {(tops.index(box[3]), round(box[1]), round(box[2])): box for box in boxes}
    colours = {}
    for rank, spans in enumerate(timeline.spans):
        stages = sorted({span.step.stage_index for span in spans})
        for step, *times in (span for span in spans if span.step.type in COMPUTES):
            start, end = (round(left + (right - left) * time / timeline.makespan) for time in times)
            near = [(rank, start + one, end + other) for one in (-1, 0, 1) for other in (-1, 0, 1)]
            (box,) = [places.pop(place) for place in near if place in places]
            assert number_in(box, texts) == step.micro_index
            colours.setdefault((step.type, stages.index(step.stage_index)), set()).add(box[0])
    assert not places
    assert all(len(shown) == 1 for shown in colours.values()), colours
    assert len(set().union(*colours.values())) == len(colours), colours


def test_what_is_idle_stays_hatched(tmp_path):
    """The part of the rows that no box covers is the bubble."""
    schedule = schedule_class("1f1b").planned(4, 8)
    draw_schedule(schedule, tmp_path / "s.svg", StepCosts(1.0, 0.5, 2.0, transfer=0.75))
    timeline = simulate(schedule.table, StepCosts(1.0, 0.5, 2.0, transfer=0.75))
    boxes, left, right = step_boxes(tmp_path / "s.svg")
    covered = sum(end - start for _, start, end, _, _ in boxes)
    assert abs(1 - covered / (4 * (right - left)) - timeline.bubble_fraction) < 2e-3


def test_the_picture_says_what_it_shows(tmp_path):
    draw_schedule(schedule_class("zb_v").planned(4, 8, 2), tmp_path / "s.svg")
    texts = words(tmp_path / "s.svg")
    style = ElementTree.parse(tmp_path / "s.svg").getroot().get("style")
    assert "ScheduleZBV" in texts and style.startswith("max-width: max(100%, ")  # a wide one fits the window
    (figures,) = [text for text in texts if "bubble" in text]
    for said in ("4 ranks × 2 stages", "8 micro-batches", "bubble 5.9 %", "peak live 4", "makespan 51"):
        assert said in figures
    assert {"rank 3 (stages 3, 4)", "forward", "input gradient", "weight gradient", "waiting"} <= set(texts)
    assert "backward" not in texts and "send, receive" not in texts
    draw_schedule(ScheduleGPipe.planned(1, 1).table, tmp_path / "s.svg", title="Mine")
    texts = words(tmp_path / "s.svg")
    assert "Mine" in texts and any(text.startswith("1 rank, 1 micro-batch ") for text in texts)


def test_measured_transfers_are_drawn(tmp_path):
    """A Timeline is drawn as it is, with thin boxes where sends or receives took time."""
    timeline = simulate(ScheduleGPipe.planned(2, 2).table)
    stretched = tuple(
        tuple(span._replace(end=span.end + 0.25 * (span.step.type not in COMPUTES)) for span in spans)
        for spans in timeline.spans
    )
    draw_schedule(type(timeline)(**{**vars(timeline), "spans": stretched}), tmp_path / "s.svg")
    boxes, _, _ = step_boxes(tmp_path / "s.svg")
    thin = [box for box in boxes if box[4] - box[3] < 10]
    assert len(thin) == 8 and len(boxes) == 8 + 2 * 2 * 2
    assert "send, receive" in words(tmp_path / "s.svg")


def test_equal_input_gives_an_equal_file(tmp_path):
    schedule = schedule_class("1f1b").planned(2, 4)
    draw_schedule(schedule, tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black", "svg.fonttype": "path"}):
        draw_schedule(schedule, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()


def test_png_has_the_same_colours(tmp_path):
    schedule = schedule_class("zb_h1").planned(2, 4)
    draw_schedule(schedule, tmp_path / "s.svg")
    draw_schedule(schedule, tmp_path / "s.PNG")
    pixels = imread(tmp_path / "s.PNG", format="png")[..., :3]
    shown = {
        "#" + bytes(color).hex() for color in np.unique((pixels.reshape(-1, 3) * 255).round().astype("u1"), axis=0)
    }
    assert {box[0] for box in step_boxes(tmp_path / "s.svg")[0]} <= shown


def test_large_tables_stay_small_files(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "_MANY_BOXES", 1000)
    schedule = schedule_class("1f1b").planned(40, 14)
    draw_schedule(schedule, tmp_path / "s.svg")
    root = ElementTree.parse(tmp_path / "s.svg").getroot()
    width, height = (float(root.get(name).removesuffix("pt")) / 72 for name in ("width", "height"))
    assert 24 < width < 28 and 16 < height < 18
    assert len(list(root.iter(f"{SVG}image"))) == 1
    assert not step_boxes(tmp_path / "s.svg")[0]


class Unfit:
    """Looks like a schedule."""

    table = "F0@0"


@pytest.mark.parametrize("given", [Unfit(), "1f1b", None])
def test_what_is_no_schedule(given, tmp_path):
    with pytest.raises(
        TypeError, match="a schedule, a ScheduleTable or a Timeline is needed, not (str|Unfit|NoneType)"
    ):
        draw_schedule(given, tmp_path / "s.svg")
    assert not os.listdir(tmp_path)


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    schedule = ScheduleGPipe.planned(2, 2)
    with pytest.raises(ValueError, match=r"'.*s\.jpg': the name should end with \.svg or \.png"):
        draw_schedule(schedule, tmp_path / "s.jpg")
    with pytest.raises(TypeError, match="costs are for schedules and tables"):
        draw_schedule(simulate(schedule.table), tmp_path / "s.svg", StepCosts())
    with pytest.raises(ValueError, match="no forward or backward step that takes time"):
        draw_schedule(schedule, tmp_path / "s.svg", StepCosts(0, 0, 0))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '/.*\[plot\]'"):
        draw_schedule(schedule, tmp_path / "s.svg")
    save_chrome_trace(schedule, tmp_path / "s.json")
    assert os.listdir(tmp_path) == ["s.json"]


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    (tmp_path / "s.svg").write_text("before")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        draw_schedule(ScheduleGPipe.planned(2, 2), tmp_path / "s.svg")
    assert os.listdir(tmp_path) == ["s.svg"] and (tmp_path / "s.svg").read_text() == "before"
