"""`value_and_grad()`: the micro-steps of a Cell under `hsdp()`, and the reduced gradients of a step."""

from mindformers_core.algorithms.dropout import block_of, draws_of, next_draw
from mindformers_core.hints import check_loss
from mindformers_core.mindspore_private import pynative_executor
from mindformers_core.passes.cell_passes import CellPasses
from mindformers_core.sharding.recordings import forget_recordings
from mindformers_core.zero.loss_scale import LossScale
from mindformers_core.zero.storage import storage_of


def value_and_grad(cell, compiled=False, loss_scale=None, loss="mean"):
    """The function that computes a micro-step of a Cell: forward and backward pass, and the reductions of the last one.

    The function replaces that of `mindspore.value_and_grad`:

    >>> gradient_of = value_and_grad(cell)
    >>> loss, gradients = gradient_of(*inputs)
    >>> if gradients is not None:
    ...     optimizer(gradients)

    Args:
        cell: the result of `hsdp()`. The Cell returns the loss, a floating scalar, alone or as its first result.
        compiled: whether forward and backward pass are compiled with `jit`: as one function, or, where units are
            gathered one by one, as one for each unit. A compiled function returns all gradients at its end.
        loss_scale: a `LossScale`; gradients are unscaled, and None in a step with infinite or NaN gradients.
        loss: `"mean"`: every micro-step weighs alike. `"sum"`: the Cell returns the sum of its labels' losses and,
            second, the number of these labels; gradients are those of the mean over all labels of the step, wherever
            they lie. Those of a sum are larger: begin with a lower `LossScale`. Default: `"mean"`.

    Returns:
        A function of local inputs, arguments of the Cell, in PyNative. It returns `(results, gradients)`: the Cell's
        results, as local tensors, and for every `accumulate_grad_step`-th call a tuple in the order of
        `cell.trainable_params()`, otherwise None. A gradient has the shape and dtype of its parameter; it is the sum
        over ranks of the terms of a loss that the mesh computes together, or (`gradients_mean`) the mean over ranks
        with losses of their own; and the mean over micro-steps, or over labels. All ranks call the function alike. Its
        `prepare(*inputs)` makes the program of such a call without computing.

    Raises:
        TypeError, ValueError: a Cell without `hsdp()`, or without parameters to train; a loss scale that differs among
            ranks. The function: a Cell that returns no loss; parameters frozen or replaced since `hsdp()`; a step that
            another function has begun; at the first gradients of each function, an optimizer that can't update shards.
    """
    storage = storage_of(cell)
    if not isinstance(compiled, bool):
        raise TypeError(f"value_and_grad(compiled={compiled!r}): should be True or False")
    if not storage.trained:
        raise ValueError(f"{storage.label} has no parameters to train: leave it as it is, and call it")
    if loss_scale is not None:
        _check_loss_scale(loss_scale, storage)
    check_loss(loss, "value_and_grad")
    return _GradientFunction(cell, compiled, loss_scale, loss == "sum")


def _check_loss_scale(loss_scale, storage):
    if not isinstance(loss_scale, LossScale):
        raise TypeError(f"value_and_grad(loss_scale={loss_scale!r}): should be a LossScale, such as LossScale(mesh=…)")
    mesh = storage.settings.mesh
    if mesh.size > 1 and (loss_scale.mesh is None or not set(mesh.rank_list) <= set(loss_scale.mesh.rank_list)):
        raise ValueError(
            f"{storage.label} is trained by the {mesh.size} ranks of {mesh}, which have to skip a step together, but "
            f"LossScale asks {'this rank alone' if loss_scale.mesh is None else f'those of {loss_scale.mesh!r}'}: give "
            "it the mesh, LossScale(mesh=mesh)"
        )


class _GradientFunction(CellPasses):
    """The function that `value_and_grad` returns: the runs of a pipeline of one stage, with a micro-batch each."""

    def __init__(self, cell, compiled, loss_scale, has_count):
        super().__init__(cell, storage_of(cell).label, None, compiled, loss_scale=loss_scale, has_count=has_count)
        self._storage.has_checked = False  # optimizers may have been built since

    def __call__(self, *inputs, **kwargs):
        own, storage = self.weight_gradients, self._storage
        storage.check_trained()
        try:
            self.prepare(*inputs, **kwargs)
            if own.runs == 0:
                if pynative_executor.grad_flag():  # an error has ended another gradient
                    forget_recordings()
                storage.check_closed()
                self._first_draw = next_draw()
            self.begin(training=True)
            with draws_of(block_of(storage.replica, own.runs), self._first_draw):
                results = self.forward(0, inputs, kwargs)
            self.backward_input(0)
            self.backward_weight(0)
            if self.has_count:
                own.labels = self.labels if own.labels is None else own.labels + self.labels
            own.end(is_complete=True)
            gradients = None
            if own.runs == storage.settings.accumulate_grad_step:
                gradients = own.reduced()
                own.forget()
        except BaseException:
            self._passes.forget()
            own.forget()
            raise
        if gradients is not None and self._loss_scale is not None:
            gradients = self._loss_scale.unscale(gradients)
        return (results[0] if len(results) == 1 else results), gradients

    def prepare(self, *inputs, **kwargs):
        """Make the program of a call without computing; a `TensorMeta` may replace a tensor."""
        self.function.make_program(inputs, kwargs)
        self.function.check_gradients()
