"""What steps of a pipeline table are, whatever the table: computations, messages, parts. Pure Python."""

from mindformers_core.pipeline.tables.step import MetaStepType

COMPUTE = (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
FORWARD = (MetaStepType.FWD, MetaStepType.FWD_SEND, MetaStepType.FWD_RECV)
SENDS = (MetaStepType.FWD_SEND, MetaStepType.BWD_SEND)


def plain_steps(order):
    """The steps of an order, with the parts of an `OVERLAP` one after another."""
    for step in order:
        yield from step[3] or (step,)


def step_parts(kind, stage):
    """The (type, stage) that a step completes: a BWD completes BWD_INPUT and BWD_WEIGHT."""
    if kind == MetaStepType.BWD:
        return (MetaStepType.BWD_INPUT, stage), (MetaStepType.BWD_WEIGHT, stage)
    return ((kind, stage),)
