"""The price of a distributed algorithm in an eager call: the algorithm runs once on tensors that have no values.

Rules tell their shapes. A capture would tell them by MindSpore's meta device, which is that of a process: tensors that
another thread makes meanwhile would have no values either.
"""

import re
from dataclasses import replace

from mindspore import Tensor, dtype as mstype, mint

from mindformers_core.algorithms.attention import RESULT_DTYPES
from mindformers_core.algorithms.distributed_operators import run_algorithm, run_gradient
from mindformers_core.algorithms.draws import dtype_of
from mindformers_core.algorithms.redistribute import meta_of
from mindformers_core.algorithms.shard_context import shard_context
from mindformers_core.dtypes import dtype_name
from mindformers_core.lowering.indexing import IndexedTensor
from mindformers_core.mindspore_private import make_subclass
from mindformers_core.operators import is_float, signature_of
from mindformers_core.operators.registry import algorithm_named
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.propagation.operators import operator_plan, passes_gradient
from mindformers_core.redistribution import FREE, plan_redistribution, steps_price

_TRUTHS = re.compile("Logical|Is|Less|Greater|(Not)?Equal|Reduce(All|Any)")  # operators whose results are bools
_PLACES = re.compile(".*Arg(max|min|Max|Min)|(Top[Kk]|Cumm|M(ax|in)Dim)")  # whose results are positions, too, or second
_OF_INTEGERS = {"SumExt": mstype.int64, "ProdExt": mstype.int64, "Exp": mstype.float32}  # dtypes of their results


class Shaped(IndexedTensor):
    """A rank's part of a tensor, of which shape, dtype, and whether a gradient `flows` through it, are known."""


def algorithm_price(node, attributes, call, found):
    """The `Price` of the steps of a `Resolution`'s algorithm; a user's own that needs values is free.

    Args:
        node: the `OperatorNode` of the call, with `TensorMeta`s in the place of tensors.
        attributes: of its primitive, those that its rule takes.
    """
    name, axes = found.algorithm
    if not axes or algorithm_named(name).function and not algorithm_named(name).by_shapes:
        return FREE
    gradient, trained = algorithm_named(name).gradient, bool(call.trained)
    plan, steps = operator_plan(node, call, found), []

    def run(local, *moved, others=()):
        steps.extend((step, gradient is None and local.flows and trained) for step in moved)
        return _shaped(moved[-1].output_shape, local.dtype, local.flows) if moved else local

    def redistribute(local, source, target):
        given = source.global_shape(local.shape), dtype_name(local.dtype), call.device_model
        return run(local, *plan_redistribution(source, target, *given).steps)

    parts = zip(call.metas, found.inputs)
    parts = [_shaped(layout.local_shape(meta.shape), dtype_of(meta.dtype), True) for meta, layout in parts]
    context = replace(shard_context(plan), redistribute=redistribute, run_step=run)
    made = run_algorithm(plan, parts, lambda args, named: shaped_results(call.name, args, named | attributes), context)
    if gradient is not None and trained:
        run_gradient(plan, parts, made, made, context)
    return steps_price(steps, call.device_model)


def _shaped(shape, dtype, flows):
    part = make_subclass(Shaped, mint.empty(shape, dtype=dtype, device="meta"))
    part.flows = flows and is_float(dtype_name(dtype))
    return part


def shaped_results(name, args, kwargs):
    """What stands for an operator's results, where `Shaped` tensors are among its arguments."""
    tensors = tree_leaves((args, kwargs), Tensor)
    flows = passes_gradient(name) and any(getattr(tensor, "flows", False) for tensor in tensors)
    shapes = signature_of(name, *tree_map(meta_of, (args, kwargs))).output_shapes
    dtypes = [_dtype(name, args, tensors)] * len(shapes)
    if name in RESULT_DTYPES:
        dtypes = RESULT_DTYPES[name](*args, **kwargs)
    elif places := _PLACES.match(name):
        dtypes[1 if places[2] else 0] = mstype.int32 if name in ("TopK", "Cummin") else mstype.int64
    results = tuple(_shaped(shape, dtype, flows) for shape, dtype in zip(shapes, dtypes))
    return results if len(results) > 1 else results[0]


def _dtype(name, args, tensors):
    """The dtype of an operator's first result, as on the meta device."""
    if _TRUTHS.match(name):
        return mstype.bool_
    if name == "Cast" or name == "CumsumExt" and len(args) > 2 and args[2] is not None:
        return dtype_of(args[-1])
    dtype = next((tensor.dtype for tensor in tensors if tensor.dtype != mstype.bool_), mstype.bool_)
    return dtype if is_float(dtype_name(dtype)) else _OF_INTEGERS.get(name, dtype)
