"""The dependencies of the steps of a pipeline table, and the messages between ranks. Pure Python."""

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

COMPUTE = (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
FORWARD = (MetaStepType.FWD, MetaStepType.FWD_SEND, MetaStepType.FWD_RECV)
SENDS = (MetaStepType.FWD_SEND, MetaStepType.BWD_SEND)
OTHER_ENDS = {  # type of a send or receive -> type of the step at the other end, and its stage minus this one's
    MetaStepType.FWD_SEND: (MetaStepType.FWD_RECV, 1),
    MetaStepType.FWD_RECV: (MetaStepType.FWD_SEND, -1),
    MetaStepType.BWD_SEND: (MetaStepType.BWD_RECV, -1),
    MetaStepType.BWD_RECV: (MetaStepType.BWD_SEND, 1),
}


def plain_steps(order):
    """The steps of an order, with the parts of an `OVERLAP` one after another."""
    for step in order:
        yield from step[3] or (step,)


def step_parts(kind, stage):
    """The (type, stage) that a step completes: a BWD completes BWD_INPUT and BWD_WEIGHT."""
    if kind == MetaStepType.BWD:
        return (MetaStepType.BWD_INPUT, stage), (MetaStepType.BWD_WEIGHT, stage)
    return ((kind, stage),)


def is_message(kind, stage, stage_ranks):
    """Whether the other end of a send or receive, (type, stage), is a stage of another rank."""
    other = stage + OTHER_ENDS[kind][1]
    return 0 <= other < len(stage_ranks) and stage_ranks[other] != stage_ranks[stage]


def message_sends(stage_ranks):
    """The (type, stage) of the sends of every micro-batch: between two stages the forward, then the backward one."""
    sends = ((kind, stage + later) for stage in range(len(stage_ranks) - 1) for later, kind in enumerate(SENDS))
    return [send for send in sends if is_message(*send, stage_ranks)]


def other_end(step):
    """The receiving step of a sending one, and the sending step of a receiving one."""
    kind, distance = OTHER_ENDS[step.type]
    return MetaStep(step.micro_index, kind, step.stage_index + distance)


def step_needs(kind, stage, stage_ranks):
    """The (type, stage) that have to be complete before, on the same rank, for the same micro-batch: two at most."""
    if kind == MetaStepType.FWD:
        if stage == 0:
            return ()
        receive = MetaStepType.FWD_RECV, stage
        return (receive if is_message(*receive, stage_ranks) else (kind, stage - 1),)
    if kind in (MetaStepType.BWD, MetaStepType.BWD_INPUT):
        forward, receive = (MetaStepType.FWD, stage), (MetaStepType.BWD_RECV, stage)
        if stage == len(stage_ranks) - 1:
            return (forward,)
        return forward, receive if is_message(*receive, stage_ranks) else (MetaStepType.BWD_INPUT, stage + 1)
    if kind == MetaStepType.FWD_SEND:
        return ((MetaStepType.FWD, stage),)
    if kind in (MetaStepType.BWD_SEND, MetaStepType.BWD_WEIGHT):
        return ((MetaStepType.BWD_INPUT, stage),)
    return ()
