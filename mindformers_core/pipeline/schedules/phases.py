"""The order of a rank as phases: patterns of steps, each repeated. Pure Python."""

from collections import deque
from itertools import count

from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType, overlapped


def order_of_phases(phases, stages):
    """The steps of a rank, as a list.

    Args:
        phases: pairs (pattern, number of repetitions). A pattern is a tuple of slots; a slot is a tuple of
            `(MetaStepType, chunk)`, several of which make an `OVERLAP`. FWD takes the chunk's micro-batches from 0 on;
            so do BWD and BWD_INPUT together. BWD_WEIGHT, of chunk None, belongs to the oldest BWD_INPUT without one.
        stages: for every chunk its stage.
    """
    forwards, backwards = ([count() for _ in stages] for _ in range(2))
    weights = deque()

    def step(kind, chunk):
        if kind == MetaStepType.BWD_WEIGHT:
            return weights.popleft()
        micro_batches = forwards if kind == MetaStepType.FWD else backwards
        made = MetaStep(next(micro_batches[chunk]), kind, stages[chunk])
        if kind == MetaStepType.BWD_INPUT:
            weights.append(made._replace(type=MetaStepType.BWD_WEIGHT))
        return made

    slots = (slot for pattern, times in phases for _ in range(times) for slot in pattern)
    return [step(*slot[0]) if len(slot) == 1 else overlapped(*(step(*part) for part in slot)) for slot in slots]
