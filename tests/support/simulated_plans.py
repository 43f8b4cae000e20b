"""Runs a `CellPlan` in NumPy, forward, on simulated ranks: a tensor is a dict from rank to array."""

import numpy as np
from support.simulated_ranks import distribute, run_forward

from mindformers_core.program.graph import match_arguments
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.redistribution import CPU, plan_redistribution

__all__ = ["computed", "simulate"]

NUMPY = {
    "Add": np.add,
    "AddExt": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Muls": np.multiply,
    "Neg": np.negative,
    "ReLU": lambda x: np.maximum(x, 0),
    **dict.fromkeys(("MatMul", "MatMulExt"), lambda a, b, *transposed: np.matmul(a, b)),
    "Transpose": np.transpose,
    "Split": lambda x, dim, count: np.split(x, count, dim),
    "SplitWithSizeView": lambda x, lengths, dim: np.split(x, np.cumsum(lengths)[:-1], dim),
    "Unstack": lambda x, dim: [np.take(x, index, dim) for index in range(x.shape[dim])],
    "Sort": lambda x, *_: (np.sort(x), np.argsort(x)),
    "Narrow": lambda x, dim, start, length: np.take(x, range(start, start + length), dim),
    "StridedSlice": lambda x, begin, end, strides, *masks: x[tuple(map(slice, begin, end, strides))],
    "Squeeze": np.squeeze,
    "ExpandDims": np.expand_dims,
    "Concat": np.concatenate,
    "SumExt": lambda x, dim, keepdim, dtype: x.sum(dim, keepdims=keepdim),
}


def computed(node, args, kwargs):
    """The results of an operator, in order."""
    axis = [node.primitive.attributes["axis"]] if node.operator == "Unstack" else []
    results = NUMPY[node.operator](*args, *kwargs.values(), *axis)
    return list(results) if isinstance(results, (tuple, list)) else [results]


def simulate(plan, inputs, parameters, rng):
    """The local results of the root, in order.

    Args:
        plan: the root's `CellPlan`.
        inputs: number of every argument's Value -> global array.
        parameters: path -> global array.
        rng: draws the terms of partial sums.
    """
    stored = {}
    given = {number: distribute(value, plan.layouts[number], rng) for number, value in inputs.items()}
    return _run(plan, "", given, [], parameters, stored)


def _run(plan, path, given, lifted, parameters, stored):
    """One call; `given` holds its arguments, `lifted` what comes besides, `stored` the parameters' parts."""
    graph, hand = plan.graph, {}
    for number, local in given.items():
        hand[number, plan.layouts[number]] = local
    for use in graph.parameters:
        name = use.path if use.local is None else f"{path}.{use.local}" if path else use.local
        layout = plan.layouts[use.value.id]
        part = stored.setdefault((name, layout), distribute(parameters[name], layout, None))
        hand[use.value.id, layout] = part
    for constant in graph.constants:
        ranks = plan.mesh.rank_list
        hand[constant.value.id, plan.layouts[constant.value.id]] = dict.fromkeys(ranks, constant.array)
    hand.update(zip([(value.id, layout) for value, layout in plan.lifted], lifted, strict=True))
    for entry in plan.instructions:
        if isinstance(entry, Redistribution):
            local = hand[entry.value.id, entry.source]
            for step in entry.steps:
                local = run_forward(step, local)
            hand[entry.value.id, entry.target] = local
            continue
        values = tree_leaves((entry.node.args, entry.node.kwargs))
        inputs = {value: hand[value.id, layout] for value, layout in zip(values, entry.inputs, strict=True)}
        run = _called if isinstance(entry, CallPlan) else _operated
        results = run(entry, path, inputs, hand, parameters, stored)
        for value, layout, local in zip(tree_leaves(entry.node.outputs), entry.outputs, results, strict=True):
            hand[value.id, layout] = local
    return [hand[value.id, layout] for value, layout in zip(tree_leaves(graph.result), plan.results, strict=True)]


def _called(call, path, inputs, hand, parameters, stored):
    given = {inner.id: inputs[outer] for inner, outer in match_arguments(call.node).items()}
    lifted = [hand[value.id, layout] for value, layout in call.lifted]
    child = f"{path}.{call.node.child}" if path else call.node.child
    return _run(call.plan, child, given, lifted, parameters, stored)


def _operated(plan, path, inputs, hand, parameters, stored):
    """All results on all ranks, by the local call; a slice of a cut dim, an algorithm, takes the whole dim."""
    assert plan.algorithm in (None, "slice")
    node, args, kwargs = plan.node, plan.node.args, plan.node.kwargs
    values = tree_leaves((args, kwargs))
    tensors = [hand[value.id, layout] for value, layout in zip(values, plan.inputs, strict=True)]
    if plan.algorithm:
        (layout,), (dims,) = plan.inputs, plan.signature.inputs
        kept = [() if set(names) & set(plan.signature.distributed) else cut for names, cut in zip(dims, layout.dims)]
        for step in plan_redistribution(layout, layout.replace(dims=kept), values[0].shape, "float32", CPU).steps:
            tensors[0] = run_forward(step, tensors[0])
    if plan.signature.local.localize is not None:
        shapes = [layout.local_shape(value.shape) for value, layout in zip(tree_leaves(node.outputs), plan.outputs)]
        args, kwargs = plan.signature.local.localize((*args, *kwargs.values()), shapes), {}
    results = [{} for _ in plan.outputs]
    for rank in tensors[0]:
        rest = iter([tensor[rank] for tensor in tensors])
        local = tree_map(lambda leaf, rest=rest: next(rest) if tree_leaves(leaf) else leaf, (args, kwargs))
        for result, part in zip(results, computed(node, *local), strict=True):
            result[rank] = part
    return results
