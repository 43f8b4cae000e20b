"""Adds the sends and receives to a schedule's compute steps, and removes the backward steps. Pure Python."""

from dataclasses import replace

from mindformers_core.pipeline.tables.simulating import simulate
from mindformers_core.pipeline.tables.step import FORWARD, OTHER_ENDS, SENDS, MetaStep, MetaStepType, overlapped

_MESSAGES = {  # type of a compute step -> types of the receive before it, and of the send after it
    MetaStepType.FWD: (MetaStepType.FWD_RECV, MetaStepType.FWD_SEND),
    MetaStepType.BWD: (MetaStepType.BWD_RECV, MetaStepType.BWD_SEND),
    MetaStepType.BWD_INPUT: (MetaStepType.BWD_RECV, MetaStepType.BWD_SEND),
}


def lowered(table, buffered=True):
    """The table with the sends and receives that its steps need.

    A table that contains a send or receive is returned unchanged: its author wrote all of them. Stages of the same rank
    exchange no messages.

    Args:
        table: a `ScheduleTable`; the result is checked by `validate` only.
        buffered: whether a send returns at once. Then a send comes right after its step, and a receive right before
            the step that needs it. Otherwise all ranks have the sends and receives in one order of all messages, the
            order of the sends where a forward step takes one unit of time and a backward step two: so no deadlock is
            possible although a send waits for its receive.

    Raises:
        ValueError: with `buffered=False`, a table that `validate` rejects.
    """
    if any(step[1] in OTHER_ENDS for step in table.steps):
        return table
    deferred = replace(table, orders=tuple(_rank_with_messages(table, rank) for rank in range(table.rank_num)))
    return deferred if buffered else _in_one_order(deferred)


def forward_only(table, count=None):
    """The forward steps of a table with their sends and receives, in their order: the table of an evaluation.

    `count`: of so many micro-batches, the first ones. Default: all.
    """
    orders = tuple(tuple(_forward_steps(order, count)) for order in table.orders)
    return replace(table, orders=orders, micro_batch_num=count or table.micro_batch_num)


def _forward_steps(order, count):
    for step in order:
        parts = step.sub_steps or (step,)
        if forward := [part for part in parts if part.type in FORWARD and (count is None or part.micro_index < count)]:
            yield forward[0] if len(forward) == 1 else overlapped(*forward)


def _rank_with_messages(table, rank):
    """The order of a rank with sends and receives; none are added to a step whose stage is on another rank."""
    own = [stage for stage, holder in enumerate(table.stage_ranks) if holder == rank]
    places = {(kind, stage) for kind in OTHER_ENDS for stage in own if table.is_message(kind, stage)}
    steps = []
    for step in table.orders[rank]:
        sends = []
        for micro, kind, stage, _ in step.sub_steps or (step,):
            for message, messages in zip(_MESSAGES.get(kind, ()), (steps, sends)):
                if (message, stage) in places:
                    messages.append(MetaStep(micro, message, stage))
        steps += [step, *sends]
    return tuple(steps)


def _in_one_order(table):
    """Sort every order by simulated time: sends and receives by the time of the send, other steps by their start."""
    spans = simulate(table).spans
    sent = {span.step: span.start for rank_spans in spans for span in rank_spans if span.step.type in SENDS}
    numbers = {send: number for number, send in enumerate(table.sends())}
    orders = []
    for order, rank_spans in zip(table.orders, spans):
        keys, remaining = [], iter(rank_spans)
        for step in order:
            first = [next(remaining) for _ in step.sub_steps or (step,)][0]
            if step.type in OTHER_ENDS:
                send = step if step in sent else step.other_end
                keys.append((sent[send], numbers[send[1:3]], step.micro_index))
            else:
                keys.append((first.start, len(numbers)))  # after the messages of the same time
        orders.append(tuple(step for _, step in sorted(zip(keys, order), key=lambda pair: pair[0])))
    return replace(table, orders=tuple(orders))
