"""Random pipeline tables: lowered ones work, spoilt ones are refused, and times agree with a naive simulation."""

import random
from dataclasses import replace

import pytest
from support.nightly import seeds
from support.pipeline_random_tables import (
    COMPUTE,
    PARTNERS,
    SENDS,
    flat,
    naive_peak_live,
    naive_times,
    random_table,
    works,
)

from mindformers_core.pipeline.tables.lowering import forward_only, lowered
from mindformers_core.pipeline.tables.simulating import StepCosts, simulate
from mindformers_core.pipeline.tables.step import MetaStepType
from mindformers_core.pipeline.tables.validating import validate


@pytest.mark.parametrize("start", seeds(500, 2000, 250))
def test_random_tables_work_and_take_the_time_that_they_should(start):
    for seed in range(start, start + 250):
        rng = random.Random(seed)
        given = random_table(rng)
        deferred, in_one_order = lowered(given), lowered(given, buffered=False)
        validate(deferred)
        assert works(deferred), seed
        validate(in_one_order)
        validate(in_one_order, buffered=False)
        assert works(in_one_order, buffered=False), seed
        validate(forward_only(in_one_order), buffered=False, training=False)
        validate(forward_only(deferred), training=False)
        for table in (deferred, in_one_order):
            assert [[step for step in flat(order) if step.type in COMPUTE] for order in table.orders] == [
                flat(order) for order in given.orders
            ]
        check_timeline(given, deferred, random_costs(rng, given.stage_num), seed)


def random_costs(rng, stage_num):
    """Whole numbers, so that nothing is rounded."""
    fewest = {"forward": 1, "backward_input": 1, "backward_weight": 1, "transfer": 0}
    return StepCosts(**{name: tuple(rng.randint(few, 5) for _ in range(stage_num)) for name, few in fewest.items()})


def check_timeline(given, deferred, costs, seed):
    """Whether the simulation of a table agrees with the naive one."""
    timeline, times = simulate(deferred, costs), naive_times(given, costs)
    spans = [span for rank_spans in timeline.spans for span in rank_spans]
    assert {span.step[:3]: span[1:] for span in spans if span.step.type in COMPUTE} == times, seed
    assert [[span.step for span in rank_spans] for rank_spans in timeline.spans] == [*map(flat, deferred.orders)]
    assert all(span.start == span.end for span in spans if span.step.type in PARTNERS)
    assert timeline.makespan == max(end for _, end in times.values())
    idle = 0
    for rank in range(given.rank_num):
        own = [span for (_, _, stage), span in times.items() if given.stage_ranks[stage] == rank]
        first, last, busy = min(own)[0], max(end for _, end in own), sum(end - start for start, end in own)
        assert timeline.span_bubble_fractions[rank] == pytest.approx((last - first - busy) / (last - first), abs=1e-12)
        idle += timeline.makespan - busy
        assert timeline.peak_live[rank] == naive_peak_live(times, given.stage_ranks, rank), seed
        assert timeline.messages[rank] == sum(step.type in SENDS for step in flat(deferred.orders[rank]))
    whole = timeline.makespan * given.rank_num
    assert timeline.bubble_fraction == pytest.approx(idle / whole, abs=1e-12)


def spoilt(rng, table):
    """A table with one thing changed at random: often it can't work any more."""
    orders = [list(order) for order in table.orders]
    order = rng.choice([order for order in orders if order])
    place = rng.randrange(len(order))
    step = order[place]
    what = rng.choice(("leave out", "twice", "swap", "move", "other rank", "micro-batch", "stage", "type"))
    if what == "leave out":
        del order[place]
    elif what == "twice":
        order.insert(rng.randrange(len(order) + 1), step)
    elif what == "swap":
        other = rng.randrange(len(order))
        order[place], order[other] = order[other], step
    elif what == "move":
        order.insert(rng.randrange(len(order)), order.pop(place))
    elif what == "other rank":
        other_order = rng.choice(orders)
        other_order.insert(rng.randrange(len(other_order) + 1), order.pop(place))
    elif what == "micro-batch":
        order[place] = step._replace(micro_index=rng.randint(-1, table.micro_batch_num))
    elif what == "stage":
        order[place] = step._replace(stage_index=rng.randint(-1, table.stage_num))
    else:
        order[place] = step._replace(type=MetaStepType(rng.randrange(8)))
    return replace(table, orders=tuple(map(tuple, orders)))


@pytest.mark.parametrize("start", seeds(100, 400, 100))
@pytest.mark.parametrize("buffered", [True, False])
def test_the_verdict_on_spoilt_tables(buffered, start):
    verdicts = {True: 0, False: 0}
    for seed in range(start, start + 100):
        rng = random.Random(seed)
        good = lowered(random_table(rng, overlap=0), buffered=rng.random() < 0.5)
        for _ in range(10):
            given = spoilt(rng, good)
            verdict = accepted(given, buffered)
            assert verdict == works(given, buffered), (seed, given)
            verdicts[verdict] += 1
    assert min(verdicts.values()) > 50, verdicts


def accepted(table, buffered):
    try:
        validate(table, buffered=buffered)
    except ValueError:
        return False
    return True
