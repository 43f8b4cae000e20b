"""What the steps of a pipeline table need, and the messages between ranks that follow from it. Pure Python.

A message has a number, from 1 on; with a minus it stands for its sending.
"""

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["message_bases", "message_pairs", "message_steps", "plain_steps", "step_needs", "step_parts"]


def plain_steps(order):
    """The steps of an order, with those that an `OVERLAP` is made of one after another."""
    for step in order:
        if step[3]:
            yield from step[3]
        else:
            yield step


def step_parts(kind, stage):
    """The (type, stage) that a step settles: BWD those of BWD_INPUT and BWD_WEIGHT."""
    if kind == MetaStepType.BWD:
        return (MetaStepType.BWD_INPUT, stage), (MetaStepType.BWD_WEIGHT, stage)
    return ((kind, stage),)


def step_needs(kind, stage, stage_ranks):
    """The (type, stage) that must be settled before, on the same rank and for the same micro-batch: two at most."""
    if kind == MetaStepType.FWD:
        if stage == 0:
            return ()
        local = stage_ranks[stage - 1] == stage_ranks[stage]
        return ((kind, stage - 1) if local else (MetaStepType.FWD_RECV, stage),)
    if kind in (MetaStepType.BWD, MetaStepType.BWD_INPUT):
        forward = (MetaStepType.FWD, stage)
        if stage == len(stage_ranks) - 1:
            return (forward,)
        local = stage_ranks[stage + 1] == stage_ranks[stage]
        return forward, (MetaStepType.BWD_INPUT, stage + 1) if local else (MetaStepType.BWD_RECV, stage)
    if kind == MetaStepType.FWD_SEND:
        return ((MetaStepType.FWD, stage),)
    if kind in (MetaStepType.BWD_SEND, MetaStepType.BWD_WEIGHT):
        return ((MetaStepType.BWD_INPUT, stage),)
    return ()


def message_pairs(stage_ranks):
    """The messages that every micro-batch causes: pairs of (type, stage) of a send and (type, stage) of its receive.

    There are none between stages of the same rank.
    """
    pairs = []
    for stage in range(len(stage_ranks) - 1):
        if stage_ranks[stage] != stage_ranks[stage + 1]:
            pairs.append(((MetaStepType.FWD_SEND, stage), (MetaStepType.FWD_RECV, stage + 1)))
            pairs.append(((MetaStepType.BWD_SEND, stage + 1), (MetaStepType.BWD_RECV, stage)))
    return tuple(pairs)


def message_bases(table):
    """{(type, stage): (sign, base)}: a send or receive of micro-batch i stands for the message sign * (base + i)."""
    bases = {}
    for number, (send, receive) in enumerate(message_pairs(table.stage_ranks)):
        base = number * table.micro_batch_num + 1
        bases[send], bases[receive] = (-1, base), (1, base)
    return bases


def message_steps(table, message):
    """The step that a message stands for, and that at its other end."""
    number, micro_index = divmod(abs(message) - 1, table.micro_batch_num)
    send, receive = (MetaStep(micro_index, *place) for place in message_pairs(table.stage_ranks)[number])
    return (send, receive) if message < 0 else (receive, send)
