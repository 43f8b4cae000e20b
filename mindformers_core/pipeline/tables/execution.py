"""Simulated execution of a pipeline table: every rank runs its order, and waits for its receives. Pure Python."""

from typing import NamedTuple

from mindformers_core.pipeline.tables.step import COMPUTE, OTHER_ENDS, SENDS, MetaStep, plain_steps


class Span(NamedTuple):
    """A step with its start and end; sends and receives take no time."""

    step: MetaStep
    start: float
    end: float


def run_orders(table, durations, transfers, buffered=True):
    """Run the orders of all ranks at the same time, to their end or to a deadlock.

    Args:
        table: a `ScheduleTable` that contains both ends of every message.
        durations: {(type, stage): duration} of the compute steps.
        transfers: for every sending stage the time between a send and the arrival of the message.
        buffered: whether a send returns at once; otherwise the send waits for its receive (rendezvous).

    Returns:
        `(spans, stuck)`: for every rank the list of the `Span`s of its steps; and {rank: number of the step, among
        its `plain_steps`} of every rank that waits at a step for ever.
    """
    spans = [[] for _ in table.orders]
    reached = {}  # (micro-batch, type, stage) of a send or receive -> time at which the other end can go on
    waiting = {}  # the same of a step that hasn't run -> the rank that waits for it
    runnable = list(range(table.rank_num))

    def running(rank):
        clock, own_spans = 0.0, spans[rank]
        for step in plain_steps(table.orders[rank]):
            micro, kind, stage, _ = step
            start = clock
            if kind in COMPUTE:
                clock += durations[kind, stage]
            else:
                is_send, message = kind in SENDS, (micro, kind, stage)
                reached[message] = clock + transfers[stage] if is_send else clock
                if message in waiting:
                    runnable.append(waiting.pop(message))
                if not (is_send and buffered):
                    other_kind, distance = OTHER_ENDS[kind]
                    other = micro, other_kind, stage + distance
                    if other not in reached:
                        waiting[other] = rank
                        yield
                    start = clock = max(clock, reached[other])
            own_spans.append(Span(step, start, clock))

    ranks = [running(rank) for rank in range(table.rank_num)]
    while runnable:
        next(ranks[runnable.pop()], None)
    return spans, {rank: len(spans[rank]) for rank in waiting.values()}
