"""The table of a pipeline schedule: every rank's steps in order, and the rank of every stage. Pure Python."""

import csv
import io
from dataclasses import dataclass

from mindformers_core.pipeline.tables.step import MetaStep


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
