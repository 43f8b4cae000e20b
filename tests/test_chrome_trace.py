"""Traces of pipeline schedules for chrome://tracing show what the simulator found, or what was measured."""

import json
import re

import pytest

from mindformers_core.pipeline import (
    MetaStepType,
    ScheduleGPipe,
    StepCosts,
    save_chrome_trace,
    schedule_class,
    simulate,
)
from mindformers_core.pipeline.tables.execution import Span
from mindformers_core.pipeline.tables.step import step_from_text

COMPUTES = (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
COSTS = StepCosts(1e-3, 2e-3, 3e-3, transfer=5e-4)


def test_the_chrome_trace_has_every_step(tmp_path):
    schedule = schedule_class("dualpipe_v").planned(4, 8, 2)
    save_chrome_trace(schedule, tmp_path / "s.json", COSTS)
    events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
    spans = simulate(schedule.table, COSTS).spans
    expected = sorted(
        (rank, str(span.step), round(span.start * 1e6, 3), round((span.end - span.start) * 1e6, 3))
        for rank in range(4)
        for span in spans[rank]
        if span.step.type in COMPUTES
    )
    steps = [event for event in events if event["ph"] == "X"]
    assert sorted((e["tid"], e["name"], round(e["ts"], 3), round(e["dur"], 3)) for e in steps) == expected
    assert {event["pid"] for event in events} == {0}
    names = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert names == [(rank, f"rank {rank}") for rank in range(4)]
    colours = {(event["cat"], event["cname"]) for event in steps}
    assert len(colours) == 4 and len({colour for _, colour in colours}) == 4
    first = min(steps, key=lambda event: event["ts"])
    assert first["args"] == {"micro-batch": 0, "stage": 0} and first["cat"] == "forward"


def test_every_message_is_an_arrow(tmp_path):
    """From inside the step that makes it to the start of the step that takes it, on another rank, later."""
    schedule = schedule_class("zb_v").planned(4, 8, 2)
    save_chrome_trace(schedule, tmp_path / "s.json", COSTS)
    events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
    steps = {event["name"]: event for event in events if event["ph"] == "X"}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == kind} for kind in "sf")
    messages = simulate(schedule.table).messages
    assert len(starts) == sum(messages) > 0 and starts.keys() == ends.keys()
    made = {"F": 1, "I": -1}  # letter -> where the taking stage is
    for number, start in starts.items():
        (maker,) = [
            e for e in steps.values() if e["tid"] == start["tid"] and e["ts"] < start["ts"] < e["ts"] + e["dur"]
        ]
        letter, micro, stage = re.fullmatch(r"([FI])(\d+)@(\d+)", maker["name"]).groups()
        taker = steps[f"{letter}{micro}@{int(stage) + made[letter]}"]
        assert (taker["tid"], taker["ts"]) == (ends[number]["tid"], ends[number]["ts"]) and ends[number]["bp"] == "e"
        assert taker["tid"] != maker["tid"] and taker["ts"] > start["ts"]


def test_measured_spans_are_traced_in_seconds(tmp_path):
    measured = [
        [Span(step_from_text("F0@0"), 10.0, 10.5), Span(step_from_text("SF0@0"), 10.5, 10.625)],
        [Span(step_from_text("RF0@1"), 10.5, 10.75), Span(step_from_text("B0@1"), 10.75, 11.0)],
    ]
    save_chrome_trace(measured, tmp_path / "s.json")
    events = json.loads((tmp_path / "s.json").read_text())["traceEvents"]
    found = [(e["name"], e["cat"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [
        ("F0@0", "forward", 10_000_000, 500_000),
        ("SF0@0", "send", 10_500_000, 125_000),
        ("RF0@1", "receive", 10_500_000, 250_000),
        ("B0@1", "backward", 10_750_000, 250_000),
    ]


def test_what_cannot_be_traced(tmp_path):
    schedule = ScheduleGPipe.planned(2, 2)
    with pytest.raises(ValueError, match=r"the name should end with \.json \(did you mean 'json'\?\)"):
        save_chrome_trace(schedule, tmp_path / "s.jsn")
    with pytest.raises(TypeError, match="entry 1 of the measured spans should be a sequence of Span"):
        save_chrome_trace([[], ["F0@0"]], tmp_path / "s.json")
    with pytest.raises(TypeError, match="measured spans are settled"):
        save_chrome_trace([[]], tmp_path / "s.json", COSTS)
    with pytest.raises(TypeError, match="a schedule, a ScheduleTable or a Timeline is needed, not str"):
        save_chrome_trace("1f1b", tmp_path / "s.json")
    assert not list(tmp_path.iterdir())
