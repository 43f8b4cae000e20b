"""GPipe (Huang et al. 2019). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleSingle
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["ScheduleGPipe"]


class ScheduleGPipe(PipelineScheduleSingle):
    """All forward passes, then all backward passes: simple, and as many micro-batches live as there are."""

    def construct_exec_order(self):
        """As the base class says."""
        micro_batches = range(self.micro_batch_num)
        for stage in range(self.stage_num):
            self.exec_order[stage] = [
                MetaStep(micro, kind, stage) for kind in (MetaStepType.FWD, MetaStepType.BWD) for micro in micro_batches
            ]
