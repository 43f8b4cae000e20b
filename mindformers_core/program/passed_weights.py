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
    start = len(plan.graph.parameters)
    for other in plan.calls:
        end = start + _count(other.plan)
        if other is call:
            return f"{WEIGHTS}[{start}:{end}]"
        start = end
    raise AssertionError(call)


def _count(plan):
    """The number of weights that a plan's function takes."""
    return 0 if plan is None else len(plan.graph.parameters) + sum(_count(call.plan) for call in plan.calls)


def weights_of_call(plan, graph, find):
    """The weights that a call of a plan's function passes, as a list.

    Args:
        plan: the plan.
        graph: the `CellGraph` of this call; equal calls share a plan.
        find: function from a path, from the Cell of the program, to the parameter.
    """
    calls = walk_graphs(plan, graph)
    return [find(parameter_path(*call, number)) for call in calls for number in range(len(call[0].graph.parameters))]
