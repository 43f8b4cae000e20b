"""The table of a pipeline schedule: every rank's steps in order, and the rank of every stage. Pure Python."""

import csv
import io
from dataclasses import dataclass

from mindformers_core.pipeline.tables.step import OTHER_ENDS, SENDS, MetaStep, MetaStepType, plain_steps


@dataclass(frozen=True)
class ScheduleTable:
    """A whole schedule as data.

    Attributes:
        orders: for every pipeline rank the tuple of its `MetaStep`s, in order of execution.
        stage_ranks: for every stage the pipeline rank that holds it.
        micro_batch_num: number of micro-batches.

    Raises:
        TypeError: an entry of an order, or of an `OVERLAP`, isn't a `MetaStep`.
    """

    orders: tuple
    stage_ranks: tuple
    micro_batch_num: int

    def __post_init__(self):
        for rank, order in enumerate(self.orders):
            for number, step in enumerate(order):
                if type(step) is not MetaStep or step[3] and not {*map(type, step[3])} <= {MetaStep}:
                    raise TypeError(f"step {number} of rank {rank}: {step!r} should be a MetaStep, and made of such")

    def __str__(self):
        """The text of its CSV file, see `save_table`."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["micro_batch_num", self.micro_batch_num])
        writer.writerow(["stage_ranks", *self.stage_ranks])
        writer.writerows([f"rank {rank}", *map(str, order)] for rank, order in enumerate(self.orders))
        return file.getvalue()

    @property
    def rank_num(self):
        """Number of pipeline ranks."""
        return len(self.orders)

    @property
    def stage_num(self):
        """Number of stages, over all ranks."""
        return len(self.stage_ranks)

    @property
    def steps(self):
        """An iterator of all steps, of one rank after the other; the parts of an `OVERLAP` one after another."""
        return (step for order in self.orders for step in plain_steps(order))

    def neighbour(self, stage, distance):
        """The stage before (-1) or after (1) another one; None at the ends."""
        return stage + distance if 0 <= stage + distance < self.stage_num else None

    def is_message(self, kind, stage):
        """Whether the other end of a send or receive, (type, stage), is a stage of another rank."""
        other = self.neighbour(stage, OTHER_ENDS[kind][1])
        return other is not None and self.stage_ranks[other] != self.stage_ranks[stage]

    def sends(self):
        """The (type, stage) of the sends of a micro-batch: between two stages the forward, then the backward one."""
        sends = ((kind, stage + later) for stage in range(self.stage_num - 1) for later, kind in enumerate(SENDS))
        return [send for send in sends if self.is_message(*send)]

    def needs(self, kind, stage):
        """The (type, stage) that have to be complete before, of the same rank and micro-batch: two at most."""
        if kind == MetaStepType.FWD:
            if self.neighbour(stage, -1) is None:
                return ()
            receive = MetaStepType.FWD_RECV, stage
            return (receive if self.is_message(*receive) else (kind, stage - 1),)
        if kind in (MetaStepType.BWD, MetaStepType.BWD_INPUT):
            forward, receive = (MetaStepType.FWD, stage), (MetaStepType.BWD_RECV, stage)
            if self.neighbour(stage, 1) is None:
                return (forward,)
            return forward, receive if self.is_message(*receive) else (MetaStepType.BWD_INPUT, stage + 1)
        if kind == MetaStepType.FWD_SEND:
            return ((MetaStepType.FWD, stage),)
        if kind in (MetaStepType.BWD_SEND, MetaStepType.BWD_WEIGHT):
            return ((MetaStepType.BWD_INPUT, stage),)
        return ()
