"""Simulated pipeline tables: timelines worked out by hand, published figures, costs by stage and measured."""

from dataclasses import replace

import pytest

from mindformers_core.pipeline.tables.lowering import forward_only, lowered
from mindformers_core.pipeline.tables.simulating import StepCosts, measured_costs, simulate
from mindformers_core.pipeline.tables.step import MetaStepType, step_from_text
from mindformers_core.pipeline.tables.table import ScheduleTable


def table(*orders, micro_batches):
    """A lowered table from one text for every rank, with one stage on each."""
    steps = tuple(tuple(map(step_from_text, order.split())) for order in orders)
    return lowered(ScheduleTable(steps, tuple(range(len(orders))), micro_batches))


def gpipe(rank_num, micro_batch_num):
    micro_batches = range(micro_batch_num)
    orders = [
        " ".join([f"{kind}{micro}@{rank}" for kind in "FB" for micro in micro_batches]) for rank in range(rank_num)
    ]
    return table(*orders, micro_batches=micro_batch_num)


TWO_RANKS = table("F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1 F1@1 I1@1 W1@1", micro_batches=2)


def spans(timeline):
    return [" ".join(f"{step}:{start:g}-{end:g}" for step, start, end in rank_spans) for rank_spans in timeline.spans]


def test_a_timeline_worked_out_by_hand():
    timeline = simulate(TWO_RANKS, StepCosts(forward=1, backward_input=2, backward_weight=1, transfer=0.5))
    assert spans(timeline) == [
        "F0@0:0-1 SF0@0:1-1 F1@0:1-2 SF1@0:2-2 RB0@0:6-6 B0@0:6-9 RB1@0:9-9 B1@0:9-12",
        "RF0@1:1.5-1.5 F0@1:1.5-2.5 B0@1:2.5-5.5 SB0@1:5.5-5.5 RF1@1:5.5-5.5 F1@1:5.5-6.5 I1@1:6.5-8.5 "
        "SB1@1:8.5-8.5 W1@1:8.5-9.5",
    ]
    assert timeline.makespan == 12
    assert timeline.bubble_fraction == pytest.approx(1 - 16 / 24)
    assert timeline.span_bubble_fractions == pytest.approx((4 / 12, 0))
    assert timeline.peak_live == (2, 1)
    assert timeline.messages == (2, 2)


def test_the_parts_of_an_overlap_come_one_after_another():
    given = table("F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1+F1@1 B1@1", micro_batches=2)
    assert spans(simulate(given))[1] == ("RF0@1:1-1 F0@1:1-2 RF1@1:2-2 B0@1:2-4 F1@1:4-5 SB0@1:5-5 B1@1:5-7 SB1@1:7-7")
    assert simulate(given).peak_live == (2, 1)


def test_two_chunks_count_half_each():
    texts = ("F0@0", "F0@1", "F1@0", "B0@1", "B0@0", "F1@1", "B1@1", "B1@0")
    timeline = simulate(ScheduleTable((tuple(map(step_from_text, texts)),), (0, 0), 2))
    assert timeline.peak_live == (1.5,)
    assert (timeline.messages, timeline.bubble_fraction, timeline.makespan) == ((0,), 0, 12)


def test_a_forward_only_table():
    timeline = simulate(forward_only(gpipe(3, 4)))
    assert (timeline.makespan, timeline.peak_live, timeline.messages) == (6, (0, 0, 0), (4, 4, 0))
    assert timeline.bubble_fraction == pytest.approx(2 / 6)


def test_costs_by_stage():
    costs = StepCosts(forward=(1, 3), backward_input=(2, 0), backward_weight=1, transfer=(0.25, 4), backward=(None, 7))
    assert spans(simulate(TWO_RANKS, costs)) == [
        "F0@0:0-1 SF0@0:1-1 F1@0:1-2 SF1@0:2-2 RB0@0:15.25-15.25 B0@0:15.25-18.25 RB1@0:18.25-18.25 B1@0:18.25-21.25",
        "RF0@1:1.25-1.25 F0@1:1.25-4.25 B0@1:4.25-11.25 SB0@1:11.25-11.25 RF1@1:11.25-11.25 F1@1:11.25-14.25 "
        "I1@1:14.25-14.25 SB1@1:14.25-14.25 W1@1:14.25-15.25",
    ]


def test_measured_costs():
    seconds = {(MetaStepType.FWD, 0): 1, (MetaStepType.FWD, 1): 3, (MetaStepType.BWD, 0): 2, (MetaStepType.BWD, 1): 7}
    costs = measured_costs(seconds, transfer=0.5)
    expected = StepCosts((1, 3), (None, None), (None, None), 0.5, (2, 7))
    assert costs == expected
    assert simulate(gpipe(2, 4), costs) == simulate(gpipe(2, 4), replace(costs, backward_input=9, backward_weight=0))
    with pytest.raises(ValueError, match="StepCosts.backward_input: there is none for stage 1, and the table needs it"):
        simulate(TWO_RANKS, costs)
    seconds |= {(MetaStepType.BWD_INPUT, 1): 5, (MetaStepType.BWD_WEIGHT, 1): 1}
    assert simulate(TWO_RANKS, measured_costs(seconds)).spans[1][-1].end == 1 + 3 + 7 + 3 + 5 + 1
    with pytest.raises(ValueError, match="FWD_SEND: 5> of stage 0 isn't one of FWD, BWD, BWD_INPUT, BWD_WEIGHT"):
        measured_costs({(MetaStepType.FWD_SEND, 0): 1.0})


@pytest.mark.parametrize(
    ("costs", "fault"),
    [
        ({"forward": (1, 2, 3)}, r"StepCosts.forward: \(1, 2, 3\) has 3 numbers, the table 2 stages"),
        ({"backward_weight": -1}, "StepCosts.backward_weight: -1 for stage 0 should be a number from 0 on"),
        ({"backward": (1, float("nan"))}, "StepCosts.backward: nan for stage 1 should be a number from 0 on"),
        ({"transfer": float("inf")}, "StepCosts.transfer: inf for stage 0 should be a number from 0 on"),
        ({"transfer": (0, None)}, "StepCosts.transfer: there is none for stage 1"),
        ({"backward_input": None}, "StepCosts.backward: there is none for stage 0, and the table needs it"),
        ({"forward": None}, "StepCosts.forward: there is none for stage 0, and the table needs it"),
    ],
)
def test_costs_that_can_not_be(costs, fault):
    with pytest.raises(ValueError, match=fault):
        simulate(TWO_RANKS, StepCosts(**costs))


def test_only_what_works_is_simulated():
    orders = tuple(tuple(map(step_from_text, order.split())) for order in ("F0@0 B0@0", "F0@1 B0@1"))
    with pytest.raises(ValueError, match=r"needs RB0@0, which rank 0 hasn't; .*: lowered\(table\) adds them"):
        simulate(ScheduleTable(orders, (0, 1), 1))
    with pytest.raises(ValueError, match="deadlock: rank 0 is stuck at step 2, RB0@0"):
        simulate(table("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1", micro_batches=2))
