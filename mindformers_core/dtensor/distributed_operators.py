"""Algorithms of operators that are sharded along a dim that they reduce or look up in; results are those of one card.

Each is called as `algorithm(operator, args, context)` in the place of `operator(*args)`, where `operator` is the plain
operator and `args` hold local tensors. It consists of differentiable redistributions and operators, which give its
gradient. The distributed softmax and cross-entropy are those of Megatron-LM (arXiv 1909.08053, section 3): one maximum,
one sum.

An algorithm runs on tensors with values, or once on traced ones, to be recorded (`capture/algorithm_graph.py`). So its
control flow never depends on values, and numbers of a rank come from `context` as tensors: all ranks need equal graphs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from mindformers_core.communication import world
from mindformers_core.dtensor.draws import DISTRIBUTIONS
from mindformers_core.dtensor.dropout import (
    attention_with_dropout,
    counters,
    next_random_state,
)  # fmt: skip
from mindformers_core.dtensor.halo import shifted, windows, windows_with_index
from mindformers_core.dtensor.lookups import LOOKUPS, found_here, zero_where
from mindformers_core.dtensor.moments import group_norm
from mindformers_core.dtensor.move import dtype_name, redistribute_local
from mindformers_core.dtensor.scans import SCANS
from mindformers_core.dtensor.statistics import band, norm, product, spread, trace
from mindformers_core.layout import Layout

_LOWEST = -65504.0  # the lowest number of every float type


@dataclass(frozen=True)
class ShardContext:
    """How an operator is sharded: the axes, and the layouts and global shapes of its inputs.

    Attributes:
        mesh: the mesh.
        axes: the axes that shard the operator's own dim, major to minor; empty for an algorithm that always runs.
        layouts: the layout of every tensor input as the operator gets it.
        shapes: the global shape of every tensor input.
        rank: the rank that runs, or for which it is written down; None: this process's.
        redistribute: `redistribute(local, source, target)` takes a local tensor from one layout to another.
        next_random_state: gives seed and offset of the next random draw.
        halos: of the operator's `Signature`.
        output: layout and global shape of the first result.
        float_dtype: of all random numbers with fractions; None: the one that the operator is given.
    """

    mesh: object
    axes: tuple
    layouts: tuple
    shapes: tuple
    rank: int | None = None
    redistribute: Callable = redistribute_local
    next_random_state: Callable = next_random_state
    halos: dict = field(default_factory=dict)
    output: tuple = ()
    float_dtype: object = None

    @cached_property
    def count(self):
        """Number of parts."""
        return self.mesh.axis_size(*self.axes)

    def start(self, size, dtype):
        """The global position at which this rank's part begins, if all parts have this size: a tensor without dims.

        A number would make the graphs of two ranks differ, since MindSpore drops the addition of 0.
        """
        return Tensor(self.mesh.group_index(self._rank, self.axes) * size, dtype)

    def positions(self, dim):
        """The global positions along `dim` of this rank's part of the first input: a vector of int32."""
        part = self.layouts[0].local_slices(self.shapes[0], self._rank)[dim]
        return Tensor(np.arange(part.start, part.stop), mstype.int32)

    def start_along(self, dim, size, dtype):
        """As `start`, along the axes that shard a dim of the first input."""
        return Tensor(self.part(dim)[0] * size, dtype)

    def part(self, dim):
        """Number and count of this rank's part of a dim of the first input, as far as it is cut."""
        axes = self.layouts[0].axes[dim]
        return self.mesh.group_index(self._rank, axes), self.mesh.axis_size(*axes)

    def within(self, axes):
        """For those of the own axes that are among `axes`."""
        return replace(self, axes=tuple(axis for axis in self.axes if axis in axes))

    @cached_property
    def random_counters(self):
        """The counters of the random numbers of this rank's part of the first result; see `counters`."""
        layout, shape = self.output
        return tuple(map(Tensor, counters(shape, layout.local_slices(shape, self._rank))))

    @property
    def local_shape(self):
        """That of the first result."""
        layout, shape = self.output
        return layout.local_shape(shape)

    @property
    def _rank(self):
        return world().rank if self.rank is None else self.rank

    def combined(self, local, op="sum", varying=False):
        """The reduction of all parts with `op`, replicated; `varying`: for consumers that differ between ranks."""
        dims = ((),) * local.ndim
        whole = Layout.on(self.mesh, dims, varying=self.axes if varying else ())
        return self.redistribute(local, Layout.on(self.mesh, dims, dict.fromkeys(self.axes, op)), whole)


def _mean(operator, args, context):
    """The local mean over the number of parts, so that the parts' results are terms of a sum."""
    return operator(*args) * (1.0 / context.count)


def _extreme(op, _, args, context):
    """The extreme over all parts. Its gradient goes to the elements that hold it; several share it equally."""
    x, dims = args[0], _reduced_dims(args[0].ndim, args[1:])
    local = (ops.amax if op == "max" else ops.amin)(ops.stop_gradient(x), dims, *args[2:])
    best = context.combined(local, op)
    if "float" not in dtype_name(x.dtype):
        return best
    wide = ops.reshape(best, tuple(1 if dim in dims else size for dim, size in enumerate(x.shape)))
    holds = ops.cast(ops.equal(ops.stop_gradient(x), wide), x.dtype)
    count = context.combined(ops.sum(holds, dims))
    return best + ops.reshape(ops.sum(_finite_zero(x) * holds, dims) / count, best.shape)


def _extreme_magnitude(op, _, args, context):
    """The norm of order infinity, or minus infinity."""
    x, _, *rest = args
    return _extreme(op, None, (ops.abs(x), *rest), context)


def _reduced_dims(ndim, arguments):
    given = arguments[0] if arguments else None
    if given is None or given == ():
        return tuple(range(ndim))
    given = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(dim % ndim for dim in given)


def _arg_extreme(op, operator, args, context):
    """The position of the first extreme over all parts."""
    x, dim = args[0], args[1] if len(args) > 1 and args[1] is not None else None
    if dim is None:
        raise ValueError("argmax or argmin over all dims of a sharded tensor: flatten it to one dim first")
    index = operator(*args)
    kept = index if index.ndim == x.ndim else ops.expand_dims(index, dim)
    value = ops.gather_elements(ops.stop_gradient(x), dim, kept)
    return _first_position(index, ops.reshape(value, index.shape), x.shape[dim], op, context)[0]


def _first_position(index, value, size, op, context):
    """The smallest global position among the parts whose value is the extreme, and whether it is in this part.

    A NaN is no extreme, as on one card.
    """
    if "float" in dtype_name(value.dtype):
        value = ops.masked_fill(value, ops.isnan(value), -math.inf if op == "max" else math.inf)
    best = context.combined(value, op)
    position = ops.cast(index, mstype.int64) + (context.start(size, mstype.int64) + 1)  # from 1: see `scans`
    here = ops.where(ops.equal(value, best), position, Tensor(context.count * size + 1, mstype.int64))
    first = context.combined(ops.stop_gradient(here), "min")
    return ops.cast(first - 1, index.dtype), ops.equal(first, position)


def _extreme_with_index(op, value_first, operator, args, context):
    """Index and value of the first extreme over all parts; the gradient goes to that element alone."""
    size = args[0].shape[args[1]]
    results = operator(*args)
    index, value = (results[1], results[0]) if value_first else results
    index = ops.stop_gradient(index)  # in a graph, integers have gradients too
    first, mine = _first_position(index, ops.stop_gradient(value), size, op, context)
    best = context.combined(ops.stop_gradient(value), op)
    best = best + _finite_zero(value) * ops.cast(mine, value.dtype)
    return (best, first) if value_first else (first, best)


def _extreme_pair(op, _, args, context):
    """As `_extreme_with_index`, the value first, by a function that takes its arguments by position."""
    return _extreme_with_index(op, True, ops.max if op == "max" else ops.min, args, context)


def _first_extreme(op, _, args, context):
    """As `_extreme_pair`, the value alone."""
    return _extreme_pair(op, _, args, context)[0]


def _finite_zero(x):
    """Zero, with the gradient of `x`: also where `x` is infinite."""
    finite = ops.where(ops.isfinite(x), x, ops.zeros_like(x))
    return finite - ops.stop_gradient(finite)


def _all_or_any(op, operator, args, context):
    """Whether all (`min`) or any (`max`) of the parts' answers are true."""
    answer = ops.cast(operator(*args), mstype.int32)
    return ops.cast(context.combined(answer, op), mstype.bool_)


def _shifted(x, dim, context):
    """`x` less the maximum over all parts (which needs no gradient), its exponentials, and their sum over all parts.

    The maximum of a row that is masked with -inf throughout is taken as a number, so that its exponentials are 0.
    """
    top = context.combined(ops.amax(ops.stop_gradient(x), dim, keepdims=True), "max")
    shifted = x - ops.maximum(top, _LOWEST)
    exponentials = ops.exp(shifted)
    return shifted, exponentials, context.combined(ops.sum(exponentials, dim, keepdim=True), varying=True)


def _softmax(_, args, context):
    x, dim = args[0], _softmax_dim(args)
    _, exponentials, total = _shifted(x, dim, context)
    return exponentials / ops.maximum(total, 0.5)  # at least 1, or 0 where all is masked: then 0, as on one card


def _log_softmax(_, args, context):
    x, dim = args[0], _softmax_dim(args)
    shifted, _, total = _shifted(x, dim, context)
    return shifted - ops.log(total)


def _log_sum_exp(_, args, context):
    x, dims = args[0], _reduced_dims(args[0].ndim, args[1:])
    top = context.combined(ops.amax(ops.stop_gradient(x), dims, keepdims=True), "max")
    total = context.combined(ops.sum(ops.exp(x - top), dims, keepdim=True))
    result = ops.log(total) + top
    return result if len(args) > 2 and args[2] else ops.squeeze(result, dims)


def _softmax_dim(args):
    dim = args[1] if len(args) > 1 else -1
    return dim[0] if isinstance(dim, (tuple, list)) else dim


def _cross_entropy(_, args, context):
    """The loss of every row, and its gradient, where classes are cut: that gradient flows, as on one card."""
    logits, labels = args[0], ops.stop_gradient(args[1])
    shifted, exponentials, total = _shifted(ops.stop_gradient(logits), 1, context)
    gradient = exponentials / total - labels
    loss = ops.sum(labels * (ops.log(total) - shifted) + _finite_zero(logits) * gradient, 1)
    return context.combined(loss, varying=True), gradient


def _sparse_cross_entropy(operator, args, context):
    """The mean over all examples, whose classes may be cut: a term of it."""
    logits, labels = args
    classes = context.within(context.layouts[0].dims[1])
    if not classes.axes:
        return _mean(operator, args, context)
    local, absent = found_here(labels, logits.shape[1], classes)
    logarithms = ops.gather_elements(_log_softmax(None, (logits, 1), classes), 1, ops.expand_dims(local, 1))
    count = logits.shape[0] * context.count // classes.count
    return ops.sum(zero_where(ops.expand_dims(absent, 1), logarithms)) * (-1.0 / count)


def _likelihood(operator, args, context):
    """As a part of the examples and classes gives it: a label that another part has is to be ignored."""
    logits, labels, weight, reduction, ignored = args
    place = min(1, logits.ndim - 1)
    classes = context.within(context.layouts[0].dims[place])
    if classes.axes:
        local, absent = found_here(labels, logits.shape[place], classes)
        labels, ignored = ops.masked_fill(local, ops.logical_or(absent, ops.equal(labels, ignored)), -100), -100
    loss, weights = operator(logits, labels, weight, 0 if reduction == 1 else reduction, ignored)
    if reduction == 1:
        return loss / context.combined(ops.stop_gradient(weights)), weights
    if reduction == 0:
        return loss, weights
    examples = context.within([axis for axis in context.axes if axis not in classes.axes])
    weights = examples.combined(weights) if examples.axes else weights
    return loss, weights


def _segment_extreme(op, operator, args, context):
    """The extreme of each segment over all parts; as for `_extreme`, those that hold it share its gradient."""
    x, ids, count = args
    best = context.combined(ops.stop_gradient(operator(x, ids, count)), op)
    if "float" not in dtype_name(x.dtype):
        return best
    holds = ops.equal(ops.stop_gradient(x), ops.gather(best, ops.maximum(ids, 0), 0))
    holds = ops.cast(holds, x.dtype)
    shared = ops.maximum(context.combined(ops.unsorted_segment_sum(holds, ids, count)), 1.0)
    return best + ops.unsorted_segment_sum(_finite_zero(x) * holds, ids, count) / shared


_EXTREMES = {  # for both operations: the function, and its second argument
    **{"{}": [_extreme], "arg{}": [_arg_extreme], "norm_{}": [_extreme_magnitude], "segment_{}": [_segment_extreme]},
    **{"{}_with_index": (_extreme_with_index, False), "{}_dim": (_extreme_with_index, True)},
    **{"{}_pair": [_extreme_pair], "{}_first": [_first_extreme]},
}
ALGORITHMS = {
    "mean": _mean,
    "likelihood": _likelihood,
    "softmax_cross_entropy": _cross_entropy,
    "sparse_cross_entropy": _sparse_cross_entropy,
    **{
        name.format(op): partial(function, op, *more)
        for op in ("max", "min")
        for name, (function, *more) in _EXTREMES.items()
    },
    "norm": norm,
    "prod": product,
    "std": partial(spread, True, False),
    "std_mean": partial(spread, True, True),
    "var": partial(spread, False, False),
    "var_mean": partial(spread, False, True),
    "band": band,
    "trace": trace,
    "logsumexp": _log_sum_exp,
    "attention_dropout": attention_with_dropout,
    "all": partial(_all_or_any, "min"),
    "any": partial(_all_or_any, "max"),
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "group_norm": group_norm,
    "halo": partial(windows, 0.0),
    "halo_of_largest": partial(windows, -math.inf),
    "halo_with_index": windows_with_index,
    "pad": shifted,
    **LOOKUPS,
    **SCANS,
    **DISTRIBUTIONS,
}
