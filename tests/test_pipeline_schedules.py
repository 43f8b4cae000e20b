"""The built-in pipeline schedules: every table that they admit is valid, as short and as lean as promised; names."""

from functools import cache

import pytest
from support.work import calls_in

from mindformers_core.pipeline.schedules.base import PipelineScheduleBase
from mindformers_core.pipeline.schedules.named import SCHEDULES, schedule_class
from mindformers_core.pipeline.tables.lowering import forward_only, lowered
from mindformers_core.pipeline.tables.simulating import StepCosts, simulate
from mindformers_core.pipeline.tables.step import MetaStepType
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.pipeline.tables.validating import validate

RANK_NUMS = range(1, 9)
BY_DAY = 1, 2, 3, 4, 5, 8  # of these
MICRO_BATCH_NUMS = range(1, 33)
CHUNK_NUMS = {"interleaved_1f1b": (1, 2, 3, 4), "looped_bfs": (1, 2, 3, 4), "zb_v": (2,), "dualpipe_v": (2,)}
ADMITTED = {  # how many of the tables of those ranks, micro-batches and chunks
    "gpipe": 256,
    "1f1b": 256,
    "zb_h1": 256,
    "zb_v": 256,
    "dualpipe_v": 192,
    "interleaved_1f1b": 1024,
    "looped_bfs": 1024,
}


def planned(name, rank_num, micro_batch_num, chunk_num=1):
    return schedule_class(name).planned(rank_num, micro_batch_num, chunk_num)


known = cache(planned)


def sizes(name, micro_batch_nums=MICRO_BATCH_NUMS, rank_nums=RANK_NUMS):
    """All (ranks, micro-batches, chunks) that the schedule admits."""
    for rank_num in rank_nums:
        fewest = 2 * rank_num if name == "dualpipe_v" else 1
        for chunk_num in CHUNK_NUMS.get(name, (1,)):
            for micro_batch_num in micro_batch_nums:
                if micro_batch_num >= fewest:
                    yield rank_num, micro_batch_num, chunk_num


def unlowered(schedule):
    orders = tuple(tuple(schedule.exec_order[rank]) for rank in range(schedule.rank_num))
    return ScheduleTable(orders, schedule.table.stage_ranks, schedule.micro_batch_num)


def texts(schedule):
    return [" ".join(map(str, schedule.exec_order[rank])) for rank in range(schedule.rank_num)]


# All tables.


@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_that_are_admitted_are_valid(name):
    """Of every number of ranks and chunks; all numbers of micro-batches at night."""
    for size in sizes(name, micro_batch_nums=(1, 2, 5, 15, 16)):
        validate(forward_only(known(name, *size).table), training=False)  # making a table validates it


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_that_is_admitted_is_valid(name):
    count = 0
    for size in sizes(name):
        table = planned(name, *size).table  # making it validates it
        validate(forward_only(table), training=False)
        count += 1
    assert count == ADMITTED[name]


@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_may_wait_for_their_receives(name, rank_nums=BY_DAY):
    for size in sizes(name, (1, 5, 16), rank_nums):
        table = unlowered(known(name, *size))
        validate(lowered(table, buffered=True), buffered=True)
        rendezvous = lowered(table, buffered=False)
        validate(rendezvous, buffered=False)
        validate(forward_only(rendezvous), buffered=False, training=False)


def work(name, micro_batch_num, chunk_num):
    """What a rank has to do, in time, where every step of a chunk takes 1."""
    return 3 * micro_batch_num * chunk_num


def bubble(name, rank_num, micro_batch_num):
    """Time that every rank is idle, where every step of a chunk takes 1; None where the papers promise nothing."""
    if name in ("gpipe", "1f1b"):
        return 3 * (rank_num - 1)
    if micro_batch_num < rank_num:
        return None
    return (3 if name in ("interleaved_1f1b", "looped_bfs") else 1) * (rank_num - 1)


def peak_limit(name, rank, rank_num, micro_batch_num, chunk_num):
    """Most live micro-batches of a whole rank."""
    rounds = max(1, micro_batch_num // rank_num)
    largest = -(-micro_batch_num // rounds)  # round of interleaved 1F1B
    warm_up = 2 * (rank_num - 1 - rank) + (chunk_num - 1) * largest
    limit = {
        "1f1b": rank_num - rank,
        "zb_h1": rank_num,
        "zb_v": rank_num,
        "dualpipe_v": rank_num + 0.5,
        "interleaved_1f1b": (warm_up + 1) / chunk_num if chunk_num > 1 else rank_num - rank,
    }
    return min(micro_batch_num, limit.get(name, micro_batch_num))


@pytest.mark.parametrize("name", SCHEDULES)
def test_time_and_memory_are_as_promised(name, rank_nums=BY_DAY):
    checked = 0
    for rank_num, micro_batch_num, chunk_num in sizes(name, (1, 2, 4, 5, 8, 15, 16), rank_nums):
        size = f"{name}, {rank_num} ranks, {micro_batch_num} micro-batches, {chunk_num} chunks"
        timeline = simulate(known(name, rank_num, micro_batch_num, chunk_num).table)
        idle = bubble(name, rank_num, micro_batch_num)
        if idle is not None:
            assert timeline.makespan == work(name, micro_batch_num, chunk_num) + idle, size
            checked += 1
        for rank, peak in enumerate(timeline.peak_live):
            assert peak <= peak_limit(name, rank, rank_num, micro_batch_num, chunk_num), f"{size}: rank {rank}"
    assert checked >= 20


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_numbers_of_ranks(name):
    test_sends_may_wait_for_their_receives(name, RANK_NUMS)
    test_time_and_memory_are_as_promised(name, RANK_NUMS)


# Known figures, where F = I = W = 1: (p - 1) / (v m + p - 1) of 3 (p - 1) idle; the zero-bubble schedules p - 1.


@pytest.mark.parametrize(
    ("name", "chunk_num", "small", "large"),
    [
        ("gpipe", 1, "27.3", "17.9"),
        ("1f1b", 1, "27.3", "17.9"),
        ("interleaved_1f1b", 2, "15.8", "9.9"),
        ("interleaved_1f1b", 4, "8.6", "5.2"),
        ("looped_bfs", 2, "15.8", "9.9"),
        ("looped_bfs", 4, "8.6", "5.2"),
        ("zb_h1", 1, "11.1", "6.8"),
        ("zb_v", 2, "5.9", "3.5"),
        ("dualpipe_v", 2, "5.9", "3.5"),
    ],
)
def test_bubbles_are_those_of_the_literature(name, chunk_num, small, large):
    for (rank_num, micro_batch_num), percent in (((4, 8), small), ((8, 32), large)):
        timeline = simulate(planned(name, rank_num, micro_batch_num, chunk_num).table)
        assert f"{100 * timeline.bubble_fraction:.1f}" == percent


@pytest.mark.parametrize(
    ("name", "chunk_num", "peaks"),
    [
        ("gpipe", 1, (8, 8, 8, 8)),
        ("1f1b", 1, (4, 3, 2, 1)),
        ("zb_h1", 1, (4, 4, 4, 4)),
        ("zb_v", 2, (4, 4, 4, 4)),
        ("dualpipe_v", 2, (4.5, 4.5, 4.5, 4.5)),
        ("interleaved_1f1b", 2, (5.5, 4.5, 3.5, 2.5)),
        ("looped_bfs", 2, (8, 8, 8, 8)),
    ],
)
def test_live_micro_batches_are_those_of_the_literature(name, chunk_num, peaks):
    assert simulate(planned(name, 4, 8, chunk_num).table).peak_live == peaks


@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.25, 1.0, 0.875), (2.0, 2.0, 1.0)])
def test_zb_h1_is_as_short_as_its_paper_says(costs):
    forward, backward_input, backward_weight = costs
    for rank_num, micro_batch_num in ((2, 4), (4, 8), (4, 5), (8, 32)):
        timeline = simulate(planned("zb_h1", rank_num, micro_batch_num).table, StepCosts(*costs))
        idle = (rank_num - 1) * (forward + backward_input - backward_weight)
        assert timeline.makespan == micro_batch_num * sum(costs) + idle


def test_interleaved_hides_the_time_that_messages_take():
    table = planned("interleaved_1f1b", 8, 32, 2).table
    at_once, late = (simulate(table, StepCosts(transfer=transfer)).makespan for transfer in (0.0, 0.25))
    assert late - at_once <= 0.25 * 2 * (2 * 8 - 1)  # as if a single micro-batch had to be waited for


def test_zb_v_has_no_bubble_within_a_rank():
    timeline = simulate(planned("zb_v", 4, 8, 2).table)
    assert timeline.span_bubble_fractions == (0.0,) * 4


# Orders.


def test_orders_are_written_as_the_papers_draw_them():
    assert texts(planned("1f1b", 2, 3)) == ["F0@0 F1@0 B0@0 F2@0 B1@0 B2@0", "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1"]
    assert texts(planned("zb_h1", 2, 3)) == [
        "F0@0 F1@0 I0@0 W0@0 F2@0 I1@0 W1@0 I2@0 W2@0",
        "F0@1 I0@1 F1@1 I1@1 W0@1 F2@1 I2@1 W1@1 W2@1",
    ]
    assert texts(planned("looped_bfs", 2, 2, 2)) == [
        "F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0",
        "F0@1 F1@1 F0@3 F1@3 B0@3 B1@3 B0@1 B1@1",
    ]
    assert texts(planned("interleaved_1f1b", 2, 2, 2))[1] == "F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 B0@1 B1@1"
    assert texts(planned("zb_v", 2, 2, 2))[1] == "F0@1 F0@2 F1@1 F1@2 I0@2 I0@1 I1@2 I1@1 W0@2 W0@1 W1@2 W1@1"
    assert texts(planned("dualpipe_v", 2, 4, 2))[1] == (
        "F0@1 F0@2 F1@1 F1@2 F2@1 B0@2 F2@2+B0@1 F3@1+B1@2 F3@2 B1@1 B2@2 B2@1 I3@2 I3@1 W3@2 W3@1"
    )


def test_dualpipe_v_overlaps_a_forward_with_a_backward_of_the_other_chunk():
    rank_num, micro_batch_num = 4, 20
    schedule = planned("dualpipe_v", rank_num, micro_batch_num, 2)
    for rank in range(rank_num):
        pairs = [step.sub_steps for step in schedule.exec_order[rank] if step.type == MetaStepType.OVERLAP]
        assert len(pairs) == 2 * (micro_batch_num - 2 * rank_num) + rank + 2 - (rank == rank_num - 1)
        for forward, backward in pairs:
            assert (forward.type, backward.type) == (MetaStepType.FWD, MetaStepType.BWD)
            assert {forward.stage_index, backward.stage_index} == {rank, 2 * rank_num - 1 - rank}


def test_interleaved_rounds_are_even_and_no_smaller_than_the_ranks():
    order = planned("interleaved_1f1b", 4, 11, 2).exec_order[3]
    forwards = [(step.micro_index, step.stage_index) for step in order if step.type == MetaStepType.FWD]
    rounds = (range(6), range(6, 11))
    assert forwards == [(micro, stage) for micros in rounds for stage in (3, 7) for micro in micros]


@pytest.mark.parametrize("name", ADMITTED)
def test_work_grows_with_the_table(name):
    """To make, lower and validate a step takes as many calls in a large table as in a small one."""

    def work_of_a_step(rank_num, micro_batch_num):
        made, tables = (rank_num, micro_batch_num, CHUNK_NUMS.get(name, (1,))[-1]), []
        calls = calls_in(lambda: tables.append(planned(name, *made).table))
        return calls / sum(map(len, tables[0].orders))

    few = work_of_a_step(8, 16)
    assert few < 20 and work_of_a_step(16, 64) < 1.2 * few


# What is not admitted.


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_no_micro_batches_are_not_admitted(name, count):
    with pytest.raises(ValueError, match=f"micro_batch_num: {count!r} should be a whole number from 1 on"):
        planned(name, 2, count, CHUNK_NUMS.get(name, (1,))[-1])


def test_too_few_micro_batches_are_an_error_that_says_how_many_are_needed():
    message = "ScheduleDualPipeV: micro_batch_num: 7 is too few: it needs at least 8, two for each of the 4 ranks"
    with pytest.raises(ValueError, match=message):
        planned("dualpipe_v", 4, 7, 2)


def test_chunks_must_fit_the_placement():
    for name in ("gpipe", "1f1b", "zb_h1"):
        with pytest.raises(ValueError, match="one stage on every rank, not 8 on 4"):
            planned(name, 4, 8, 2)
    for name in ("zb_v", "dualpipe_v"):
        with pytest.raises(ValueError, match="4 stages on 4 ranks: a V-shaped schedule has two on every rank"):
            planned(name, 4, 8, 1)
    stage = planned("1f1b", 4, 8).stage
    for name in ("interleaved_1f1b", "looped_bfs"):
        uneven = [type(stage)(index, 6, 4) for index in (0, 4)]
        with pytest.raises(ValueError, match="6 stages on 4 ranks: .* a multiple of 4"):
            schedule_class(name)(uneven, 8)


# Names.

MODULE = """
from mindformers_core.pipeline.schedules.gpipe import ScheduleGPipe

class MySchedule(ScheduleGPipe):
    pass

def not_a_class():
    pass
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_schedules.py").write_text(MODULE)
    (tmp_path / "broken_schedules.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)


def test_schedules_are_found_by_name(own_module):
    assert set(SCHEDULES) == set(ADMITTED)
    for name, found in SCHEDULES.items():
        assert schedule_class(name) is found and issubclass(found, PipelineScheduleBase)
        assert schedule_class(f"{found.__module__}.{found.__name__}") is found
    own = schedule_class("own_schedules.MySchedule")
    assert own is schedule_class("own_schedules:MySchedule") and own.__name__ == "MySchedule"
    assert own.planned(2, 4).table == planned("gpipe", 2, 4).table


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("dualpipe", ValueError, r"no pipeline schedule is called 'dualpipe' \(did you mean 'dualpipe_v'\?\)"),
        ("", ValueError, "no pipeline schedule is called '': use gpipe, .* import path"),
        ("own_schedule.MySchedule", ValueError, "'own_schedule.MySchedule': there is no module 'own_schedule'"),
        ("own_schedules.inner.Mine", ValueError, "there is no module 'own_schedules.inner'"),
        ("own_schedules.MySchedul", ValueError, r"'own_schedules' has no 'MySchedul' \(did you mean 'MySchedule'\?\)"),
        ("own_schedules:", ValueError, "no pipeline schedule is called 'own_schedules:'"),
        ("own_schedules.not_a_class", TypeError, "should be a subclass of PipelineScheduleSingle or"),
        ("math.pi", TypeError, "'math.pi' is 3.14.*: it should be a subclass"),
        (7, TypeError, "a string, not 7"),
        ("broken_schedules.Mine", ModuleNotFoundError, "No module named 'a_package_that_is_not_there'"),
    ],
)
def test_wrong_names_are_errors(own_module, name, kind, message):
    with pytest.raises(kind, match=message):
        schedule_class(name)
