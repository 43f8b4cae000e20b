"""One optimizer step as one function of tensors: micro-steps, one reduction of gradients, clipping, and the update."""

from mindformers_core.tensor_parallel import jit
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.zero import value_and_grad

__all__ = ["step_function", "update_function"]


def step_function(net, optimizer, max_norm, compiled, given):
    """The function that takes one step.

    Forward and backward pass run once for every micro-batch. In graph mode they are one compiled function, and clipping
    and update another: the schedule of micro-steps and collectives of gradients stays in Python.

    Args:
        net: the model that `hsdp()` returned; called with the arrays of a batch, it gives the loss.
        optimizer: an `AdamW` of its parts, `net.trainable_params()`.
        max_norm: of the gradients, see `ClipByGlobalNorm`.
        compiled: whether the passes and the update are compiled, each at its first call.
        given: what the model takes in a micro-batch, see `micro_batch`; its program is made now.

    Returns:
        A function of the tensors that the model is called with, a sequence, each of shape (micro-batches, samples of
        one, …) on this rank, as many micro-batches as hsdp's `accumulate_grad_step`; and of the float32 scalars of
        `AdamW.scalars`. It updates the parameters, and returns the mean loss and the gradients' norm before clipping,
        local tensors that are the same on all ranks.
    """
    gradient_of = value_and_grad(net, compiled=compiled)
    gradient_of.prepare(*given)
    update = update_function(optimizer, ClipByGlobalNorm(optimizer.parameters, max_norm), compiled)

    def step(arrays, rate, eps, decay):
        losses, gradients = [], None
        for inputs in zip(*arrays, strict=True):
            assert gradients is None, f"{len(arrays[0])} micro-batches are more than accumulate_grad_step"
            loss, gradients = gradient_of(*inputs)
            losses.append(loss)
        return sum(losses) / len(losses), update(rate, eps, decay, *gradients)

    return step


def update_function(optimizer, clip, compiled):
    """The function of the scalars of `AdamW.scalars` and of all reduced gradients, one by one, that clips, updates,
    and returns the norm before clipping.

    Args:
        optimizer: an `AdamW`.
        clip: the `ClipByGlobalNorm` of its parameters.
        compiled: whether it is compiled, at its first call. Numbers that change from step to step are tensors, so that
            it is compiled once.
    """

    def update(rate, eps, decay, *gradients):  # one by one: tensors in a tuple would be compiled in as constants
        clipped, norm = clip(gradients)
        optimizer(clipped, rate, eps, decay)
        return norm

    return jit(update) if compiled else update
