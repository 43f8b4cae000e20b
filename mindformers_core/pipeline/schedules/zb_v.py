"""ZB-V (Qi et al., "Pipeline parallelism with controllable memory", 2024). Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti
from mindformers_core.pipeline.schedules.phases import order_of_phases
from mindformers_core.pipeline.schedules.weight_steps import with_weight_steps
from mindformers_core.pipeline.tables.step import MetaStepType

_F0, _F1, _I0, _I1 = (((kind, chunk),) for kind in (MetaStepType.FWD, MetaStepType.BWD_INPUT) for chunk in (0, 1))


class ScheduleZBV(PipelineScheduleMulti):
    """Two chunks on every rank, placed in a V: the only bubble is that ranks start and end at different times.

    A micro-batch passes the first chunks of all ranks, then their second chunks in reverse, so the last stage is on the
    first rank. Where forward, input-gradient and weight-gradient steps of a chunk all take the time 1, p ranks take
    6m + p - 1 for m >= p micro-batches; smaller m are allowed. A rank keeps the activations of at most 2p chunks live,
    those of p micro-batches, as 1F1B's first rank.
    """

    placement = "v"

    def construct_exec_order(self):
        orders = []
        for rank in range(self.rank_num):
            order = order_of_phases(self._phases(rank), (rank, self.stage_num - 1 - rank))
            orders.append([step for step in order if step.micro_index < self.micro_batch_num])
        self.exec_order.update(enumerate(with_weight_steps(orders, self.stage_num, live_limit=2 * self.rank_num)))

    def _phases(self, rank):
        """Phases of the order without weight gradients; with up to 2p - 1 micro-batches, though there may be fewer."""
        ranks_left = self.rank_num - rank
        return (
            ((_F0,), 2 * ranks_left - 1),  # until the first micro-batch is back
            ((_F1, _F0), rank),
            ((_F1, _I1), ranks_left),  # until its gradient is back, too
            ((_F0, _I0, _F1, _I1), self.micro_batch_num - self.rank_num - ranks_left + 1),
            ((_I0, _F1, _I1), ranks_left - 1),
            ((_I0, _I1), rank),
            ((_I0,), ranks_left),
        )
