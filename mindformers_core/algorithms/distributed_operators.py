"""Algorithms of operators that are sharded along a dim that they reduce or look up in; results are those of one card.

Each is called as `algorithm(operator, args, context)` in the place of `operator(*args)`, where `operator` is the plain
operator and `args` hold local tensors. It consists of differentiable redistributions and operators, which give its
gradient. The distributed softmax and cross-entropy are those of Megatron-LM (arXiv 1909.08053, section 3): one maximum,
one sum.

An algorithm runs on tensors with values, or once on traced ones, to be recorded as a graph. So its control flow never
depends on values, and numbers of a rank come from `context` as tensors: all ranks need equal graphs.
"""

import math
from dataclasses import replace
from functools import partial

from mindspore import Tensor, dtype as mstype, nn, ops

from mindformers_core.algorithms.draws import DISTRIBUTIONS
from mindformers_core.algorithms.halo import shifted, windows, windows_with_index
from mindformers_core.algorithms.lookups import LOOKUPS, found_here, zero_where
from mindformers_core.algorithms.scans import SCANS, finite_top
from mindformers_core.algorithms.statistics import band, group_norm, norm, product, spread, trace, wide
from mindformers_core.dtypes import dtype_name
from mindformers_core.operators.registry import algorithm_named
from mindformers_core.operators.rules.dims import as_dims
from mindformers_core.program.structure import tree_fill
from mindformers_core.propagation.operators import TENSORS


def _mean(operator, args, context):
    """The local mean over the number of parts, so that the parts' results are terms of a sum."""
    return operator(*args) / context.count


def _extreme(op, _, args, context):
    """The extreme over all parts. Its gradient goes to the elements that hold it; several share it equally."""
    x, dims, *keepdim = args if len(args) > 1 else (*args, None)
    dims = as_dims(dims, x.ndim)
    local = (ops.amax if op == "max" else ops.amin)(ops.stop_gradient(x), dims, *keepdim)
    best = context.combined(local, op)
    if "float" not in dtype_name(x.dtype):
        return best
    wide = ops.reshape(best, tuple(1 if dim in dims else size for dim, size in enumerate(x.shape)))
    holds = ops.cast(ops.equal(ops.stop_gradient(x), wide), x.dtype)
    count = context.combined(ops.sum(holds, dims))
    return best + ops.reshape(ops.sum(_finite_zero(x) * holds, dims) / count, best.shape)


def _arg_extreme(op, operator, args, context):
    """The position of the first extreme over all parts; a tensor whose one dim isn't named has no others."""
    x, dim = args[0], args[1] if len(args) > 1 and args[1] is not None else 0
    index = operator(*args)
    kept = index if index.ndim == x.ndim else ops.expand_dims(index, dim)
    value = ops.reshape(ops.gather_elements(ops.stop_gradient(x), dim, kept), index.shape)
    return _first_position(index, value, x.shape[dim], op, context)[0]


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


def _extreme_with_index(value_first, op, operator, args, context):
    """Index and value of the first extreme over all parts; the gradient goes to that element alone."""
    size = args[0].shape[args[1]]
    results = operator(*args)
    index, value = (results[1], results[0]) if value_first else results
    index = ops.stop_gradient(index)  # in a graph, integers have gradients too
    first, mine = _first_position(index, ops.stop_gradient(value), size, op, context)
    best = context.combined(ops.stop_gradient(value), op)
    best = best + _finite_zero(value) * ops.cast(mine, value.dtype)
    return (best, first) if value_first else (first, best)


def _finite_zero(x):
    """Zero, with the gradient of `x`: also where `x` is infinite."""
    finite = ops.where(ops.isfinite(x), x, ops.zeros_like(x))
    return finite - ops.stop_gradient(finite)


def _all_or_any(op, operator, args, context):
    """Whether all (`min`) or any (`max`) of the parts' answers are true."""
    answer = ops.cast(operator(*args), mstype.int32)
    return ops.cast(context.combined(answer, op), mstype.bool_)


def _shifted(args, context):
    """`x` less the maximum over all parts (which needs no gradient), its exponentials, and their sum over all parts.

    Args:
        args: the tensor and the dim. Default: the last one.
    """
    x, dim = (*args, -1)[:2]
    dim = dim[0] if isinstance(dim, (tuple, list)) else dim
    shifted = x - _top(x, dim, context)
    exponentials = ops.exp(shifted)
    return shifted, exponentials, context.combined(ops.sum(exponentials, dim, keepdim=True), varying=True)


def _top(x, dims, context):
    return finite_top(context.combined(ops.amax(ops.stop_gradient(x), dims, keepdims=True), "max"))


def _softmax(_, args, context):
    _, exponentials, total = _shifted(args, context)
    return exponentials / total  # NaN where all is -inf, as for rows that are whole


def _log_softmax(_, args, context):
    shifted, _, total = _shifted(args, context)
    return shifted - ops.log(total)


def _log_sum_exp(_, args, context):
    x, dims, *keepdim = args if len(args) > 1 else (*args, None)
    dims = as_dims(dims, x.ndim)
    top = _top(x, dims, context)
    result = ops.log(context.combined(ops.sum(ops.exp(x - top), dims, keepdim=True))) + top
    return result if any(keepdim) else ops.squeeze(result, dims)


def _cross_entropy(_, args, context):
    """The loss of every row, and its gradient, where classes are cut: that gradient flows, as on one card."""
    logits, labels = args[0], ops.stop_gradient(args[1])
    shifted, exponentials, total = _shifted((ops.stop_gradient(logits), 1), context)
    gradient = exponentials / total - labels
    loss = ops.sum(labels * (ops.log(total) - shifted) + _finite_zero(logits) * gradient, 1)
    return context.combined(loss, varying=True), gradient


def _sparse_cross_entropy(operator, args, context):
    """The mean over all examples, whose classes may be cut: a term of it."""
    logits, labels = args
    classes = context.along(1)
    if not classes.axes:
        return _mean(operator, args, context)
    local, absent = found_here(labels, logits.shape[1], classes)
    logarithms = ops.gather_elements(_log_softmax(None, (logits, 1), classes), 1, ops.expand_dims(local, 1))
    mean = ops.mean(zero_where(ops.expand_dims(absent, 1), logarithms))  # a sum may be out of range in half precision
    return mean / -(context.count // classes.count)


def _likelihood(operator, args, context):
    """As a part of the examples and classes gives it: a label that another part has is to be ignored."""
    logits, labels, weight, reduction, ignored = args
    if reduction == 1 and (large := wide(logits)) is not logits:
        found = _likelihood(operator, (large, labels, wide(weight), reduction, ignored), context)
        return tuple(ops.cast(each, logits.dtype) for each in found)
    place = min(1, logits.ndim - 1)
    classes = context.along(place)
    if classes.axes:
        local, absent = found_here(labels, logits.shape[place], classes)
        labels, ignored = ops.masked_fill(local, ops.logical_or(absent, ops.equal(labels, ignored)), -100), -100
    loss, weights = operator(logits, labels, weight, 0 if reduction == 1 else reduction, ignored)
    if reduction == 1:
        return loss / context.combined(ops.stop_gradient(weights)), weights
    if reduction == 0:
        return loss, weights
    examples = replace(context, axes=tuple(axis for axis in context.axes if axis not in classes.axes))
    return loss, examples.combined(weights) if examples.axes else weights


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


_EXTREMES = {  # functions of "max" or "min", and of what an algorithm gets
    **{"{}": _extreme, "arg{}": _arg_extreme, "segment_{}": _segment_extreme},
    "norm_{}": lambda op, _, args, context: _extreme(op, _, (ops.abs(args[0]), *args[2:]), context),
    **{"{}_with_index": partial(_extreme_with_index, False), "{}_dim": partial(_extreme_with_index, True)},
    # by functions that take their arguments by position
    "{}_pair": lambda op, _, *given: _extreme_with_index(True, op, getattr(ops, op), *given),
    "{}_first": lambda op, _, *given: _extreme_with_index(True, op, getattr(ops, op), *given)[0],
}
ALGORITHMS = {
    **{"mean": _mean, "norm": norm, "prod": product, "band": band, "trace": trace, "group_norm": group_norm},
    **{"softmax": _softmax, "log_softmax": _log_softmax, "logsumexp": _log_sum_exp, "likelihood": _likelihood},
    **{"softmax_cross_entropy": _cross_entropy, "sparse_cross_entropy": _sparse_cross_entropy},
    **{name.format(op): partial(function, op) for op in ("max", "min") for name, function in _EXTREMES.items()},
    **{"all": partial(_all_or_any, "min"), "any": partial(_all_or_any, "max")},
    **{name: partial(spread, "std" in name, "mean" in name) for name in ("std", "std_mean", "var", "var_mean")},
    **{"halo": partial(windows, 0.0), "halo_of_largest": partial(windows, -math.inf)},
    "halo_with_index": windows_with_index,
    "pad": shifted,
    **LOOKUPS,
    **SCANS,
    **DISTRIBUTIONS,
}


def run_locally(plan, tensors, operator, context):
    """The results of an `OperatorPlan` for a rank's parts of its tensors: of its algorithm, or of the operator itself.

    Args:
        plan, tensors: the plan, and the parts in the layouts that it requires.
        operator: function of `(args, kwargs)` that calls the operator.
        context: the `ShardContext`; not used without an algorithm.

    """
    if plan.algorithm is None:
        return operator(*tree_fill(plan.local_call, tensors, TENSORS))
    if algorithm_named(plan.algorithm).gradient is None:
        return run_algorithm(plan, tensors, operator, context)
    return _OwnGradient(plan, operator, context)(*tensors)


def run_algorithm(plan, tensors, operator, context):
    """As `run_locally`, of an `OperatorPlan` with an algorithm, whose gradient is that of what it calls."""
    args, kwargs = tree_fill(plan.local_call, tensors, TENSORS)
    function = algorithm_named(plan.algorithm).function or ALGORITHMS[plan.algorithm]
    return function(lambda *local: operator(local, kwargs), args, context)


def run_gradient(plan, tensors, results, gradients, context):
    """The gradients of the floating tensors, in order, by the own gradient of an `OperatorPlan`'s algorithm."""
    args, _ = tree_fill(plan.local_call, tensors, TENSORS)
    return algorithm_named(plan.algorithm).gradient(args, results, gradients, context)


class _OwnGradient(nn.Cell):
    """An algorithm with its own gradient, in PyNative."""

    def __init__(self, plan, operator, context):
        super().__init__(auto_prefix=False)
        self.plan, self.operator, self.context = plan, operator, context

    def construct(self, *tensors):
        return run_algorithm(self.plan, tensors, self.operator, self.context)

    def bprop(self, *given):
        *tensors, results, gradients = given
        found = iter(run_gradient(self.plan, tensors, results, gradients, self.context))
        return tuple(next(found) if each.is_floating_point() else ops.zeros_like(each) for each in tensors)
