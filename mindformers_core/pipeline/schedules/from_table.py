"""A schedule that runs a given table, for instance one from a file. Pure Python."""

from mindformers_core.pipeline.schedules.base import PipelineScheduleMulti


def schedule_of_table(table):
    """A subclass of `PipelineScheduleMulti` with the orders of `table`, a `ScheduleTable` such as `load_table` returns.

    The class is called with the list of the stages that the table places on this rank, and with the table's number of
    micro-batches. Sends and receives are added if the table has none.
    """

    class ScheduleOfTable(PipelineScheduleMulti):
        """Runs a given table."""

        @classmethod
        def stage_ranks(cls, stage_num, rank_num):
            """The table's; raises `ValueError` for other numbers of stages and ranks than it has."""
            if (stage_num, rank_num) != (table.stage_num, table.rank_num):
                raise ValueError(
                    f"the table is for {table.stage_num} stages on {table.rank_num} ranks, not for {stage_num} on "
                    f"{rank_num}"
                )
            return table.stage_ranks

        def check(self):
            """Raise `ValueError` for other numbers than the table's."""
            super().check()
            if self.micro_batch_num != table.micro_batch_num:
                raise ValueError(
                    f"the table is for {table.micro_batch_num} micro-batches, not for {self.micro_batch_num}"
                )

        def construct_exec_order(self):
            """The table's orders."""
            self.exec_order.update(enumerate(table.orders))

    return ScheduleOfTable
