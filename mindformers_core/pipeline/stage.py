"""`PipelineStage`: a part of a model with its place in a pipeline, and the actions of a schedule's steps."""

from contextlib import nullcontext

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.algorithms.dropout import block_of
from mindformers_core.communication import channel, world
from mindformers_core.dtypes import dtype_name
from mindformers_core.hints import check_loss
from mindformers_core.passes.forward_backward import ForwardBackward, is_differentiable
from mindformers_core.passes.stage_function import StageFunction
from mindformers_core.passes.step_gradients import StepGradients
from mindformers_core.pipeline.agreement import check_boundary
from mindformers_core.pipeline.rank_stages import RankStages
from mindformers_core.sharding.parameter_storage import parameter_storage
from mindformers_core.sharding.sharded_cells import ShardedCell, computing_parameters, own_class, tree_of
from mindformers_core.sharding.whole_tensors import note_owner


class PipelineStage:
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
        mesh: the `DeviceMesh` of all ranks, with the pipeline's axis. Default: one axis of all ranks of the world.
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
        is_last: whether this stage returns the loss; has_count: whether that is a sum, with a number of labels.
        ranks: the global ranks of the pipeline that this rank belongs to, in the axis' order; `rank_num` of them.
        parameters: tuple of the trainable `Parameter`s, `cell.trainable_params()`.
        function: the `StageFunction` of the Cell.
        weight_gradients: the `StepGradients` of the Cell.

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
        self.cell, self.stage_index, self.stage_num, self.compiled = cell, stage_index, stage_num, compiled
        self.is_last, self.has_count = stage_index == stage_num - 1, loss == "sum"
        self.label = f"the {own_class(cell).__name__} of stage {stage_index}"
        self.tied = tuple(tied)
        here = world()
        self.ranks = tuple(range(here.size)) if mesh is None else mesh.group(here.rank, (axis,))
        self.rank_num = len(self.ranks)
        self.axis = axis
        self._storage = parameter_storage(cell)
        self._storage.prepare_pipeline()
        self.parameters = tuple(cell.trainable_params())
        self.function = StageFunction(cell, loss_fn, compiled)
        self.weight_gradients = StepGradients(cell, self._storage)
        self._passes = ForwardBackward(_first if self.is_last else _floating, self._storage.backward_scope)
        self._rank_stages, self._loss_scale = None, loss_scale
        self._agreed = set()  # layouts of outputs that the next stage takes
        self._training, self._micro_batch_num, self._is_split = False, 1, False
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

    def begin(self, training, micro_batch_num, is_split, is_tied):
        """Begin a pass, and drop the state of a pass that failed.

        Args:
            training: whether backward passes follow.
            micro_batch_num: number of micro-batches, the divisor of the gradients.
            is_split: whether the table has steps `BWD_INPUT` and `BWD_WEIGHT` of this stage.
            is_tied: whether the sums of its gradients wait for other stages: for their terms, or the number of labels.
        """
        if ms.get_context("mode") == ms.GRAPH_MODE:
            raise ValueError(
                "a pipeline's schedule runs in PyNative: leave ms.set_context(mode=ms.GRAPH_MODE) out, and have the "
                "stages compiled by PipelineStage(..., compiled=True)"
            )
        self._check_trained()
        self._training, self._micro_batch_num, self._is_split = training, micro_batch_num, is_split
        self._passes.forget()
        self.weight_gradients.begin(training, is_split, micro_batch_num, is_tied)

    def end(self, is_complete):
        """End a pass: add its gradients to those of the runs before, or drop them if the pass failed."""
        self.weight_gradients.end(is_complete)

    def forward(self, micro_index, inputs, kwargs):
        """Forward pass of a micro-batch.

        Args:
            micro_index: its number.
            inputs: the outputs of the stage before; for the first stage the run's positional arguments.
            kwargs: the run's keyword arguments.

        Returns:
            A tuple of local tensors: the Cell's outputs, or the loss of `loss_fn`.
        """
        kwargs = self.function.own_kwargs(len(inputs), kwargs)
        self.function.make_program(inputs, kwargs)
        if self._training:
            self.function.check_gradients()
        outputs = self._recorded(micro_index, inputs, kwargs) if self._training else self.function(inputs, kwargs)
        self._storage.free_units()
        if not self.is_last and self.function.layouts not in self._agreed:
            described = self._rank_stages.described
            check_boundary(self.function.layouts, *described[self.stage_index : self.stage_index + 2])
            self._agreed.add(self.function.layouts)
        return outputs

    def block(self, micro_index):
        """`block_of` a micro-batch of this run."""
        return block_of(self._storage.replica, self.weight_gradients.runs, micro_index, self._micro_batch_num)

    def _recorded(self, micro_index, inputs, kwargs):
        """A forward pass that is recorded for its backward pass."""
        places = [] if self.stage_index == 0 else [p for p, tensor in enumerate(inputs) if is_differentiable(tensor)]
        if not places and not self.parameters:  # PyNative never frees a tape without a backward pass
            return self._passes.remember(micro_index, self._checked(self.function(inputs, kwargs)))

        def function(*recorded):
            merged = list(inputs)
            for place, tensor in zip(places, recorded):
                merged[place] = tensor
            return self._checked(self.function(merged, kwargs))

        return self._passes.forward(micro_index, function, [inputs[place] for place in places])

    def backward_input(self, micro_index, gradients):
        """Backward pass of a micro-batch, without the weights' gradients, which `backward_weight` adds.

        Args:
            micro_index: its number.
            gradients: of this stage's floating outputs, in order; None on the last stage.

        Returns:
            The gradients of this stage's floating inputs, in order, for the stage before; () on the first.
        """
        outputs = self._passes.outputs(micro_index)
        if gradients is None:
            scale = 1.0 if self._loss_scale is None else self._loss_scale.value
            gradients = (ops.full_like(outputs[0], scale if self.has_count else scale / self._micro_batch_num),)
        wanted, received = ([(tensor.shape, tensor.dtype) for tensor in each] for each in (outputs, gradients))
        if wanted != received:
            raise ValueError(
                f"stage {self.stage_index + 1} gave back gradients {_shown(gradients)} for the floating outputs "
                f"{_shown(outputs)} of {self.label}"
            )
        if not self._is_split:
            self._begin_adding()
        weights = self.weight_gradients.differentiated()
        given, found = self._passes.backward(micro_index, gradients, weights, self.weight_gradients.is_split)
        self._storage.free_units()
        self.weight_gradients.keep(micro_index, found)
        return given

    def backward_weight(self, micro_index):
        """Add a micro-batch's gradients of the weights to the sums of the run, after `backward_input`."""
        is_split = self.weight_gradients.is_split  # else the backward pass was observed with them
        if self._is_split:
            self._begin_adding()
        with self._passes.observed(micro_index, "backward") if is_split else nullcontext():
            self.weight_gradients.add(micro_index)

    def _begin_adding(self):
        """Before the gradients of a micro-batch are added, as they come unless the table splits the backward pass."""
        labels = (self.weight_gradients.labels or 0) + self._rank_stages.labels if self.has_count else None
        self.weight_gradients.begin_adding(labels, not self._is_split, self.function.compiled)

    def _checked(self, outputs):
        """Return `outputs`; raise an error unless a backward pass can start at them."""
        if not self.is_last and not _floating(outputs):
            found = _shown(outputs)
            raise TypeError(f"{self.label} gave {found}: without a floating tensor no gradient can come back")
        if self.is_last and (outputs[0].ndim > 0 or not is_differentiable(outputs[0])):
            raise ValueError(
                f"{self.label}, the last stage, should return the loss, a floating scalar, alone or first, or get a "
                f"loss_fn; it gave {_shown(outputs)}"
            )
        return outputs

    def _check_trained(self):
        """Raise `ValueError` where parameters were frozen or thawed, or cut by `hsdp()`, since the stage was made."""
        if isinstance(self.cell, ShardedCell) and tree_of(self.cell).storage is not self._storage:
            raise ValueError(
                f"hsdp() was called with {self.label} after its PipelineStage was made: call it before, and make the "
                "stage, and the schedule, anew"
            )
        self._storage.prepare_pipeline()
        if self._storage.settings is not None:  # which have checked it
            return
        trained = [parameter for parameter in computing_parameters(self.cell) if parameter.requires_grad]
        known, now = ({id(p): p.name for p in parameters} for parameters in (self.weight_gradients.parameters, trained))
        if known.keys() != now.keys():
            name = next(name for place, name in (known | now).items() if (place in known) != (place in now))
            raise ValueError(
                f"requires_grad of '{name}' has changed since stage {self.stage_index} was made: make its "
                "PipelineStage, and the schedule, anew"
            )


def _first(outputs):
    return outputs[:1]


def _floating(outputs):
    return tuple(tensor for tensor in outputs if is_differentiable(tensor))


def _shown(tensors):
    return ", ".join(f"{dtype_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors) or "no tensor"
