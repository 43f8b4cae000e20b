"""Runs a `FramePlan` in NumPy, forward, on simulated ranks: a tensor is a dict from rank to array."""

import numpy as np
from simulated_ranks import distribute, run_forward

from mindformers_core.tensor_parallel.capturing.structure import Value, map_leaves, values_in
from mindformers_core.tensor_parallel.propagation import CallPlan, Move
from mindformers_core.tensor_parallel.propagation.aliases import match_arguments

__all__ = ["NUMPY", "simulate"]

NUMPY = {
    "Add": np.add,
    "AddExt": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Muls": np.multiply,
    "Neg": np.negative,
    "ReLU": lambda x: np.maximum(x, 0),
    "MatMul": lambda a, b, *transposed: np.matmul(a, b),
    "Transpose": np.transpose,
}


def simulate(plan, inputs, parameters, rng):
    """The local results of the root, in order.

    Args:
        plan: the root's `FramePlan`.
        inputs: number of every argument's Value -> global array.
        parameters: path -> global array.
        rng: draws the terms of partial sums.
    """
    stored = {}
    given = {number: distribute(value, plan.layouts[number], rng) for number, value in inputs.items()}
    return _run(plan, "", given, [], parameters, stored)


def _run(frame, path, given, lifted, parameters, stored):
    """One call; `given` holds its arguments, `lifted` what comes besides, `stored` the parameters' parts."""
    graph, hand = frame.graph, {}
    for number, local in given.items():
        hand[number, frame.layouts[number]] = local
    for use in graph.parameters:
        name = use.path if use.local is None else f"{path}.{use.local}" if path else use.local
        layout = frame.layouts[use.value.id]
        part = stored.setdefault((name, layout), distribute(parameters[name], layout, None))
        hand[use.value.id, layout] = part
    for constant in graph.constants:
        ranks = frame.mesh.rank_list
        hand[constant.value.id, frame.layouts[constant.value.id]] = dict.fromkeys(ranks, constant.array)
    hand.update(zip([(value.id, layout) for value, layout in frame.lifted], lifted, strict=True))
    for entry in frame.instructions:
        if isinstance(entry, Move):
            local = hand[entry.value.id, entry.source]
            for step in entry.steps:
                local = run_forward(step, local)
            hand[entry.value.id, entry.target] = local
            continue
        values = values_in((entry.node.args, entry.node.kwargs))
        inputs = {value: hand[value.id, layout] for value, layout in zip(values, entry.inputs, strict=True)}
        run = _called if isinstance(entry, CallPlan) else _operated
        results = run(entry, path, inputs, hand, parameters, stored)
        for value, layout, local in zip(values_in(entry.node.outputs), entry.outputs, results, strict=True):
            hand[value.id, layout] = local
    return [hand[value.id, layout] for value, layout in zip(values_in(graph.result), frame.results, strict=True)]


def _called(call, path, inputs, hand, parameters, stored):
    given = {inner.id: inputs[outer] for inner, outer in match_arguments(call.node).items()}
    lifted = [hand[value.id, layout] for value, layout in call.lifted]
    child = f"{path}.{call.node.child}" if path else call.node.child
    return _run(call.frame, child, given, lifted, parameters, stored)


def _operated(plan, path, inputs, hand, parameters, stored):
    assert plan.algorithm is None
    node, local = plan.node, {}
    tensors = [hand[value.id, layout] for value, layout in zip(values_in(node.args), plan.inputs, strict=True)]
    for rank in tensors[0]:
        rest = iter([tensor[rank] for tensor in tensors])
        args = map_leaves(lambda leaf, rest=rest: next(rest) if isinstance(leaf, Value) else leaf, node.args)
        local[rank] = NUMPY[node.operator](*args)
    return [local]
