"""A pipeline schedule of one's own.

python examples/own_pipeline_schedule.py                  looks at it: its table, its figures, a picture
"""

import os

from mindformers_core.pipeline import (
    MetaStep,
    MetaStepType,
    PipelineScheduleSingle,
    Schedule1F1B,
    StepCosts,
    draw_schedule,
    simulate,
)


class ScheduleEarly1F1B(PipelineScheduleSingle):
    """1F1B that begins up to twice as many micro-batches: ranks compute while messages are under way."""

    def construct_exec_order(self):
        """All that a schedule has to define."""
        for stage in range(self.stage_num):
            early = min(2 * (self.stage_num - 1 - stage), self.micro_batch_num)
            order = [MetaStep(micro, MetaStepType.FWD, stage) for micro in range(early)]
            for micro in range(self.micro_batch_num):
                if micro + early < self.micro_batch_num:
                    order.append(MetaStep(micro + early, MetaStepType.FWD, stage))
                order.append(MetaStep(micro, MetaStepType.BWD, stage))
            self.exec_order[stage] = order


def look(folder):
    """What can be known of it without a device, and a picture in `folder`."""
    schedule = ScheduleEarly1F1B.planned(4, 8)
    for rank, order in enumerate(schedule.table.orders):
        print(f"rank {rank}:", *order[:14], "…")
    for transfer in (0.0, 0.5, 1.0):
        for kind in (Schedule1F1B, ScheduleEarly1F1B):
            timeline = simulate(kind.planned(4, 8).table, StepCosts(transfer=transfer))
            bubble, live = 100 * timeline.bubble_fraction, max(timeline.peak_live)
            print(f"transfer {transfer}: {kind.__name__:18} bubble {bubble:.1f} %, peak live {live:g}")
    draw_schedule(schedule, os.path.join(folder, "early_1f1b.svg"), StepCosts(transfer=0.5))


if __name__ == "__main__":
    look(".")
