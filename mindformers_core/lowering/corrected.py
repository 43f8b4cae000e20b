"""Operators that MindSpore gets wrong on CPU (docs/mindspore.md), for both engines: the same results from others."""

from mindspore import Tensor, dtype as mstype, ops
from mindspore.ops.auto_generate import (
    binary_cross_entropy_with_logits_impl,
    constant_pad_nd_op,
    nllloss_impl,
    softmax_impl,
)

from mindformers_core.algorithms import halo
from mindformers_core.algorithms.compiled import on_cpu
from mindformers_core.algorithms.dropout import next_random_state
from mindformers_core.algorithms.lookups import embedding_rows
from mindformers_core.lowering.einsum import contract
from mindformers_core.operators.words import word

_WITH_GRADIENT = (mstype.float16, mstype.float32, mstype.float64)


def index_added(x, dim, index, source, alpha=1):
    """`x.index_add`, which changes `x` on CPU, and can't be compiled there."""
    if not on_cpu():
        return x.index_add(dim, index, source, alpha=alpha)
    source = source if alpha == 1 else source * alpha
    added = ops.tensor_scatter_add(ops.swapaxes(x, 0, dim), ops.expand_dims(index, 1), ops.swapaxes(source, 0, dim))
    return ops.swapaxes(added, 0, dim)


def scattered(x, dim, index, src, reduce=0):
    """`x.scatter`: on CPU, all calls of a process do with updates what the first one does."""
    return ops.tensor_scatter_elements(x, index, src, dim, "none" if reduce in (0, "none") else "add")


def binary_cross_entropy_of_logits(x, target, weight=None, pos_weight=None, reduction=1):
    """The loss; on CPU, the gradient of a mean is divided by the number of elements of a process's first call."""
    loss = binary_cross_entropy_with_logits_impl(x, target, weight, pos_weight, ("sum", "sum", "none")[reduction])
    return loss * (1.0 / x.size) if reduction == 1 else loss


def cumulative_product(x, dim, exclusive=False, reverse=False):
    """`CumProd`; on CPU as log2(n) products with the tensor shifted (Hillis and Steele, 1986): MindSpore's gradient is
    divided by `x`, so NaN at zeros, and differs from call to call.
    """
    if not on_cpu() or x.dtype not in _WITH_GRADIENT:
        return ops.CumProd(exclusive, reverse)(x, dim)
    dim, shift = dim % x.ndim, 1
    product = _shifted(x, dim, 1, reverse) if exclusive else x
    while shift < x.shape[dim]:
        product = product * _shifted(product, dim, shift, reverse)
        shift = 2 * shift
    return product


def _shifted(x, dim, count, reverse):
    return halo.padded(x, dim, *((-count, count) if reverse else (count, -count)), 1.0)


def mish(x):
    """`Mish`, which is NaN on CPU from 45 on, where it has long been `x`."""
    if not on_cpu():
        return ops.mish(x)
    low = ops.minimum(x, 20.0)
    return ops.mish(low) + (x - low)


def softmax(x, axis=-1):
    """`Softmax`: on CPU, a row of -inf in float32 gives 0, and other rows are then wrong, too: it is made NaN before.

    The gradient over a dim of size 1 isn't 0 there, and spoils those of later calls.
    """
    dim = axis[0] if isinstance(axis, (tuple, list)) else axis
    if not on_cpu() or (isinstance(axis, (tuple, list)) and len(axis) > 1):
        return softmax_impl(x, axis)
    if x.shape[dim] == 1:
        return x - x + 1.0
    if x.dtype == mstype.float32 and dim in (-1, x.ndim - 1):
        _, top = ops.ArgMaxWithValue(-1, True)(ops.stop_gradient(x))
        x = x + ops.tile(top - top, (1,) * (x.ndim - 1) + x.shape[-1:])  # the addition is slow where it broadcasts
    return softmax_impl(x, axis)


def log_cumulative_sum(x, axis, exclusive=False, reverse=False):
    """`CumulativeLogsumexp`, of which the axis is a tensor."""
    return ops.CumulativeLogsumexp(exclusive, reverse)(x, Tensor(axis))


def negative_log_likelihood(logits, labels, weight, reduction=1, ignore_index=-100):
    """The loss; on CPU, without a reduction, those of ignored labels are left unwritten."""
    loss, total = nllloss_impl(logits, labels, weight, word("reduction", reduction), ignore_index)
    return (ops.masked_fill(loss, ops.equal(labels, ignore_index), 0.0) if reduction == 2 else loss), total


def padded(x, padding, value=0.0):
    """`ConstantPadND`: on CPU, there is no kernel, and that of `PadV3` leaves results unwritten where it cuts off."""
    if not on_cpu():
        return constant_pad_nd_op(x, padding, value)
    for place in range(len(padding) // 2):
        x = halo.padded(x, x.ndim - 1 - place, padding[2 * place], padding[2 * place + 1], value)
    return x


def centered(x, dim=None, more=1):
    """`FFTShift`: on CPU, MindSpore's gradient is right in the first call of a process and few others."""
    for place in range(x.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,):
        size = x.shape[place]
        first = (size + more) // 2
        if size > 1:
            x = ops.cat(ops.split(x, [first, size - first], place)[::-1], place)
    return x


def decentered(x, dim=None):
    """`IFFTShift`, likewise."""
    return centered(x, dim, 0)


@ops.constexpr
def _swapped(norm):
    """The other direction's `norm`, a name or MindSpore's number."""
    return {"forward": "backward", "ortho": "ortho"}.get(word("norm", norm), "forward")


def _per_dim(value):
    return (value,) if isinstance(value, int) else value


def to_real(x, sizes=None, dim=None, norm=None):
    """`HFFT`, `HFFT2` and `HFFTN`: on CPU, MindSpore's are conjugated in every second call of a process."""
    return ops.irfftn(ops.conj(x), _per_dim(sizes), _per_dim(dim), _swapped(norm))


def from_real(x, sizes=None, dim=None, norm=None):
    """`IHFFT`, `IHFFT2` and `IHFFTN`, likewise."""
    return ops.conj(ops.rfftn(x, _per_dim(sizes), _per_dim(dim), _swapped(norm)))


CORRECTED = {  # operators whose results or gradients MindSpore gets wrong on CPU, whatever they are given
    "BCEWithLogitsLoss": binary_cross_entropy_of_logits,
    **{"ConstantPadND": padded, "CumProd": cumulative_product, "EmbeddingLookup": embedding_rows, "Mish": mish},
    **{"FFTShift": centered, "IFFTShift": decentered, "IndexAddExt": index_added, "Scatter": scattered},
    **{"NLLLoss": negative_log_likelihood, "HFFT": to_real, "HFFT2": to_real, "HFFTN": to_real},
    **{"IHFFT": from_real, "IHFFT2": from_real, "IHFFTN": from_real},
}
OWN_FUNCTIONS = CORRECTED | {  # and others that are called in the place of MindSpore's own
    **{"CumulativeLogsumexp": log_cumulative_sum, "Einsum": contract, "Softmax": softmax},
    "RandomState": next_random_state,
}
