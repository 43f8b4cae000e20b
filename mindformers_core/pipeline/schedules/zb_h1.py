"""ZB-H1 (Qi et al., "Zero bubble pipeline parallelism", 2023). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleSingle
from mindformers_core.pipeline.schedules.one_f_one_b import one_forward_one_backward
from mindformers_core.pipeline.schedules.weight_steps import with_weight_steps
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["ScheduleZBH1"]


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B of which the weight gradients wait until a rank has nothing better to do, or p micro-batches are live.

    Of 1F1B's bubble, (p - 1)(F + I + W) for every rank, (p - 1)(F + I - W) is left, where a forward pass takes F, and
    the two parts of a backward pass take I and W, none longer than F and I. No rank keeps more micro-batches live than
    1F1B's first: p.
    """

    def construct_exec_order(self):
        orders = []
        for stage in range(self.stage_num):
            forwards, inputs = (
                [MetaStep(micro, kind, stage) for micro in range(self.micro_batch_num)]
                for kind in (MetaStepType.FWD, MetaStepType.BWD_INPUT)
            )
            orders.append(one_forward_one_backward(forwards, inputs, self.stage_num - 1 - stage))
        self.exec_order.update(enumerate(with_weight_steps(orders, self.stage_num, live_limit=self.stage_num)))
