"""Looped breadth-first schedule (Lamy-Poirier 2022, "Breadth-first pipeline parallelism"). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType

__all__ = ["ScheduleLoopedBFS"]


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """GPipe with v chunks on every rank: a chunk takes all micro-batches before the next chunk's turn comes.

    The bubble is v times shorter than GPipe's, if there are p micro-batches or more. All of them are live at the turn,
    but each chunk's weights are needed in one stretch forward and one backward: good for sharded weights.
    """

    def construct_exec_order(self):
        """As the base class says."""
        micro_batches = range(self.micro_batch_num)
        for rank in range(self.rank_num):
            stages = range(rank, self.stage_num, self.rank_num)
            self.exec_order[rank] = [
                MetaStep(micro, kind, stage)
                for kind, chunks in ((MetaStepType.FWD, stages), (MetaStepType.BWD, stages[::-1]))
                for stage in chunks
                for micro in micro_batches
            ]
