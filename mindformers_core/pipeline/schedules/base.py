"""The base classes of pipeline schedules: a subclass writes a table, and the base class runs it. Pure Python.

The stages (`PipelineStage`) compute with tensors; a schedule contains the order of the steps only. So a schedule of
`PlannedStage`s can be validated, simulated and drawn without MindSpore.
"""

from dataclasses import dataclass

from mindformers_core.pipeline.schedules.micro_batches import split_micro_batches
from mindformers_core.pipeline.schedules.placement import PLACEMENTS
from mindformers_core.pipeline.schedules.running import run_table
from mindformers_core.pipeline.tables.lowering import forward_only, lowered
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.pipeline.tables.validating import validate


@dataclass(frozen=True)
class PlannedStage:
    """A stage without a Cell, for schedules that are simulated or drawn.

    Attributes:
        stage_index: number of the stage, from 0.
        stage_num: number of stages, over all ranks.
        rank_num: number of pipeline ranks.
        channel: None: sends are taken for buffered.
    """

    stage_index: int
    stage_num: int
    rank_num: int
    channel: None = None


class PipelineScheduleBase:
    """A pipeline schedule; subclasses define `construct_exec_order()`, which fills `self.exec_order`.

    `exec_order[rank]` is the list of the `MetaStep`s of a pipeline rank; where every rank holds one stage, the rank is
    the stage's index. Sends and receives are added if the whole table has none.

    Args:
        stages: the stages of this rank, in ascending order: `PipelineStage`s, or `PlannedStage`s.
        micro_batch_num: number of micro-batches that a batch is split into.
        args_batch_dim: for every positional argument of `run` the dim to split, None for an argument that every
            micro-batch gets whole. Default: dim 0 of every argument that has dims.
        kwargs_batch_dim: the same for keyword arguments, by name.
        output_concat_dim: dim for the concatenation of the micro-batches' results; scalars become their mean.
        share_outputs: whether every pipeline rank gets the results, not only that of the last stage.

    Attributes:
        stage_num, rank_num: number of stages and of pipeline ranks.
        exec_order: rank -> list of steps, as written by `construct_exec_order`.
        table: the `ScheduleTable`, lowered (see `lowered`) and validated.

    Raises:
        ValueError: a table that `validate` rejects; numbers of stages or micro-batches that the schedule rejects.
    """

    placement = "loop"  # a key of PLACEMENTS

    def __init__(
        self,
        stages,
        micro_batch_num,
        args_batch_dim=None,
        kwargs_batch_dim=None,
        output_concat_dim=0,
        share_outputs=False,
    ):
        self.stages = tuple(stages)
        self.stage_num, self.rank_num = self.stages[0].stage_num, self.stages[0].rank_num
        self.micro_batch_num = micro_batch_num
        self.args_batch_dim, self.kwargs_batch_dim = args_batch_dim, kwargs_batch_dim
        self.output_concat_dim, self.share_outputs = output_concat_dim, share_outputs
        self.check()
        self.exec_order = {}
        self.construct_exec_order()
        self.table = self._table()

    @classmethod
    def planned(cls, rank_num, micro_batch_num, chunk_num=1, **options):
        """The schedule of rank 0 for `chunk_num` `PlannedStage`s on each of `rank_num` ranks; it can't run."""
        stage_num = rank_num * chunk_num
        ranks = cls.stage_ranks(stage_num, rank_num)
        stages = [PlannedStage(stage, stage_num, rank_num) for stage in range(stage_num) if ranks[stage] == 0]
        return cls(stages if issubclass(cls, PipelineScheduleMulti) else stages[0], micro_batch_num, **options)

    @classmethod
    def stage_ranks(cls, stage_num, rank_num):
        """For every stage the pipeline rank that holds it, a tuple; override it for another placement."""
        return PLACEMENTS[cls.placement](stage_num, rank_num)

    def construct_exec_order(self):
        """Fill `self.exec_order`."""
        raise NotImplementedError(f"{type(self).__name__} has to define construct_exec_order()")

    def split_micro_batches(self, args, kwargs):
        """A list with `(args, kwargs)` for every micro-batch; override it to split a batch in another way."""
        return split_micro_batches(args, kwargs, self.micro_batch_num, self.args_batch_dim, self.kwargs_batch_dim)

    def meet(self):
        """Exchange the descriptions of the stages of all ranks, which the first run does otherwise.

        All ranks of the pipeline have to call it together, after the initialization of the parameters. Afterwards
        `stage.counted` can be read.

        Returns:
            The `RankStages` of this rank.

        Raises:
            ValueError: stages that aren't those of one pipeline; parameters of one path that differ; or layers to
                recompute or swap that no stage has.
        """
        return self.stages[0].meet(self.stages, self.table.stage_ranks)

    def run(self, *args, **kwargs):
        """One training pass over a batch: forward and backward of all its micro-batches, as the table says.

        Positional arguments are the first stage's inputs, needed on its rank only; every stage gets those keyword
        arguments that its Cell takes. The gradients of the mean over micro-batches are added to
        `PipelineStage.gradients`.

        Returns:
            The outputs of the last stage's Cell, concatenated over the micro-batches; None on other ranks, unless
            `share_outputs`.

        Raises:
            ValueError: after the first run, on all ranks: a pattern of recompute or swap that matches on no stage.
        """
        return self.run_microbatches(self.split_micro_batches(args, kwargs))

    def evaluate(self, *args, **kwargs):
        """As `run`, forward only."""
        return self.run_microbatches(self.split_micro_batches(args, kwargs), training=False)

    def run_microbatches(self, micro_batches, training=True):
        """As `run`, for micro-batches given as `(args, kwargs)` pairs; their shapes may differ.

        Forward only there may be fewer than `micro_batch_num`.
        """
        table = self.table if training else forward_only(self.table, min(len(micro_batches), self.micro_batch_num))
        return run_table(self, table, micro_batches, training)

    def check(self):
        """Raise `ValueError` for numbers of stages, ranks and micro-batches that the schedule rejects."""
        count = self.micro_batch_num
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{type(self).__name__}: micro_batch_num: {count!r} should be a whole number from 1 on")
        ranks = self.stage_ranks(self.stage_num, self.rank_num)
        rank = ranks[self.stages[0].stage_index]
        own = tuple(stage for stage, holder in enumerate(ranks) if holder == rank)
        given = tuple(stage.stage_index for stage in self.stages)
        if given != own:
            raise ValueError(
                f"{type(self).__name__}: rank {rank} of {self.rank_num} holds the stages {own} of {self.stage_num}, "
                f"not {given}"
            )

    def _table(self):
        ranks = self.stage_ranks(self.stage_num, self.rank_num)
        missing = [rank for rank in range(self.rank_num) if rank not in self.exec_order]
        if missing:
            raise ValueError(f"{type(self).__name__}.construct_exec_order() left exec_order[{missing[0]}] out")
        orders = tuple(tuple(self.exec_order[rank]) for rank in range(self.rank_num))
        channel = self.stages[0].channel
        buffered = channel is None or channel.buffered
        table = lowered(ScheduleTable(orders, ranks, self.micro_batch_num), buffered)
        validate(table, buffered)
        return table


class PipelineScheduleSingle(PipelineScheduleBase):
    """The base of schedules with one stage on every rank, its first argument; keys of `exec_order` are stages."""

    def __init__(self, stage, micro_batch_num, **options):
        if not hasattr(stage, "stage_index"):
            raise TypeError(f"{type(self).__name__} takes one PipelineStage, not {stage!r}")
        self.stage = stage
        super().__init__((stage,), micro_batch_num, **options)

    def check(self):
        if self.stage_num != self.rank_num:
            raise ValueError(
                f"{type(self).__name__} has one stage on every rank, not {self.stage_num} on {self.rank_num}"
            )
        super().check()


class PipelineScheduleMulti(PipelineScheduleBase):
    """The base of schedules with several stages (chunks) on every rank; the first argument is this rank's list.

    Attributes:
        chunk_num: number of stages on every rank.
    """

    def __init__(self, stages, micro_batch_num, **options):
        if not isinstance(stages, (list, tuple)) or not stages or not all(hasattr(s, "stage_index") for s in stages):
            raise TypeError(f"{type(self).__name__} takes a list of this rank's PipelineStages, not {stages!r}")
        self.chunk_num = len(stages)
        super().__init__(stages, micro_batch_num, **options)
