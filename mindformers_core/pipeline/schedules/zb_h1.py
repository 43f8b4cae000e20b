"""ZB-H1 (Qi et al., "Zero bubble pipeline parallelism", 2023). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleSingle
from mindformers_core.pipeline.schedules.one_f_one_b import one_forward_one_backward
from mindformers_core.pipeline.schedules.weight_steps import with_weight_steps
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["ScheduleZBH1"]


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B with deferred weight gradients: a rank computes them where it would wait, or if p micro-batches are live.

    The bubble of a rank is (p - 1)(F + I - W) in the place of 1F1B's (p - 1)(F + I + W), where a forward pass takes F,
    and the two parts of a backward pass take I and W, with W at most F and I. A rank has at most p live micro-batches,
    as 1F1B's first rank.
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
