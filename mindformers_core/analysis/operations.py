"""The cost of an instruction: floating-point operations on one rank. Pure Python.

A sent byte has a price in operations: without it a collective would be the cheapest instruction to recompute.
"""

from math import prod

from mindformers_core.operators.computation import local_sizes, operations_of, rounds_of
from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.algorithms import algorithm_steps
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.redistribution.steps import COLLECTIVES


def operations(place, algorithm=None):
    """Floating-point operations of one instruction in the forward pass of one rank.

    Args:
        place: the `Instruction`.
        algorithm: as of `through_algorithm`.

    Returns:
        An integer: 2·m·n·k for products, attention (all scores, masked ones included) and convolutions; 1 to 10 for
        each element of the largest tensor for others; 0 for views; for a sent byte
        the operations that the device (`CellPlan.device_model`) computes while it is sent.

    Raises:
        ValueError: an operator runs a distributed algorithm, and `algorithm` is None.
    """
    entry = place.entry
    device = place.plan.device_model
    if isinstance(entry, Redistribution):
        return sum(_step_operations(step, device) for step in entry.steps)
    if isinstance(entry, CallPlan):
        return _whole_operations(entry.node.graph)
    sizes = local_sizes(entry.signature, place.plan.mesh, entry.axes_of)
    inputs = [prod(layout.local_shape(value.shape)) for value, layout in entry.consumed]
    outputs = list(map(prod, entry.local_shapes))
    own = operations_of(entry.node.operator, sizes, inputs, outputs, may_view=entry.algorithm is None)
    own *= rounds_of(entry.signature, place.plan.mesh, entry.axes_of)
    if entry.algorithm is None:
        return own
    return own + sum(_step_operations(step, device) for step, _ in algorithm_steps(entry, algorithm))


def _step_operations(step, device):
    """Price of one step of a redistribution."""
    name, nbytes = step.forward
    if name in COLLECTIVES:
        return device.operations_of(step.axes, nbytes)
    return 0 if name in ("identity", "view") else prod(step.output_shape)


def _whole_operations(graph):
    """Operations of a Cell that runs unsharded, on whole tensors."""
    total = 0
    for node in graph.nodes:
        if isinstance(node, CallNode):
            total += _whole_operations(node.graph)
            continue
        parts = (node.args, node.kwargs), node.outputs
        elements = [[prod(value.shape) for value in tree_leaves(part)] for part in parts]
        total += operations_of(node.operator, operator_signature(node).sizes, *elements)
    return total
