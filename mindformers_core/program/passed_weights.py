"""Weights that functions take as arguments, so that one compiled function serves all Cells that are alike. Pure Python.

A function takes a tuple: its own parameters, in the order of its plan's graph, then those of every call that it makes
of a generated function.
"""

from mindformers_core.program.plan import called_graphs, parameter_path

__all__ = ["WEIGHTS", "passed_parameter", "passed_to_call", "weights_of_call"]

WEIGHTS = "passed_weights"  # what a generated function calls the tuple


def passed_parameter(frame, use):
    """The expression for a parameter of a plan, in its function."""
    return f"{WEIGHTS}[{frame.graph.parameters.index(use)}]"


def passed_to_call(frame, call):
    """The expression for what a plan's function passes on with a call."""
    start = len(frame.graph.parameters)
    for other in frame.calls:
        end = start + _count(other.frame)
        if other is call:
            return f"{WEIGHTS}[{start}:{end}]"
        start = end
    raise AssertionError(call)


def _count(frame):
    """How many weights a plan's function takes."""
    return 0 if frame is None else len(frame.graph.parameters) + sum(_count(call.frame) for call in frame.calls)


def weights_of_call(frame, graph, find):
    """The weights that a call of a plan's function passes: a list.

    Args:
        frame: the plan.
        graph: the `CellGraph` of this call; those that are alike share a plan.
        find: gives a parameter by its path from the Cell of the program.
    """
    found = [find(parameter_path(frame, graph, number)) for number in range(len(frame.graph.parameters))]
    for call, inner in called_graphs(frame, graph):
        if call.frame is not None:
            found += weights_of_call(call.frame, inner, find)
    return found
