"""Operators and collectives of a distributed algorithm, from its graph for one rank. Pure Python."""

from mindformers_core.operators.registry import algorithm_named
from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.operators import passes_gradient


def through_algorithm(plan, algorithm, given, constant, part, **known):
    """What stands for the results of an algorithm, a list.

    Args:
        plan: an `OperatorPlan` that has an `algorithm`.
        algorithm: function from the plan to the `CellGraph` and, for each node, the `Step`s of a redistribution or
            None: `algorithm_of`, which captures it.
        given: what stands for the tensors that the operator takes, in order.
        constant: function of a `Constant` that returns what stands for it.
        part: function of a node, its `Step`s or None, and what stands for its inputs, a list, that returns what stands
            for its outputs.
        known: further arguments of `algorithm`.

    Raises:
        ValueError: `algorithm` is None.
    """
    if algorithm is None:
        raise ValueError(
            f"operator {plan.node.operator} ({plan.node.source}) runs the distributed algorithm '{plan.algorithm}' "
            f"over {', '.join(plan.cut_axes)}: pass algorithm=, the function `algorithm_of` that captures its graph"
        )
    graph, steps = algorithm(plan, **known)
    held = {use.value.id: constant(use) for use in graph.constants}
    held.update((value.id, each) for value, each in zip(tree_leaves(graph.arguments), given))
    for node, moved in zip(graph.nodes, steps, strict=True):
        taken = [held[value.id] for value in node.taken]
        held.update((value.id, each) for value, each in zip(node.made, part(node, moved, taken)))
    return [held[value.id] for value in tree_leaves(graph.result)]


def algorithm_steps(plan, algorithm):
    """Pairs (`Step`, whether a gradient flows back through it inside the algorithm) of its redistributions, in order.

    Takes and raises the same as `through_algorithm`.
    """
    found, gradient = [], algorithm_named(plan.algorithm).gradient

    def part(node, steps, flowing):
        flows = gradient is None and passes_gradient(node.operator) and any(flowing)
        found.extend((step, flows) for step in steps or ())
        return [flows and is_float(value.dtype) for value in node.made]

    through_algorithm(plan, algorithm, (is_float(value.dtype) for value, _ in plan.consumed), lambda _: False, part)
    return tuple(found)


def own_gradient_steps(plan, algorithm):
    """The `Step`s that an algorithm's own gradient runs, in order; none of one without. As of `through_algorithm`."""
    if algorithm_named(plan.algorithm).gradient is None:
        return ()
    found = []

    def part(node, steps, _):
        found.extend(steps or ())
        return [None] * len(node.made)

    given = [None] * (len(plan.inputs) + 2 * len(plan.outputs))
    through_algorithm(plan, algorithm, given, lambda _: None, part, of_gradient=True)
    return tuple(found)
