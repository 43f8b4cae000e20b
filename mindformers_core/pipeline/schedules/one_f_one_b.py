"""1F1B (Narayanan et al. 2021, PipeDream-Flush). Pure Python."""

from itertools import chain

from mindformers_core.pipeline.schedules.base import PipelineScheduleSingle
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward: as long as GPipe, but stage s has at most p - s live micro-batches."""

    def construct_exec_order(self):
        orders = one_stage_orders(self.stage_num, self.micro_batch_num, MetaStepType.BWD)
        self.exec_order.update(enumerate(orders))


def one_stage_orders(stage_num, micro_batch_num, backward):
    """The 1F1B orders of all ranks, with one stage on each; `backward`: the type of the backward steps."""
    orders = []
    for stage in range(stage_num):
        forwards, backwards = (
            [MetaStep(micro, kind, stage) for micro in range(micro_batch_num)] for kind in (MetaStepType.FWD, backward)
        )
        orders.append(one_forward_one_backward(forwards, backwards, stage_num - 1 - stage))
    return orders


def one_forward_one_backward(forwards, backwards, warm_up):
    """`warm_up` forward steps, then one forward and one backward step alternately, then the other backward steps.

    Args:
        forwards: list of all forward steps.
        backwards: list of as many backward steps.
        warm_up: number of steps; if it is larger than the number of forward steps, all of them come first.
    """
    late = forwards[warm_up:]
    return [*forwards[:warm_up], *chain.from_iterable(zip(late, backwards)), *backwards[len(late) :]]
