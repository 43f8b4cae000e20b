"""Whether a pipeline table can work; if not, where and why. Pure Python."""

from itertools import repeat

from mindformers_core.pipeline.tables.dependencies import (
    message_bases,
    message_pairs,
    plain_steps,
    step_needs,
    step_parts,
)
from mindformers_core.pipeline.tables.exchanging import exchanged, met
from mindformers_core.pipeline.tables.faults import (
    head_fault,
    missing_fault,
    overlap_fault,
    rank_fault,
    sequence_fault,
    stuck_fault,
)
from mindformers_core.pipeline.tables.step import MetaStepType

__all__ = ["validate"]

_FORWARD = (MetaStepType.FWD, MetaStepType.FWD_SEND, MetaStepType.FWD_RECV)


def validate(table, buffered=True, training=True):
    """Check that ranks which work through a table in order do all that has to be done, and never get stuck.

    On the rank that holds the stage, every micro-batch's FWD comes once on every stage, and so does its backward: BWD,
    or BWD_INPUT and later BWD_WEIGHT. Each comes after what it needs: on the own rank, or a receive; a send comes after
    the step that makes what is sent. Every message is sent once and received once; there are none between stages of
    one rank. The parts of an `OVERLAP` don't need one another. No rank waits for ever.

    Takes time in proportion to the number of steps.

    Args:
        table: a lowered `ScheduleTable`.
        buffered: whether a send returns at once. Otherwise it waits for its receive, and two ranks have to be of one
            mind about the order of all messages between them.
        training: False for a table that is forward only.

    Raises:
        ValueError: the first fault, with rank, number of the step in the rank's order (from 0), and step.
    """
    _raise(head_fault(table))
    bases = message_bases(table)
    kinds = tuple(MetaStepType)[:-1] if training else _FORWARD
    done = bytearray(_start(table, MetaStepType.OVERLAP, 0)) + b"\1" * table.micro_batch_num
    rank_messages = [_checked(table, rank, bases, kinds, done) for rank in range(table.rank_num)]
    _check_complete(table, kinds, done)
    if buffered:
        delays = [0] * len(message_pairs(table.stage_ranks))
        _, waiting = exchanged(rank_messages, repeat(repeat(0)), delays, table.micro_batch_num)
    else:
        _raise(sequence_fault(table, rank_messages))
        waiting = met(rank_messages)
    _raise(stuck_fault(table, waiting))


def _raise(fault):
    if fault:
        raise ValueError(fault)


def _start(table, kind, stage):
    """Where in `done` the bytes for the micro-batches of a type and stage begin."""
    return (kind * table.stage_num + stage) * table.micro_batch_num


def _plan(table, rank, bases, kinds):
    """What to look up in `done` for every step of a rank.

    Returns:
        {(type, stage): (starts of the two parts that it settles, of its two needs, sign and base of its message)};
        where there is one part only, it stands twice, and instead of a need what is always settled.
    """
    always = _start(table, MetaStepType.OVERLAP, 0)
    compute = (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
    plan = {}
    for stage, holder in enumerate(table.stage_ranks):
        for kind in kinds:
            if holder == rank and (kind in compute or (kind, stage) in bases):
                parts = [_start(table, *part) for part in step_parts(kind, stage)]
                needs = [_start(table, *need) for need in step_needs(kind, stage, table.stage_ranks)]
                message = bases.get((kind, stage), (0, 0))
                plan[kind, stage] = (parts[0], parts[-1], *(needs + [always, always])[:2], *message)
    return plan


def _checked(table, rank, bases, kinds, done):
    """Put down in `done` what a rank does; returns its messages."""
    order, micro_batch_num = table.orders[rank], table.micro_batch_num
    plan, messages = _plan(table, rank, bases, kinds), []
    for micro_index, kind, stage, _ in plain_steps(order):
        look_up = plan.get((kind, stage))
        if look_up is None or type(micro_index) is not int or not 0 <= micro_index < micro_batch_num:
            _raise(rank_fault(table, rank, kinds))
        part, other_part, need, other_need, sign, base = look_up
        if done[part + micro_index] or not done[need + micro_index] or not done[other_need + micro_index]:
            _raise(rank_fault(table, rank, kinds))
        done[part + micro_index] = done[other_part + micro_index] = 1
        if sign:
            messages.append(sign * (base + micro_index))
    for number, step in enumerate(order):
        if step[3]:
            _raise(overlap_fault(table, rank, number, step))
    return messages


def _check_complete(table, kinds, done):
    """Compute steps, and the sends of all that is received (what steps need from elsewhere they have received)."""
    computes = (MetaStepType.FWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
    receives = dict(message_pairs(table.stage_ranks))
    for kind, stage in [*((kind, stage) for kind in computes for stage in range(table.stage_num)), *receives]:
        start = _start(table, kind, stage)
        missing = done.find(0, start, start + table.micro_batch_num)
        if kind in kinds and missing >= 0:
            _raise(missing_fault(table, missing - start, (kind, stage), other_end=receives.get((kind, stage))))
