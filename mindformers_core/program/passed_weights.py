"""Weights as arguments of generated functions, so that equal Cells share one compiled function. Pure Python.

A function takes a tuple of weights: its own parameters, in the order of its plan's graph, then those of every generated
function that it calls.
"""

from mindformers_core.program.plan import parameter_path, walk_graphs

WEIGHTS = "passed_weights"  # the tuple's name in a generated function


def passed_parameter(plan, use):
    """The expression for a parameter of a plan, in its function."""
    return f"{WEIGHTS}[{plan.graph.parameters.index(use)}]"


def passed_to_call(plan, call):
    """The expression for the weights that a plan's function passes to a call."""
    before = plan.calls[: plan.calls.index(call)]
    start = len(plan.graph.parameters) + sum(_count(other.plan) for other in before)
    return f"{WEIGHTS}[{start}:{start + _count(call.plan)}]"


def _count(plan):
    """The number of weights that a plan's function takes."""
    return 0 if plan is None else len(plan.graph.parameters) + sum(_count(call.plan) for call in plan.calls)


def weight_paths(plan, graph):
    """The paths, from the Cell of the program, of the weights that a call of a plan's function passes.

    Args:
        graph: the `CellGraph` of this call; equal calls share a plan.
    """
    calls = walk_graphs(plan, graph)
    return [parameter_path(*call, number) for call in calls for number in range(len(call[0].graph.parameters))]
