"""Pipeline tables: texts of steps, lowering, and what the validator says of planted faults."""

from dataclasses import replace

import pytest

from mindformers_core.pipeline.tables.lowering import forward_only, lowered
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType, overlapped, step_from_text
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.pipeline.tables.validating import validate


def table(*orders, ranks=None, micro_batches=2):
    """A table from one text for every rank; by default one stage on each."""
    return ScheduleTable(
        tuple(tuple(map(step_from_text, order.split())) for order in orders),
        tuple(range(len(orders))) if ranks is None else ranks,
        micro_batches,
    )


def texts(table):
    return [" ".join(map(str, order)) for order in table.orders]


def refused(table, buffered=True, training=True):
    with pytest.raises(ValueError) as error:
        validate(table, buffered=buffered, training=training)
    return str(error.value)


# GPipe on two ranks, and two chunks on each of two ranks in a V: stages 1 and 2 are both on rank 1.
GPIPE = table("F0@0 F1@0 B0@0 B1@0", "F0@1 F1@1 B0@1 B1@1")
V_SHAPE = table("F0@0 F0@3 B0@3 B0@0", "F0@1 F0@2 B0@2 B0@1", ranks=(0, 1, 1, 0), micro_batches=1)


# Texts of steps.


def test_texts_of_steps_round_trip():
    kinds = [kind for kind in MetaStepType if kind != MetaStepType.OVERLAP]
    steps = [MetaStep(micro, kind, stage) for kind in kinds for micro in (0, 7, 120) for stage in (0, 3, 255)]
    steps += [overlapped(*steps[number : number + 3]) for number in range(0, len(steps), 5)]
    assert len({*map(str, steps)}) == len(steps)
    for step in steps:
        again = step_from_text(str(step))
        assert again == step
        assert type(again.type) is MetaStepType and all(type(part) is MetaStep for part in again.sub_steps)


def test_the_letters_of_steps():
    assert str(MetaStep(3, MetaStepType.FWD, 1)) == "F3@1"
    letters = {"FWD": "F", "BWD": "B", "BWD_INPUT": "I", "BWD_WEIGHT": "W"}
    letters |= {"FWD_RECV": "RF", "FWD_SEND": "SF", "BWD_RECV": "RB", "BWD_SEND": "SB"}
    for kind, text in letters.items():
        assert str(MetaStep(0, MetaStepType[kind], 0)) == f"{text}0@0"
    assert str(overlapped(step_from_text("F5@0"), step_from_text("B3@3"))) == "F5@0+B3@3"


@pytest.mark.parametrize("text", ["", "F3", "F@1", "f3@1", "X3@1", "F3@1+", "F-1@0", "F3@1 B3@1", "OVERLAP1@1"])
def test_what_is_no_step(text):
    with pytest.raises(ValueError, match=r"is no step: .*F \(FWD\), B \(BWD\), I \(BWD_INPUT\)"):
        step_from_text(text)


def test_a_table_of_something_else():
    with pytest.raises(TypeError, match="step 1 of rank 0: 'F1@0' should be a MetaStep"):
        ScheduleTable(((MetaStep(0, MetaStepType.FWD, 0), "F1@0"),), (0,), 2)
    with pytest.raises(TypeError, match=r"step 0 of rank 0: \(0, .*\) should be a MetaStep"):
        ScheduleTable(((tuple(MetaStep(0, MetaStepType.FWD, 0)),),), (0,), 1)
    with pytest.raises(TypeError, match=r"step 0 of rank 1: MetaStep\(.*should be a MetaStep, and made of such"):
        ScheduleTable(((), (overlapped("F0@0", "F1@0"),)), (0, 1), 2)


# Lowering.


def test_lowering_puts_messages_around_steps():
    assert texts(lowered(GPIPE)) == [
        "F0@0 SF0@0 F1@0 SF1@0 RB0@0 B0@0 RB1@0 B1@0",
        "RF0@1 F0@1 RF1@1 F1@1 B0@1 SB0@1 B1@1 SB1@1",
    ]


def test_stages_of_one_rank_hand_over_without_messages():
    assert texts(lowered(V_SHAPE)) == [
        "F0@0 SF0@0 RF0@3 F0@3 B0@3 SB0@3 RB0@0 B0@0",
        "RF0@1 F0@1 F0@2 SF0@2 RB0@2 B0@2 B0@1 SB0@1",
    ]
    alone = table("F0@0 F0@1 I0@1 I0@0 W0@0 W0@1", ranks=(0, 0), micro_batches=1)
    assert lowered(alone) == alone


def test_input_gradients_are_sent_and_overlaps_kept_whole():
    given = table("F0@0 F1@0 I0@0 W0@0 B1@0", "F0@1 B0@1+F1@1 I1@1 W1@1")
    assert texts(lowered(given)) == [
        "F0@0 SF0@0 F1@0 SF1@0 RB0@0 I0@0 W0@0 RB1@0 B1@0",
        "RF0@1 F0@1 RF1@1 B0@1+F1@1 SB0@1 I1@1 SB1@1 W1@1",
    ]


def test_a_table_with_messages_of_its_own_is_left_alone():
    own = table("F0@0 SF0@0 B0@0", "RF0@1 F0@1 B0@1", micro_batches=1)
    assert lowered(own) is own and lowered(own, buffered=False) is own
    assert lowered(lowered(GPIPE)) == lowered(GPIPE)


def test_lowering_for_sends_that_wait():
    one_f_one_b = table("F0@0 F1@0 B0@0 F2@0 B1@0 B2@0", "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1", micro_batches=3)
    deferred = lowered(one_f_one_b)
    validate(deferred)
    assert "have different orders of the messages between them" in refused(deferred, buffered=False)
    in_one_order = lowered(one_f_one_b, buffered=False)
    validate(in_one_order, buffered=False)
    assert texts(in_one_order) == [
        "F0@0 SF0@0 F1@0 SF1@0 RB0@0 B0@0 F2@0 SF2@0 RB1@0 B1@0 RB2@0 B2@0",
        "RF0@1 F0@1 RF1@1 B0@1 SB0@1 F1@1 B1@1 RF2@1 SB1@1 F2@1 B2@1 SB2@1",
    ]


def test_a_table_that_can_not_work_has_no_order_of_messages():
    with pytest.raises(ValueError, match="step 1 of rank 0, B0@0: it needs F0@0"):
        lowered(table("B0@0 F0@0", "F0@1 B0@1", micro_batches=1), buffered=False)


def test_the_forward_half():
    given = table("F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1+F1@1 B1@1")
    assert texts(forward_only(given)) == ["F0@0 F1@0", "F0@1 F1@1"]
    assert texts(forward_only(lowered(given))) == ["F0@0 SF0@0 F1@0 SF1@0", "RF0@1 F0@1 RF1@1 F1@1"]
    validate(forward_only(lowered(given)), training=False)
    assert texts(forward_only(table("F0@0+B1@0+F2@0+W3@0"))) == ["F0@0+F2@0"]


# Faults.

LOWERED = lowered(GPIPE)


def changed(rank, *changes, of=LOWERED):
    """A table with texts replaced in the order of one rank: pairs (there, instead)."""
    orders = texts(of)
    for there, instead in changes:
        assert there in orders[rank]
        orders[rank] = orders[rank].replace(there, instead, 1)
    return table(*orders, ranks=of.stage_ranks, micro_batches=of.micro_batch_num)


SELF_MESSAGE = "stages 1 and 2 are both on rank 1, which sends itself nothing"
FAULTS = {
    "rank 0 has no B1@0 or I1@0: the BWD_INPUT of micro-batch 1 on stage 0 is missing": changed(0, (" RB1@0 B1@0", "")),
    "rank 0 has no F1@0: the FWD of micro-batch 1 on stage 0 is missing": lowered(
        table("F0@0 B0@0", "F0@1 B0@1", micro_batches=2)
    ),
    "rank 1 has no B1@1 or W1@1: the BWD_WEIGHT of micro-batch 1 on stage 1 is missing": changed(1, (" B1@1", " I1@1")),
    "step 4 of rank 1, F0@1: that was already done by step 1, F0@1": changed(1, (" B0@1", " F0@1 B0@1")),
    "step 5 of rank 1, W0@1: that was already done by step 4, B0@1": changed(1, (" B0@1", " B0@1 W0@1")),
    "step 6 of rank 1, B0@1: that was already done by step 4, I0@1": changed(1, (" B0@1", " I0@1 W0@1 B0@1")),
    "step 5 of rank 1, I0@1: that was already done by step 4, B0@1": changed(1, (" B0@1", " B0@1 I0@1")),
    "step 2 of rank 0, SF0@0: that was already done by step 1, SF0@0": changed(0, ("SF0@0", "SF0@0 SF0@0")),
    "step 5 of rank 1, F1@1: that was already done by step 1, F1@1": lowered(
        table("F0@0 F1@0 B0@0 B1@0", "F1@1 B1@1 F1@1")
    ),
    "step 4 of rank 0, F0@1: stage 1 is on rank 1": changed(0, (" RB0@0", " F0@1 RB0@0")),
    "step 0 of rank 0, F0@1: stage 1 is on rank 1": lowered(table("F0@1 B0@1", "F0@0 B0@0", micro_batches=1)),
    "step 0 of rank 0, F2@0: there is no micro-batch 2; they are 0 to 1": changed(0, ("F0@0", "F2@0")),
    "step 0 of rank 0, F0@2: there is no stage 2; stages are 0 to 1": changed(0, ("F0@0", "F0@2")),
    "step 0 of rank 1, B0@1: it needs F0@1, which comes only as step 3": lowered(
        table("F0@0 B0@0", "B0@1 F0@1", micro_batches=1)
    ),
    "step 2 of rank 1, W0@1: it needs I0@1, which comes only as step 3": lowered(
        table("F0@0 B0@0", "F0@1 W0@1 I0@1", micro_batches=1)
    ),
    "step 0 of rank 0, F0@1: it needs F0@0, which comes only as step 1": table(
        "F0@1 F0@0 B0@1 B0@0", ranks=(0, 0), micro_batches=1
    ),
    "step 2 of rank 0, B0@0: it needs B0@1, which comes only as step 3": table(
        "F0@0 F0@1 B0@0 B0@1", ranks=(0, 0), micro_batches=1
    ),
    "step 0 of rank 0, SF0@0: it needs F0@0, which comes only as step 1": changed(0, ("F0@0 SF0@0", "SF0@0 F0@0")),
    "step 4 of rank 1, SB0@1: it needs B0@1, which comes only as step 5": changed(1, ("B0@1 SB0@1", "SB0@1 B0@1")),
    "step 0 of rank 1, F0@1: it needs RF0@1, which comes only as step 1": changed(1, ("RF0@1 F0@1", "F0@1 RF0@1")),
    "step 0 of rank 1, F0@1: it needs RF0@1, which rank 1 hasn't": changed(1, ("RF0@1 ", "")),
    "step 2 of rank 0, B0@0: it needs RB0@0, which rank 0 hasn't; the table has no sends and receives: "
    "lowered(table) adds them": GPIPE,
    "rank 0 has no SF1@0, the other end of step 2 of rank 1, RF1@1": changed(0, (" SF1@0", "")),
    "rank 1 has no SB0@1, the other end of step 4 of rank 0, RB0@0": changed(1, (" SB0@1", "")),
    f"step 3 of rank 1, SF0@1: {SELF_MESSAGE}": changed(1, (" F0@2", " F0@2 SF0@1"), of=lowered(V_SHAPE)),
    f"step 2 of rank 1, RF0@2: {SELF_MESSAGE.replace('1 and 2', '2 and 1')}": changed(
        1, (" F0@2", " RF0@2 F0@2"), of=lowered(V_SHAPE)
    ),
    "step 0 of rank 0, RF0@0: stage 0 is the first: there is nothing to send or receive": changed(
        0, ("F0@0", "RF0@0 F0@0")
    ),
    "step 4 of rank 1, SF1@1: stage 1 is the last: there is nothing to send or receive": changed(
        1, (" F1@1", " F1@1 SF1@1")
    ),
    "step 4 of rank 1, F1@1+B1@1: B1@1 needs F1@1, so they can't overlap": table(
        "F0@0 SF0@0 F1@0 SF1@0 RB0@0 B0@0 RB1@0 B1@0", "RF0@1 F0@1 RF1@1 B0@1 F1@1+B1@1 SB0@1 SB1@1"
    ),
    "deadlock: rank 0 is stuck at step 2, RB0@0, waiting for SB0@1 of rank 1 (its step 5), which is stuck at step 2, "
    "RF1@1, waiting for SF1@0 of rank 0 (its step 5)": lowered(table("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1")),
    "stage_ranks: stage 1 is on rank 2, but the table has orders of 2 rank(s)": replace(GPIPE, stage_ranks=(0, 2)),
    "stage_ranks: there are no stages": replace(GPIPE, stage_ranks=()),
    "micro_batch_num: 0 should be a whole number from 1 on": replace(GPIPE, micro_batch_num=0),
    "micro_batch_num: 2.0 should be a whole number from 1 on": replace(GPIPE, micro_batch_num=2.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault):
    assert refused(FAULTS[fault]) == fault


def test_faults_of_texts_that_are_no_whole_numbers():
    step = MetaStep(0.0, MetaStepType.FWD, 0)
    given = replace(LOWERED, orders=((step, *LOWERED.orders[0][1:]), LOWERED.orders[1]))
    assert refused(given) == "step 0 of rank 0, F0.0@0: there is no micro-batch 0.0; they are 0 to 1"


def test_what_a_forward_only_table_may_have():
    half = forward_only(LOWERED)
    validate(half, training=False)
    assert refused(half) == "rank 0 has no B0@0 or I0@0: the BWD_INPUT of micro-batch 0 on stage 0 is missing"
    fault = "step 5 of rank 0, B0@0: in a forward-only table there are FWD, FWD_SEND, FWD_RECV"
    assert refused(LOWERED, training=False) == fault
    fault = "rank 0 has no SF1@0, the other end of step 2 of rank 1, RF1@1"
    assert refused(changed(0, (" SF1@0", ""), of=half), training=False) == fault


def test_a_deadlock_names_the_circle_first_and_who_waits_behind_it():
    given = table("F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1", "F0@2 B0@2 F1@2 B1@2")
    assert refused(lowered(given)) == (
        "deadlock: rank 0 is stuck at step 2, RB0@0, waiting for SB0@1 of rank 1 (its step 8), which is stuck at step "
        "3, RF1@1, waiting for SF1@0 of rank 0 (its step 5); rank 2 is stuck at step 4, RF1@2, waiting for SF1@1 of "
        "rank 1 (its step 5)"
    )
    given = table("F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1 F1@1 B1@1", "F0@2 F1@2 B0@2 B1@2")
    assert refused(lowered(given)) == (
        "deadlock: rank 1 is stuck at step 3, RB0@1, waiting for SB0@2 of rank 2 (its step 5), which is stuck at step "
        "2, RF1@2, waiting for SF1@1 of rank 1 (its step 8); rank 0 is stuck at step 4, RB0@0, waiting for SB0@1 of "
        "rank 1 (its step 5)"
    )


def test_a_deadlock_of_many_ranks_is_cut_short():
    """Rank 0 needs micro-batch 0 from the last before it makes 1, but all others start with 1."""
    orders = [f"F1@{rank} F0@{rank} B0@{rank} B1@{rank}" for rank in range(9)]
    orders[0] = "F0@0 F0@9 F1@0 F1@9 B0@9 B0@0 B1@9 B1@0"
    fault = refused(lowered(table(*orders, ranks=(*range(9), 0))))
    assert fault.startswith("deadlock: rank 0 is stuck at step 2, RF0@9, waiting for SF0@8 of rank 8 (its step 5), wh")
    assert fault.endswith(" SF1@5 of rank 5 (its step 2), and so on, in a circle of 9 ranks")


def test_two_ranks_of_different_minds_about_messages():
    given = lowered(table("F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1 F1@1 B1@1"))
    validate(given)
    assert refused(given, buffered=False) == (
        "ranks 0 and 1 have different orders of the messages between them, but sends wait for their receives: where "
        "rank 0 has SF1@0 (its step 3), rank 1 has SB0@1 (its step 3)"
    )


def test_sends_that_wait_in_a_circle():
    """Every rank wants to send before it receives; any two are of one mind about their messages."""
    orders = ("F0@0 F1@0 F2@0 F0@3 F1@3 F2@3", "F0@1 F1@1 F2@1", "F0@2 F1@2 F2@2")
    half = lowered(table(*orders, ranks=(0, 1, 2, 0), micro_batches=3))
    validate(half, training=False)
    assert refused(half, buffered=False, training=False) == (
        "deadlock: rank 0 is stuck at step 5, SF2@0, waiting for RF2@1 of rank 1 (its step 6), which is stuck at step "
        "5, SF1@1, waiting for RF1@2 of rank 2 (its step 3), which is stuck at step 2, SF0@2, waiting for RF0@3 of "
        "rank 0 (its step 6)"
    )
