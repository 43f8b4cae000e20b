"""The passes of a Cell over micro-batches: forward, backward, the sums of its weights' gradients, their reduction."""

from contextlib import nullcontext
from operator import itemgetter

from mindspore import ops

from mindformers_core.dtypes import dtype_name
from mindformers_core.passes.forward_backward import ForwardBackward, is_differentiable
from mindformers_core.passes.label_counts import label_count
from mindformers_core.passes.stage_function import StageFunction
from mindformers_core.passes.step_gradients import StepGradients
from mindformers_core.sharding.parameter_storage import parameter_storage


class CellPasses:
    """Runs forward and backward passes of a Cell, micro-batch by micro-batch.

    Args:
        label: its name in errors.
        loss_fn, compiled: as of `PipelineStage`.
        is_first, is_last: whether the inputs are those of the model, without gradients; whether it returns the loss.
        loss_scale: a `LossScale`, or None; of the last.
        has_count: whether the loss is a sum, with a number of labels; of the last.

    Attributes:
        cell, label, is_first, is_last, has_count: as given.
        function: the `StageFunction` of the Cell.
        weight_gradients: the `StepGradients` of the Cell.
        labels: number of the labels of the current pass's micro-batches so far; 0 where it doesn't count.
    """

    def __init__(
        self, cell, label, loss_fn=None, compiled=False, is_first=True, is_last=True, loss_scale=None, has_count=False
    ):  # fmt: skip
        self.cell, self.label, self.is_first, self.is_last, self.has_count = cell, label, is_first, is_last, has_count
        self._storage, self._loss_scale = parameter_storage(cell), loss_scale
        self.function = StageFunction(cell, loss_fn, compiled)
        self.weight_gradients = StepGradients(cell, self._storage)
        self._passes = ForwardBackward(itemgetter(slice(1)) if is_last else _floating, self._storage.backward_scope)

    def begin(self, training, micro_batch_num=1, is_split=False, waits=False):
        """Begin a pass, and drop the state of a pass that failed.

        Args:
            training: whether backward passes follow.
            micro_batch_num: number of micro-batches, the divisor of the gradients.
            is_split: whether `backward_weight` doesn't follow at once on `backward_input`.
            waits: see `StepGradients.begin`.
        """
        self._training, self._micro_batch_num, self._is_split, self.labels = training, micro_batch_num, is_split, 0
        self._passes.forget()
        self.weight_gradients.begin(training, is_split, micro_batch_num, waits)

    def forward(self, micro_index, inputs, kwargs):
        """Forward pass of a micro-batch, whose program is made.

        Args:
            micro_index: its number.
            inputs: positional arguments of the Cell.
            kwargs: its other arguments, and `target`.

        Returns:
            A tuple of local tensors: the Cell's outputs, or the loss of `loss_fn`.
        """
        if self._training:
            self.function.check_gradients()
        outputs = self._recorded(micro_index, inputs, kwargs) if self._training else self.function(inputs, kwargs)
        self._storage.free_units()
        if self.has_count:
            self.labels = self.labels + label_count(outputs, self.label)
        return outputs

    def _recorded(self, micro_index, inputs, kwargs):
        """A forward pass that is recorded for its backward pass."""
        places = [] if self.is_first else [place for place, each in enumerate(inputs) if is_differentiable(each)]
        if not places and not self.weight_gradients.parameters:  # PyNative never frees a tape without a backward pass
            return self._passes.remember(micro_index, self._checked(self.function(inputs, kwargs)))

        def function(*recorded):
            merged = dict(enumerate(inputs)) | dict(zip(places, recorded))
            return self._checked(self.function([*merged.values()], kwargs))

        return self._passes.forward(micro_index, function, [inputs[place] for place in places])

    def backward_input(self, micro_index, gradients=None):
        """Backward pass of a micro-batch, without the weights' gradients, which `backward_weight` adds.

        Args:
            micro_index: its number.
            gradients: of this Cell's floating outputs, in order; None on the last.

        Returns:
            The gradients of this Cell's floating inputs, in order, for the stage before; () on the first.
        """
        outputs = self._passes.outputs(micro_index)
        if gradients is None:
            scale = 1.0 if self._loss_scale is None else self._loss_scale.value
            gradients = (ops.full_like(outputs[0], scale if self.has_count else scale / self._micro_batch_num),)
        wanted, received = map(_shown, (outputs, gradients))
        if wanted != received:
            raise ValueError(f"gradients {received} came back for the floating outputs {wanted} of {self.label}")
        if not self._is_split:
            self._begin_adding()
        weights = self.weight_gradients.differentiated()
        given, found = self._passes.backward(micro_index, gradients, weights, self.weight_gradients.is_split)
        self._storage.free_units()
        self.weight_gradients.keep(micro_index, found)
        return given

    def backward_weight(self, micro_index):
        """Add a micro-batch's gradients of the weights to the sums of the run, after `backward_input`."""
        if self._is_split:
            self._begin_adding()
        is_split = self.weight_gradients.is_split  # else the backward pass was observed with them
        with self._passes.observed(micro_index, "backward") if is_split else nullcontext():
            self.weight_gradients.add(micro_index)

    def _begin_adding(self):
        """Before gradients are added, as they come unless that is a step of its own."""
        labels, comes = self.labels if self.has_count else None, not self._is_split
        self.weight_gradients.begin_adding(labels, comes, self.function.compiled)

    def _checked(self, outputs):
        """Return `outputs`; raise an error unless a backward pass can start at them."""
        if not self.is_last and not _floating(outputs):
            raise TypeError(f"{self.label} gave {_shown(outputs)}: without a floating tensor no gradient can come back")
        if self.is_last and (outputs[0].ndim > 0 or not is_differentiable(outputs[0])):
            raise ValueError(
                f"{self.label} should return the loss, a floating scalar, alone or first (a PipelineStage may have a "
                f"loss_fn): it gave {_shown(outputs)}"
            )
        return outputs


def _floating(outputs):
    return tuple(tensor for tensor in outputs if is_differentiable(tensor))


def _shown(tensors):
    return ", ".join(f"{dtype_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors) or "no tensor"
