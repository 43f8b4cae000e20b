"""Interleaved 1F1B, also called virtual pipeline (Narayanan et al. 2021, Megatron-LM). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti
from mindformers_core.pipeline.schedules.one_f_one_b import one_forward_one_backward
from mindformers_core.pipeline.tables.step import MetaStep, MetaStepType


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with v chunks on every rank: the bubble is v times shorter, with more live micro-batches and messages.

    The micro-batches pass all chunks of a rank in rounds of at least p, so that a micro-batch has passed the last rank
    before its next chunk on this rank begins. Any number of micro-batches is allowed: if it isn't divisible, the sizes
    of rounds differ by one. Fewer than p make one round, with a longer bubble. One chunk is plain 1F1B.
    """

    def construct_exec_order(self):
        rounds = _rounds(self.micro_batch_num, self.rank_num)
        # Two for each later rank hide the time that messages take; one would do if they took none. With one chunk there
        # is nothing to fill that time with.
        steps_per_rank = 1 if self.chunk_num == 1 else 2
        before_turning = (self.chunk_num - 1) * len(rounds[0])
        for rank in range(self.rank_num):
            stages = range(rank, self.stage_num, self.rank_num)
            forwards = _in_rounds(MetaStepType.FWD, rounds, stages)
            backwards = _in_rounds(MetaStepType.BWD, rounds, stages[::-1])
            warm_up = before_turning + steps_per_rank * (self.rank_num - 1 - rank)
            self.exec_order[rank] = one_forward_one_backward(forwards, backwards, warm_up)


def _rounds(micro_batch_num, rank_num):
    """Ranges of micro-batches: as many as can have `rank_num` each; sizes differ by one at most, larger ones first."""
    round_num = max(1, micro_batch_num // rank_num)
    size, larger = divmod(micro_batch_num, round_num)
    starts = [number * size + min(number, larger) for number in range(round_num + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:])]


def _in_rounds(kind, rounds, stages):
    return [MetaStep(micro, kind, stage) for micros in rounds for stage in stages for micro in micros]
