"""DualPipe-V (DeepSeek-AI, DualPipe 2024/2025, cut in half as Qi et al. 2025 proposed). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti
from mindformers_core.pipeline.schedules.phases import order_of_phases
from mindformers_core.pipeline.tables.step import MetaStepType

_F0, _F1, _B0, _B1, _I0, _I1 = (
    (kind, chunk) for kind in (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT) for chunk in (0, 1)
)
_W = (MetaStepType.BWD_WEIGHT, None)


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two chunks on every rank, placed in a V, whose forward and backward steps a device may overlap in pairs.

    The communication in one step of a pair (such as an all-to-all of experts) can overlap with the computation of the
    other. Where forward, input-gradient and weight-gradient steps of a chunk all take the time 1 and nothing overlaps,
    p ranks take 6m + p - 1; a rank keeps the activations of at most 2p + 1 chunks live, those of p + 1/2 micro-batches.

    Raises:
        ValueError: fewer than 2p micro-batches: the forward passes would end before the first pair.
    """

    placement = "v"

    def check(self):
        super().check()
        if self.micro_batch_num < 2 * self.rank_num:
            raise ValueError(
                f"{type(self).__name__}: micro_batch_num: {self.micro_batch_num} is too few: it needs at least "
                f"{2 * self.rank_num}, two for each of the {self.rank_num} ranks; ScheduleZBV, with the same stages, "
                "takes any number"
            )

    def construct_exec_order(self):
        for rank in range(self.rank_num):
            self.exec_order[rank] = order_of_phases(self._phases(rank), (rank, self.stage_num - 1 - rank))

    def _phases(self, rank):
        ranks_before, ranks_after = rank, self.rank_num - 1 - rank
        middle = ((_F0, _B1), (_F1, _B0)) * (self.micro_batch_num - 2 * self.rank_num + ranks_before + 1)
        if not ranks_after:  # all ranks wait for the last one's first backward step
            middle = (*_apart(middle[:1]), *middle[1:])
        # A pair's messages leave only after both steps. At the end others would wait for those of a rank's last p - 1
        # pairs: the steps of these stay apart.
        paired = len(middle) - ranks_before
        # After the forward steps: backward ones of both chunks by turns, half of them whole, then without weights.
        half = ranks_before + 1
        whole, split = ((_B1,), (_B0,)) * half, ((_I1,), (_I0,)) * half
        return (
            (((_F0,),), 2 * ranks_after),
            (((_F0,), (_F1,)), ranks_before + 1),
            (((_I1,), (_W,), (_F1,)), ranks_after),
            (middle[:paired] + _apart(middle[paired:]), 1),
            (((_B1,), (_F1,), (_B0,)), ranks_after),
            (whole[:half] + split[half:], 1),
            (((_W,), (_I0,)), ranks_after),
            (((_W,),), ranks_before + 1),
        )


def _apart(slots):
    return tuple((part,) for slot in slots for part in slot)
