"""Forward and backward passes in a thread: MindSpore's `GradOperation` keeps one stack of tapes for the whole process.

The autograd of PyNative records on the tensors themselves where its flag, which belongs to the thread, is set;
`run_backward`, a private function of MindSpore, differentiates. A Cell with a `bprop` needs a tape of the process:
`custom_gradients` records it as a `Function`.
"""

from mindspore import nn, ops

from mindformers_core import mindspore_private as private
from mindformers_core.scopes import replaced


class ThreadTape:
    """The tape of one call in this thread; see `ForwardBackward`."""

    def record(self, function, inputs):
        """Call `function(*inputs)`, and record what it computes."""
        for tensor in inputs:
            tensor.requires_grad_()
        private.pynative_executor.set_grad_flag(True)
        try:
            function(*inputs)
        finally:
            private.pynative_executor.set_grad_flag(False)

    def gradients(self, inputs, outputs, sens, weights):
        """The gradients of the recorded call's inputs and of weights, two tuples, from those of its outputs."""
        wanted = (*inputs, *weights)
        recorded = [place for place, output in enumerate(outputs) if private.needs_gradient(output)]
        outputs, sens = (tuple(each[place] for place in recorded) for each in (outputs, sens))
        found = [None] * len(wanted)
        if outputs and wanted:
            found = private.run_backward(outputs, sens, False, False, wanted, True, accumulate_grad=False)
        found = [ops.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, found, strict=True)]
        return tuple(found[: len(inputs)]), tuple(found[len(inputs) :])


def custom_gradients():
    """While open, MindSpore records Cells with a `bprop` in the calling thread's autograd, in all threads."""
    return replaced(nn.Cell, **{private.CUSTOM_BPROP: _call_recorded})


def _call_recorded(cell, *args, **kwargs):
    given = private.construct_signature(cell).bind(*args, **kwargs).args if kwargs else args
    return _CustomGradient.apply(cell, *given)


class _CustomGradient(private.Function):
    """A call of a Cell with a `bprop`."""

    @staticmethod
    def forward(ctx, cell, *inputs):
        with private.no_grad():
            ctx.out = cell.construct(*inputs)
        ctx.cell, ctx.inputs = cell, inputs
        return ctx.out

    @staticmethod
    def backward(ctx, *gradients):
        dout = gradients if isinstance(ctx.out, tuple) else gradients[0]
        found = ctx.cell.bprop(*ctx.inputs, ctx.out, dout)
        return None, *(found if isinstance(found, tuple) else (found,))
