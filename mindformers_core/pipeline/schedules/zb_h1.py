"""ZB-H1 (Qi et al., "Zero bubble pipeline parallelism", 2023). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleSingle
from mindformers_core.pipeline.schedules.one_f_one_b import one_stage_orders
from mindformers_core.pipeline.schedules.weight_steps import with_weight_steps
from mindformers_core.pipeline.tables.step import MetaStepType


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B with deferred weight gradients: a rank computes them where it would wait, or if p micro-batches are live.

    The bubble of a rank is (p - 1)(F + I - W) in the place of 1F1B's (p - 1)(F + I + W), where a forward pass takes F,
    and the two parts of a backward pass take I and W, with W at most F and I. A rank has at most p live micro-batches,
    as 1F1B's first rank.
    """

    def construct_exec_order(self):
        orders = one_stage_orders(self.stage_num, self.micro_batch_num, MetaStepType.BWD_INPUT)
        self.exec_order.update(enumerate(with_weight_steps(orders, self.stage_num, live_limit=self.stage_num)))
