"""`PipelineStage`: a part of a model with its place in a pipeline, and the actions of a schedule's steps."""

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.algorithms.dropout import block_of
from mindformers_core.communication import channel, world
from mindformers_core.hints import check_loss
from mindformers_core.passes.cell_passes import CellPasses
from mindformers_core.pipeline.agreement import check_boundary
from mindformers_core.pipeline.rank_stages import RankStages
from mindformers_core.sharding.sharded_cells import ShardedCell, computing_parameters, own_class, tree_of
from mindformers_core.sharding.whole_tensors import note_owner


class PipelineStage(CellPasses):
    """A part of a model and its place in a pipeline; a schedule runs it.

    The first stage's Cell is called with the positional arguments of a run, every other one with the outputs of the
    Cell before: a tensor, or a tuple of tensors of any dtypes and shapes, which may differ between micro-batches.
    Gradients flow through the floating ones. Every stage gets those keyword arguments of a run whose names are
    arguments of its `construct`; no gradients flow to them.

    A tied parameter belongs to several stages (an embedding that is also the head). It has the same path in their
    Cells and is in `tied` of all of them: its initial values have to be equal, and its gradient is summed over the
    stages. Other parameters need unique paths, for instance with the layer's number in the whole model.

    One stage is a whole model: its schedule runs micro-batches as `zero.value_and_grad` does, in the same memory.

    The weights of a Cell under `hsdp()` are gathered at the begin of a run, and freed when `gradients` is read: further
    runs of a step don't gather again. In between the optimizer's parameters have no values. At level 3
    `hsdp(reshard_after_forward=True)` gathers the weights for every micro-batch.

    Args:
        cell: the Cell, plain, or sharded over the ranks of this stage (`shard(cell, mesh.sub_mesh(("dp", "tp")))`).
            Stages exchange local tensors.
        stage_index: number of the stage, from 0.
        stage_num: number of stages, over all ranks.
        mesh: the `DeviceMesh` of all ranks, with the pipeline's axis. Default: one axis of all ranks of the world, or
            for one stage this rank alone.
        axis: name of the mesh axis along which stages lie.
        loss_fn: of the last stage: a function of the Cell's output (several as a tuple) and the run's keyword argument
            `target` that returns the loss. Default: the Cell returns the loss, a floating scalar, alone or as its first
            output.
        tied: paths of the parameters that other stages may have, too.
        loss_scale: of the last stage: a `zero.LossScale`; the gradients are those of the loss times its `value`. All
            ranks have to `unscale()` the gradients of their stages by an equal LossScale over the whole mesh.
        compiled: whether forward and backward pass are compiled with `jit`, once for all micro-batches of a shape.
        loss: of the last stage: `"mean"`: every micro-batch weighs alike. `"sum"`: the Cell, or `loss_fn`, returns
            the sum of its labels' losses and, second, their number; `gradients` are those of the mean over the labels
            of all runs. Default: `"mean"`.

    Attributes:
        cell, stage_index, stage_num, tied, compiled, axis: as given.
        ranks: the global ranks of the pipeline that this rank belongs to, in the axis' order; `rank_num` of them.
        parameters: tuple of the trainable `Parameter`s, `cell.trainable_params()`.
        Others: see `CellPasses`.

    Raises:
        TypeError, ValueError: no Cell, no such stage or axis; a `loss_fn` on another stage than the last, or for a Cell
            that is sharded over several ranks; a Cell only a part of which is under `hsdp()`, or that is such a part.
    """

    def __init__(
        self, cell, stage_index, stage_num, mesh=None, axis="pp", loss_fn=None, compiled=False, tied=(),
        loss_scale=None, loss="mean",
    ):  # fmt: skip
        if not isinstance(cell, nn.Cell):
            raise TypeError(f"PipelineStage() takes a Cell, an instance of a subclass of nn.Cell, not {cell!r}")
        if stage_index not in range(stage_num):
            raise ValueError(f"stage {stage_index!r} of {stage_num}: stages count from 0 to {stage_num - 1}")
        check_loss(loss, "PipelineStage")
        for name, given in (("loss_fn", loss_fn), ("loss_scale", loss_scale), ("loss", loss)):
            if given not in (None, "mean") and stage_index != stage_num - 1:
                raise ValueError(f"stage {stage_index} has a {name}: only the last one, {stage_num - 1}, may have one")
        is_last = stage_index == stage_num - 1
        label = f"the {own_class(cell).__name__} of stage {stage_index}"
        super().__init__(cell, label, loss_fn, compiled, stage_index == 0, is_last, loss_scale, loss == "sum")
        self.stage_index, self.stage_num, self.compiled, self.tied = stage_index, stage_num, compiled, tuple(tied)
        here = world()
        alone = (here.rank,) if stage_num == 1 else tuple(range(here.size))
        self.ranks = alone if mesh is None else mesh.group(here.rank, (axis,))
        self.axis, self.rank_num = axis, len(self.ranks)
        self._storage.prepare_pipeline(self.stage_num)
        self.parameters = tuple(cell.trainable_params())
        self._rank_stages, self._agreed = None, set()  # the second: layouts of outputs that the next stage takes
        if stage_num > 1:
            note_owner(self)

    @property
    def channel(self):
        """The `Channel` to the other ranks; None where all stages are on this one."""
        return channel() if self.rank_num > 1 else None

    @property
    def gradients(self):
        """The gradients of `parameters`, in their order: of the mean over micro-batches, summed over the runs since
        `zero_gradients()`, or of the mean over the labels of all these; zeros if there was no run.

        Under `hsdp()` the sums are divided by its `accumulate_grad_step`, the number of runs of a step, the last of
        which reduces them, as they come. Otherwise, and where they wait for other stages, the first read after a run
        does: all data-parallel ranks have to read the gradients of their stages in the same order.

        Raises:
            ValueError: a run has failed after it had begun to add to the sums of those before.
        """
        gradients = self.weight_gradients.reduced()
        return tuple(ops.zeros_like(parameter) for parameter in self.parameters) if gradients is None else gradients

    def zero_gradients(self):
        """Drop the gradients of the runs so far."""
        self.weight_gradients.forget()

    @property
    def counted(self):
        """For every parameter whether a norm over all stages counts it here: a tied parameter counts on one stage.

        Raises:
            RuntimeError: the stages have not met yet.
        """
        if self._rank_stages is None:
            raise RuntimeError(
                f"stage {self.stage_index} doesn't know the others yet: call the schedule's meet() before"
            )
        return self._rank_stages.counted(self.stage_index)

    def meet(self, stages, stage_ranks):
        """The `RankStages` of this rank's `stages`; made at the first call, which all ranks of the pipeline make."""
        known = self._rank_stages
        if known is None or known.stage_ranks != tuple(stage_ranks) or tuple(known.stages.values()) != tuple(stages):
            for stage in stages:
                stage.weight_gradients.close()  # values are compared
            known = RankStages(stages, stage_ranks)
            for stage in stages:
                stage._rank_stages = known
        return known

    def make_program(self, inputs, kwargs, is_split):
        """Make the program of a micro-batch ahead of its forward pass; nothing is computed.

        Args:
            inputs, kwargs: as of `forward`; a `TensorMeta` will do for a tensor.
            is_split: as of `begin`.
        """
        self.weight_gradients.split(is_split)
        try:
            self.function.make_program(inputs, self.function.own_kwargs(len(inputs), kwargs))
        finally:
            self.weight_gradients.unsplit()

    def begin(self, training, micro_batch_num=1, is_split=False, waits=False):
        """See `CellPasses`; `is_split`: whether the table has steps `BWD_INPUT` and `BWD_WEIGHT` of this stage."""
        if ms.get_context("mode") == ms.GRAPH_MODE:
            raise ValueError(
                "a pipeline's schedule runs in PyNative: leave ms.set_context(mode=ms.GRAPH_MODE) out, and have the "
                "stages compiled by PipelineStage(..., compiled=True)"
            )
        self._check_trained()
        super().begin(training, micro_batch_num, is_split, waits)

    def forward(self, micro_index, inputs, kwargs):
        """See `CellPasses`; `kwargs` are those of the run."""
        kwargs = self.function.own_kwargs(len(inputs), kwargs)
        self.function.make_program(inputs, kwargs)
        outputs = super().forward(micro_index, inputs, kwargs)
        if not self.is_last and self.function.layouts not in self._agreed:
            described = self._rank_stages.described
            check_boundary(self.function.layouts, *described[self.stage_index : self.stage_index + 2])
            self._agreed.add(self.function.layouts)
        return outputs

    def block(self, micro_index):
        """`block_of` a micro-batch of this run."""
        return block_of(self._storage.replica, self.weight_gradients.runs, micro_index, self._micro_batch_num)

    def _check_trained(self):
        """Raise `ValueError` where parameters were frozen or thawed, or cut by `hsdp()`, since the stage was made."""
        if isinstance(self.cell, ShardedCell) and tree_of(self.cell).storage is not self._storage:
            raise ValueError(
                f"hsdp() was called with {self.label} after its PipelineStage was made: call it before, and make the "
                "stage, and the schedule, anew"
            )
        self._storage.prepare_pipeline(self.stage_num)
        if self._storage.settings is not None:  # which have checked it
            return
        trained = {parameter for parameter in computing_parameters(self.cell) if parameter.requires_grad}
        if changed := [each.name for each in trained ^ {*self.weight_gradients.parameters}]:
            raise ValueError(
                f"requires_grad of '{min(changed)}' has changed since stage {self.stage_index} was made: make its "
                "PipelineStage, and the schedule, anew"
            )
