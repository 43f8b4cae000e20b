"""Runs a `CellPlan` in NumPy, forward, on simulated ranks: a tensor is a dict from rank to array."""

from functools import reduce

import numpy as np
from support.simulated_ranks import distribute, run_forward

from mindformers_core.program.environment import follow
from mindformers_core.program.plan import CallPlan, Redistribution, joined_path
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
    given = {
        (number, plan.layouts[number]): distribute(value, plan.layouts[number], rng) for number, value in inputs.items()
    }
    return _run(plan, "", given, parameters, {})


def _run(plan, path, given, parameters, stored):
    """One call; `given`: its environment, but for its parameters, whose parts are in `stored`, and constants."""
    graph, held = plan.graph, dict(given)
    for use in graph.parameters:
        name = use.path if use.local is None else joined_path(path, use.local)
        layout = plan.layouts[use.value.id]
        held[use.value.id, layout] = stored.setdefault((name, layout), distribute(parameters[name], layout, None))
    for constant in graph.constants:
        held[constant.value.id, plan.layouts[constant.value.id]] = dict.fromkeys(plan.mesh.rank_list, constant.array)

    def instruction(_, entry, taken):
        if isinstance(entry, Redistribution):
            return [reduce(lambda local, step: run_forward(step, local), entry.steps, *taken)]
        if isinstance(entry, CallPlan):
            return _run(entry.plan, joined_path(path, entry.node.child), taken, parameters, stored)
        return _operated(entry, taken)

    return follow(plan, held, instruction)


def _operated(plan, tensors):
    """All results on all ranks, by the local call; a slice of a cut dim, an algorithm, takes the whole dim."""
    assert plan.algorithm in (None, "slice")
    node, args, kwargs = plan.node, plan.node.args, plan.node.kwargs
    if plan.algorithm:
        (layout,), (dims,) = plan.inputs, plan.signature.inputs
        kept = [() if set(names) & set(plan.signature.distributed) else cut for names, cut in zip(dims, layout.dims)]
        shape = plan.consumed[0][0].shape
        for step in plan_redistribution(layout, layout.replace(dims=kept), shape, "float32", CPU).steps:
            tensors[0] = run_forward(step, tensors[0])
    if plan.signature.local.localize is not None:
        args, kwargs = plan.signature.local.localize((*args, *kwargs.values()), plan.local_shapes), {}
    results = [{} for _ in plan.outputs]
    for rank in tensors[0]:
        rest = iter([tensor[rank] for tensor in tensors])
        local = tree_map(lambda leaf, rest=rest: next(rest) if tree_leaves(leaf) else leaf, (args, kwargs))
        for result, part in zip(results, computed(node, *local), strict=True):
            result[rank] = part
    return results
