"""GPipe (Huang et al. 2019), and GPipe for several chunks on every rank (Lamy-Poirier 2022). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti, PipelineScheduleSingle
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType


def _all_forward_first(schedule):
    """Fill `exec_order`: each rank goes forward through its stages, then backward; one stage after the other."""
    for rank in range(schedule.rank_num):
        stages = range(rank, schedule.stage_num, schedule.rank_num)
        passes = [(MetaStepType.FWD, stage) for stage in stages] + [(MetaStepType.BWD, stage) for stage in stages[::-1]]
        micros = range(schedule.micro_batch_num)
        schedule.exec_order[rank] = [MetaStep(micro, *each) for each in passes for micro in micros]


class ScheduleGPipe(PipelineScheduleSingle):
    """All forward passes, then all backward passes: simple, with all micro-batches live in between."""

    construct_exec_order = _all_forward_first


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """Looped breadth-first: a chunk runs all micro-batches before the next chunk (Lamy-Poirier 2022, "Breadth-first
    pipeline parallelism").

    The bubble is v times shorter than GPipe's, for v chunks and at least p micro-batches. All of them are live before
    the first backward pass, but each chunk uses its weights in one interval forward and one backward: good for sharded
    weights.
    """

    construct_exec_order = _all_forward_first
