"""Orders of a rank written as phases: patterns of steps, each repeated. Pure Python."""

from collections import deque
from itertools import count

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType, overlapped

__all__ = ["order_of_phases"]


def order_of_phases(phases, stages):
    """The steps of a rank, as a list.

    Args:
        phases: pairs (pattern, number of times). A pattern is a tuple of slots; a slot is a tuple of
            `(MetaStepType, chunk)`, several of which make an `OVERLAP`. FWD, and BWD and BWD_INPUT together, take a
            chunk's micro-batches from 0 on. BWD_WEIGHT, of chunk None, is that of the BWD_INPUT that has waited
            longest.
        stages: for every chunk its stage.
    """
    forwards, backwards = ([count() for _ in stages] for _ in range(2))
    micro_batches = {
        MetaStepType.FWD: forwards,
        MetaStepType.BWD: backwards,
        MetaStepType.BWD_INPUT: backwards,
    }
    weights = deque()

    def step(kind, chunk):
        if kind == MetaStepType.BWD_WEIGHT:
            return weights.popleft()
        micro, stage = next(micro_batches[kind][chunk]), stages[chunk]
        if kind == MetaStepType.BWD_INPUT:
            weights.append(MetaStep(micro, MetaStepType.BWD_WEIGHT, stage))
        return MetaStep(micro, kind, stage)

    slots = (slot for pattern, times in phases for _ in range(times) for slot in pattern)
    return [step(*slot[0]) if len(slot) == 1 else overlapped(*(step(*part) for part in slot)) for slot in slots]
