"""Numbers and gradients of a sample on simulated ranks, against one card."""

import re
from itertools import combinations
from zlib import crc32

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.program.structure import tree_leaves
from mindformers_core.sharding.shard import shard
from mindformers_core.verification.verifying import verify
from operator_samples.calls import build, parameter_shapes, plain_call
from operator_samples.measure import AXIS, UNDEFINED, one_line, placements

__all__ = ["compare"]

_TOLERANCE = 1e-2  # of plain calls, whose dtypes may be float16 and bfloat16
# samples whose numbers aren't compared, with the reason
_NOT_COMPARED = {
    "ops.trapz": "MindSpore's GatherD writes into negative indices: the constant of one card changes",
    **dict.fromkeys(UNDEFINED, "the numbers are whatever the memory holds"),
    **dict.fromkeys(
        ("ops.hinge_embedding_loss", "nn.HingeEmbeddingLoss"), "MindSpore adds gradients of truth values to float ones"
    ),
    "ops.eig": "eigenvectors have any phase, another one in float64",
    "ops.eigvals": "MindSpore's operator has a further result, which is never written",
    "ops.eps": "it tells the dtype, and all is compared in float64",
    **dict.fromkeys(
        (f"ops.{name}" for name in ("hfft", "hfft2", "hfftn", "ihfft", "ihfft2", "ihfftn")),
        "MindSpore's is right in every second call (docs/mindspore.md)",
    ),
}


def compare(sample, cpu=True, pairs=0):
    """`"equal"`, or `"equal, without gradients"`; or what differs, or why it can't be compared, in a line.

    Args:
        sample: the `Sample`.
        cpu: whether the plain call runs on CPU.
        pairs: how many pairs of cuts are tried besides, drawn at random: over two axes of a mesh (2, 2), or over one.

    Every placement is run by `verify`: values and gradients of the captured program, rank by rank. Its results on one
    card are held against the call on plain tensors, too, where that runs on CPU and gives the same numbers twice.
    """
    if sample.target in _NOT_COMPARED:
        return f"not compared: {_NOT_COMPARED[sample.target]}"
    (cell, inputs), detached = build(sample), _has_no_gradient(sample)
    single = [((*place, AXIS),) for place in placements(inputs, parameter_shapes(cell))]
    for cuts in ((), *single, *_pairs(sample, single, pairs)):
        where = ", ".join(f"{place}.{dim} over {axis}" for place, dim, axis in cuts) or "whole"
        try:
            check = _verified(sample, cuts, detached)
        except Exception as error:
            return f"not compared, {where}: {one_line(error, 600)}"
        if check.faults:
            return f"differs, {where}: {' '.join(check.report().split())[:400]}"
        if not cuts and cpu and (difference := _from_plain(sample, check.truth)):
            return f"differs, {where}: {difference}"
    return "equal, without gradients" if detached else "equal"


def _has_no_gradient(sample):
    """Whether MindSpore has no gradient of an operator."""
    try:
        _verified(sample, ())
    except Exception as error:
        return "bprop not defined" in str(error)
    return False


def _pairs(sample, single, count):
    """Some pairs of cuts of different dims, the same ones in every run."""
    random = np.random.default_rng(crc32(str(sample).encode()))
    found = [(one, (*other, axis)) for (one,), ((*other, _),) in combinations(single, 2) for axis in (AXIS, "dp")]
    found = [cuts for cuts in found if cuts[1][2] == "dp" or cuts[0][0] != cuts[1][0]]  # one tensor: by different axes
    return [found[place] for place in random.permutation(len(found))[:count]]


def _verified(sample, cuts, detached=False):
    """The `Check` of a sample; `cuts`: `(number of an input or name of a Parameter, dim, axis)`."""
    cell, inputs = build(sample, True, detached)
    shapes, dims = parameter_shapes(cell), {}
    for where, dim, axis in cuts:
        rank = len(shapes[where] if isinstance(where, str) else inputs[where].shape)
        dims.setdefault(where, [None] * rank)[dim] = axis
    entry = {"input": {}, "weight": {}}
    for where, axes in dims.items():
        is_weight = isinstance(where, str)
        entry["weight" if is_weight else "input"][where if is_weight else f"x{where}"] = layout(*axes)
    entry = {kind: layouts for kind, layouts in entry.items() if layouts}
    axes = ("dp", AXIS) if any(axis == "dp" for *_, axis in cuts) else (AXIS,)
    mesh, plan = DeviceMesh((2,) * len(axes), axes), {"": entry} if entry else None
    # each rank builds its own: some of MindSpore's primitives can't be copied
    return verify(lambda: shard(build(sample, True, detached)[0], mesh, plan=plan), mesh, *inputs)


def _floating(result):
    """The floating and complex results as arrays of double precision."""
    tensors = [tensor for tensor in tree_leaves(result, Tensor) if re.search("Float|Complex", str(tensor.dtype))]
    arrays = [(tensor.float() if tensor.dtype == ms.bfloat16 else tensor).asnumpy() for tensor in tensors]
    return [array.astype(np.complex128 if np.iscomplexobj(array) else np.float64) for array in arrays]


def _from_plain(sample, truth):
    """How the captured program's results on one card differ from those of the plain call; empty where they don't."""
    first, again = (_floating(plain_call(sample)) for _ in range(2))
    if any(not np.array_equal(one, other, equal_nan=True) for one, other in zip(first, again, strict=True)):
        return ""  # a draw
    *found, _ = next(iter(truth.outputs.values()))
    if len(found) != len(first):
        return f"{len(found)} floating results, and {len(first)} of the plain call"
    for one, other in zip(found, first, strict=True):
        if one.shape != other.shape:
            return f"shape {one.shape}, and {other.shape} of the plain call"
        scale = np.nanmax(np.abs(other), initial=1e-30, where=np.isfinite(other))
        if not np.allclose(one, other, rtol=0, atol=_TOLERANCE * scale, equal_nan=True):
            return "other numbers than the plain call"
    return ""
