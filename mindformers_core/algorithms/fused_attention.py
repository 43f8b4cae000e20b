"""Attention by Ascend's kernels, where each query sees the keys of one band around its own place.

They are MindSpore's `FlashAttentionScore` and its gradient (layout BSND). Their other masks are tensors of all pairs,
and lengths of documents that are known on the host; those are computed in blocks. On GPU, MindSpore has no such kernel.
No Ascend device has run this: tests do, with kernels that are simulated as MindSpore documents them.
"""

from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.ops.auto_generate import FlashAttentionScore
from mindspore.ops.auto_generate.gen_ops_prim import FlashAttentionScoreGrad

from mindformers_core.mindspore_private import outside_of_meta

_SIDE, _STEP, _LARGEST = 2048, 16, 512  # of the mask of a band; head sizes are multiples of 16 up to 512
_REPEATED = 8  # of each maximum and sum, along a last dim
_NOTHING = 3e37  # the negative of logarithms below which a sum is one of nothing


def fits_kernel(dtype, size, value_size, drop):
    """Whether there is a kernel for a dtype and these sizes of heads: its weights would be dropped by a whole mask."""
    is_half = dtype in (ms.float16, ms.bfloat16)
    is_sized = size == value_size and size % _STEP == 0 and size + _STEP <= _LARGEST
    with outside_of_meta():
        return ms.get_context("device_target") == "Ascend" and is_half and is_sized and not drop


def kernel_arguments(band, length):
    """Of a kernel: which mode of masks a band has, with how many keys before and after; and whether it needs a mask."""
    before, after = (length if each is None else each for each in band)
    mode = 0 if band == (None, None) else 2 if band == (None, 0) else 4
    return {"pre_tokens": before, "next_tokens": after, "sparse_mode": mode}, mode != 0


def attend_fused(query, key, value, scale, band):
    """As `attend_part`."""
    known, has_mask = kernel_arguments(band, query.shape[1])
    kernel = FlashAttentionScore(query.shape[2], scale_value=scale, input_layout="BSND", **known)
    mask = _triangle() if has_mask else None
    top, total, _, output = kernel(query, key, value, None, None, None, mask)
    return ops.cast(output, ms.float32), top[..., 0] + ops.log(total[..., 0])


def attend_fused_gradient(query, key, value, scale, band, sums, delta, gradient):
    """As `attend_gradient`.

    The kernel takes maximum and sum: those are `sums` and 1. It makes delta itself, of output and gradient; to give it
    ours, heads get further columns: 0 in query, key and value, 1 in the gradient, and in the output parts of delta.
    """
    known, has_mask = kernel_arguments(band, query.shape[1])
    kernel = FlashAttentionScoreGrad(query.shape[2], scale_value=scale, input_layout="BSND", **known)
    rest, parts = ops.transpose(delta, (0, 2, 1)), []
    for _ in range(3):  # of 8 bits at least
        parts.append(ops.cast(rest, query.dtype))
        rest = rest - ops.cast(parts[-1], rest.dtype)
    parts, slopes = ops.stack(parts, 3), ops.cast(gradient, query.dtype)
    output = _wider(ops.zeros_like(slopes), parts)
    top = ops.where(ops.less(sums, -_NOTHING), _NOTHING, sums)  # rows that see nothing: all weights are 0
    top = ops.broadcast_to(ops.expand_dims(top, 3), (*top.shape, _REPEATED))
    given = _wider(query), _wider(key), _wider(value), _wider(slopes, ops.ones_like(parts))
    mask = _triangle() if has_mask else None
    found = kernel(*given, None, None, None, mask, top, ops.ones_like(top), None, output)
    return [ops.cast(each[..., : query.shape[3]], ms.float32) for each in found[:3]]


def _wider(x, *columns):
    """Heads (batch, length, heads, size) with these columns behind, and zeros."""
    count = _STEP - sum(each.shape[3] for each in columns)
    return ops.cat((x, *columns, ops.zeros((*x.shape[:3], count), x.dtype)), 3)


@cache
def _triangle():
    """The mask that stands for every band: 1 where a key lies behind its query."""
    with outside_of_meta():
        return Tensor(np.triu(np.ones((_SIDE, _SIDE), np.uint8), 1))
