"""Operators and collectives of a distributed algorithm, from its graph for one rank. Pure Python."""

from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.operators import passes_gradient


def algorithm_parts(plan, algorithm):
    """Pairs `(node, Steps of a redistribution or None)` that run in place of an operator, and their `CellGraph`.

    Args:
        plan: an `OperatorPlan` that has an `algorithm`.
        algorithm: function from the plan to the `CellGraph` and the steps of each node:
            `capture.algorithm_graph.algorithm_of`.

    Raises:
        ValueError: `algorithm` is None.
    """
    if algorithm is None:
        raise ValueError(
            f"operator {plan.node.operator} ({plan.node.source}) runs the distributed algorithm '{plan.algorithm}' "
            f"over {', '.join(plan.cut_axes)}: pass algorithm=algorithm_of (mindformers_core.capture.algorithm_graph)"
        )
    graph, steps = algorithm(plan)
    return list(zip(graph.nodes, steps, strict=True)), graph


def algorithm_steps(plan, algorithm):
    """Pairs (`Step`, whether a gradient flows back through it inside the algorithm) of its redistributions, in order.

    Takes and raises the same as `algorithm_parts`.
    """
    parts, graph = algorithm_parts(plan, algorithm)
    flowing = {value.id for value in tree_leaves(graph.arguments) if is_float(value.dtype)}
    found = []
    for node, steps in parts:
        taken = tree_leaves((node.args, node.kwargs))
        flows = passes_gradient(node.operator) and any(value.id in flowing for value in taken)
        found += [(step, flows) for step in steps or ()]
        if flows:
            flowing |= {value.id for value in tree_leaves(node.outputs) if is_float(value.dtype)}
    return tuple(found)
