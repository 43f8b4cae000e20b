"""From the compute steps that a schedule writes to the steps that ranks run, with sends and receives. Pure Python."""

from dataclasses import replace

from mindformers_core.pipeline.tables.dependencies import (
    FORWARD,
    OTHER_ENDS,
    is_message,
    message_sends,
    other_end,
    plain_steps,
)
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
    if any(step[1] in OTHER_ENDS for order in table.orders for step in plain_steps(order)):
        return table
    deferred = replace(table, orders=tuple(_rank_with_messages(table, rank) for rank in range(table.rank_num)))
    return deferred if buffered else _in_one_order(deferred)


def forward_only(table):
    """The forward half of a table, for evaluation: forward steps, their sends and receives, as they are ordered."""
    return replace(table, orders=tuple(tuple(_forward_steps(order)) for order in table.orders))


def _forward_steps(order):
    for step in order:
        if step.type in FORWARD:
            yield step
        elif forward := [part for part in step.sub_steps if part.type in FORWARD]:
            yield forward[0] if len(forward) == 1 else overlapped(*forward)


def _rank_with_messages(table, rank):
    """The order of a rank with sends and receives; a step that isn't on its rank gets none."""
    own = [stage for stage, holder in enumerate(table.stage_ranks) if holder == rank]
    places = {(kind, stage) for kind in OTHER_ENDS for stage in own if is_message(kind, stage, table.stage_ranks)}
    steps = []
    for step in table.orders[rank]:
        sends = []
        for micro, kind, stage, _ in step.sub_steps or (step,):
            for kinds, messages in ((_RECEIVES, steps), (_SENDS, sends)):
                if kind in kinds and (kinds[kind], stage) in places:
                    messages.append(MetaStep(micro, kinds[kind], stage))
        steps += [step, *sends]
    return tuple(steps)


def _in_one_order(table):
    """Sends and receives at the time at which the message is sent, other steps at that at which they start."""
    spans = simulate(table).spans
    sent = {span.step: span.start for rank_spans in spans for span in rank_spans if span.step.type in _SENDS.values()}
    numbers = {send: number for number, send in enumerate(message_sends(table.stage_ranks))}
    orders = []
    for order, rank_spans in zip(table.orders, spans):
        keys, remaining = [], iter(rank_spans)
        for step in order:
            first = [next(remaining) for _ in step.sub_steps or (step,)][0]
            if step.type in OTHER_ENDS:
                send = step if step in sent else other_end(step)
                keys.append((sent[send], numbers[send[1:3]], step.micro_index))
            else:
                keys.append((first.start, len(numbers)))  # after the messages of the same time
        orders.append(tuple(step for _, step in sorted(zip(keys, order), key=lambda pair: pair[0])))
    return replace(table, orders=tuple(orders))
