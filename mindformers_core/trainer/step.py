"""One optimizer step as one function of tensors: PyNative runs it, and graph mode compiles the very same."""

import mindspore as ms

from mindformers_core.operators import tensor_meta
from mindformers_core.tensor_parallel import jit, prepare
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm

__all__ = ["step_function"]


def step_function(net, optimizer, max_norm, batch_shape, compiled):
    """The function that takes one step.

    Numbers that change from step to step are tensors, so that it is compiled once. Compiled, the micro-batches are
    unrolled, and so compiling takes longer the more there are.

    Args:
        net: the sharded model; called with input ids and labels, it gives the loss.
        optimizer: an `AdamW`.
        max_norm: of the gradients, see `ClipByGlobalNorm`.
        batch_shape: (micro-batches, sequences of one, tokens of a sequence), on this rank.
        compiled: whether it is compiled as one graph, at its first call.

    Returns:
        A function of `input_ids` and `labels`, int32 tensors of shape `batch_shape`, and of the float32 scalars of
        `AdamW.scalars`. It updates the parameters, and returns the mean loss and the gradients' norm before clipping,
        local tensors that are the same on all ranks.
    """
    micro_batches, *shape = batch_shape
    if compiled:  # else the first compilation stops where it needs the program, and says so
        ids = tensor_meta(tuple(shape), "int32")
        prepare(net, ids, ids)
    gradient_of = ms.value_and_grad(net if compiled else _local_results(net), None, optimizer.parameters)
    clip = ClipByGlobalNorm(optimizer.parameters, max_norm)

    def step(input_ids, labels, rate, eps, decay):
        loss, gradients = gradient_of(input_ids[0], labels[0])
        for index in range(1, micro_batches):
            more, new = gradient_of(input_ids[index], labels[index])
            loss = loss + more
            gradients = _added(gradients, new)
        if micro_batches > 1:
            loss = loss / micro_batches
            gradients = _divided(gradients, micro_batches)
        gradients, norm = clip(gradients)
        optimizer(gradients, rate, eps, decay)
        return loss, norm

    return jit(step) if compiled else step


def _local_results(net):
    """`net` with the loss as a compiled function sees it: a plain local tensor."""

    def run(input_ids, labels):
        return net(input_ids, labels).to_local()

    return run


def _added(gradients, others):
    """The sums, place by place; a loop that the compiler of graphs understands."""
    summed = ()
    for one, other in zip(gradients, others):
        summed = summed + (one + other,)
    return summed


def _divided(gradients, count):
    quotients = ()
    for gradient in gradients:
        quotients = quotients + (gradient / count,)
    return quotients
