"""The cost of an instruction: floating-point operations on one rank. Pure Python.

Multiplications and additions count one each, so a matmul of (m, k) by (k, n) has 2·m·n·k, as in Megatron-LM's formula
(Narayanan et al., 2021). An elementary function (exp, square root) counts one, and so does the copy of an element. A
sent byte has a price in operations: without it a collective would be the cheapest instruction to recompute.
"""

from math import prod

from mindformers_core.analysis.algorithms import algorithm_steps
from mindformers_core.operators.registry import facts_of
from mindformers_core.placement import axes_in
from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
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
    device = place.frame.device_model
    if isinstance(entry, Redistribution):
        return sum(_step_operations(step, device) for step in entry.steps)
    if isinstance(entry, CallPlan):
        return _whole_operations(entry.node.graph)
    axes_of, mesh = entry.axes_of, place.frame.mesh
    sizes = {f: size // mesh.axis_size(*axes_in(axes_of.get(f, ()))) for f, size in entry.signature.sizes.items()}
    inputs = [layout.local_shape(value.shape) for value, layout in entry.consumed]
    own = _computed(entry.node.operator, sizes, inputs, entry.local_shapes, may_view=entry.algorithm is None)
    if entry.algorithm is None:
        return own
    return own + sum(_step_operations(step, device) for step, _ in algorithm_steps(entry, algorithm))


def _computed(name, sizes, inputs, outputs, may_view=True):
    """Operations of an operator by the sizes of its factors and the shapes of its inputs and outputs."""
    facts = facts_of(name)
    if callable(facts.operations):
        return facts.operations(sizes)
    if may_view and facts.computes_nothing:
        return 0
    counted = outputs if facts.reads_a_part else [*inputs, *outputs]
    return facts.operations * max(map(prod, counted), default=0)


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
        shapes = [[value.shape for value in tree_leaves(part)] for part in ((node.args, node.kwargs), node.outputs)]
        total += _computed(node.operator, operator_signature(node).sizes, *shapes)
    return total
