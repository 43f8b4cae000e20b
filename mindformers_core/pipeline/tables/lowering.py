"""From the steps that a schedule is about to those that ranks carry out: sends and receives. Pure Python."""

from dataclasses import replace

from mindformers_core.pipeline.tables.dependencies import message_bases, message_pairs, plain_steps
from mindformers_core.pipeline.tables.simulating import simulate
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType, overlapped

__all__ = ["forward_only", "lowered"]

_RECEIVES = {
    MetaStepType.FWD: MetaStepType.FWD_RECV,
    MetaStepType.BWD: MetaStepType.BWD_RECV,
    MetaStepType.BWD_INPUT: MetaStepType.BWD_RECV,
}
_SENDS = {
    MetaStepType.FWD: MetaStepType.FWD_SEND,
    MetaStepType.BWD: MetaStepType.BWD_SEND,
    MetaStepType.BWD_INPUT: MetaStepType.BWD_SEND,
}
_MESSAGES = frozenset(_RECEIVES.values()) | frozenset(_SENDS.values())
_FORWARD = frozenset((MetaStepType.FWD, MetaStepType.FWD_SEND, MetaStepType.FWD_RECV))


def lowered(table, buffered=True):
    """The table with the sends and receives that its steps need.

    A table that has a send or receive anywhere is left as it is: its author took them over. Stages of one rank hand
    over without messages.

    Args:
        table: a `ScheduleTable`; only a table that `validate` accepts afterwards is of use.
        buffered: whether a send returns at once. Then a send comes right after its step, and a receive right before
            the step that needs it. Otherwise sends and receives are in one order of all messages, that in which they
            would be sent if a forward step took one unit of time and a backward step two: so no deadlock is possible
            though a send waits for its receive.

    Raises:
        ValueError: with `buffered=False`, a table for which there is no such order, as `validate` has it.
    """
    if any(step[1] in _MESSAGES for order in table.orders for step in plain_steps(order)):
        return table
    deferred = replace(table, orders=tuple(_rank_with_messages(table, rank) for rank in range(table.rank_num)))
    return deferred if buffered else _in_one_order(deferred)


def forward_only(table):
    """The forward half of a table, for evaluation: forward steps, their sends and receives, as they are ordered."""
    return replace(table, orders=tuple(tuple(_forward_steps(order)) for order in table.orders))


def _forward_steps(order):
    for step in order:
        if step.type in _FORWARD:
            yield step
        elif forward := [part for part in step.sub_steps if part.type in _FORWARD]:
            yield forward[0] if len(forward) == 1 else overlapped(*forward)


def _rank_with_messages(table, rank):
    """The order of a rank with sends and receives; a step that isn't on its rank gets none."""
    existing = {place for pair in message_pairs(table.stage_ranks) for place in pair}
    around = {  # (type, stage) -> the type of its receive and that of its send, None where there is none
        (kind, stage): tuple(kinds[kind] if (kinds[kind], stage) in existing else None for kinds in (_RECEIVES, _SENDS))
        for kind in _RECEIVES
        for stage, holder in enumerate(table.stage_ranks)
        if holder == rank
    }
    steps, nothing = [], (None, None)
    for step in table.orders[rank]:
        sends = []
        for micro_index, kind, stage, _ in step.sub_steps or (step,):
            receive_kind, send_kind = around.get((kind, stage), nothing)
            if receive_kind is not None:
                steps.append(MetaStep(micro_index, receive_kind, stage))
            if send_kind is not None:
                sends.append(MetaStep(micro_index, send_kind, stage))
        steps.append(step)
        steps += sends
    return tuple(steps)


def _in_one_order(table):
    """Sends and receives at the time at which the message is sent, other steps at that at which they start."""
    bases, spans = message_bases(table), simulate(table).spans
    sent = {
        bases[span.step[1:3]][1] + span.step.micro_index: span.start
        for rank_spans in spans
        for span in rank_spans
        if span.step.type in _SENDS.values()
    }
    orders = []
    for order, rank_spans in zip(table.orders, spans):
        starts, remaining = [], iter(rank_spans)
        for step in order:
            parts = [next(remaining) for _ in step.sub_steps or (step,)]
            if step.type in _MESSAGES:
                message = bases[step[1:3]][1] + step.micro_index
                starts.append((sent[message], message))
            else:
                starts.append((parts[0].start, len(sent) + 1))  # after the messages of the same time
        orders.append(tuple(step for _, step in sorted(zip(starts, order), key=lambda pair: pair[0])))
    return replace(table, orders=tuple(orders))
