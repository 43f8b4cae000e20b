"""GPipe (Huang et al. 2019), and GPipe for several chunks on every rank (Lamy-Poirier 2022). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti, PipelineScheduleSingle
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType


class ScheduleGPipe(PipelineScheduleSingle):
    """All forward passes, then all backward passes: simple, with all micro-batches live in between."""

    def construct_exec_order(self):
        self.exec_order.update((stage, _order([stage], self.micro_batch_num)) for stage in range(self.stage_num))


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Looped breadth-first: a chunk runs all micro-batches before the next chunk (Lamy-Poirier 2022, "Breadth-first
    pipeline parallelism").

    The bubble is v times shorter than GPipe's, for v chunks and at least p micro-batches. All of them are live before
    the first backward pass, but each chunk uses its weights in one interval forward and one backward: good for sharded
    weights.
    """

    def construct_exec_order(self):
        for rank in range(self.rank_num):
            self.exec_order[rank] = _order(range(rank, self.stage_num, self.rank_num), self.micro_batch_num)


def _order(stages, micro_batch_num):
    """The steps of a rank: forward through its stages, then backward; one stage after the other."""
    passes = (MetaStepType.FWD, stages), (MetaStepType.BWD, stages[::-1])
    return [MetaStep(micro, kind, s) for kind, order in passes for s in order for micro in range(micro_batch_num)]
