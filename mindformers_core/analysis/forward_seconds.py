"""The forward time of an instruction on one rank, by the device model of its plan. Pure Python."""

from math import prod

from mindformers_core.operators.computation import computation_seconds
from mindformers_core.program.graph import CallNode
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.propagation.algorithms import algorithm_steps
from mindformers_core.propagation.operators import operator_signature
from mindformers_core.redistribution.price import steps_price
from mindformers_core.redistribution.steps import COLLECTIVES


def forward_seconds(place, algorithm=None):
    """Seconds of one instruction in the forward pass of one rank: what computing it again takes.

    Args:
        place: the `Instruction`.
        algorithm: as of `through_algorithm`.

    Returns:
        The price of an operator as layouts are chosen by it (`computation_seconds`, and the collectives of its
        distributed algorithm), of a redistribution that of its collectives, and what its local copies take, which
        there are free; 0.0 for views.

    Raises:
        ValueError: an operator runs a distributed algorithm, and `algorithm` is None.
    """
    entry, mesh, device = place.entry, place.plan.mesh, place.plan.device_model
    if isinstance(entry, Redistribution):
        return _steps_seconds(entry.steps, device)
    if isinstance(entry, CallPlan):
        return _whole_seconds(entry.node.graph, mesh, device)
    steps = [] if entry.algorithm is None else [step for step, _ in algorithm_steps(entry, algorithm)]
    return _operator_seconds(entry.node, entry.signature, mesh, entry.axes_of, device) + _steps_seconds(steps, device)


def _operator_seconds(node, signature, mesh, axes_of, device):
    dtypes = [value.dtype for value in (*node.taken, *node.made)]
    return computation_seconds(node.operator, signature, mesh, axes_of, dtypes, device)


def _steps_seconds(steps, device):
    """Seconds of the collectives of redistributions, and of what slices, masks and pads read and write."""
    copied = [step for step in steps if step.forward[0] not in ("identity", "view", *COLLECTIVES)]
    sizes = [(prod(step.local_shape) + prod(step.output_shape)) * step.itemsize for step in copied]
    collectives = steps_price([(step, False) for step in steps], device).seconds
    return collectives + sum(device.computation(0, nbytes) for nbytes in sizes)


def _whole_seconds(graph, mesh, device):
    """Seconds of a Cell that runs unsharded, on whole tensors."""
    nodes = (node for call in graph.calls() for node in call.nodes if not isinstance(node, CallNode))
    return sum(_operator_seconds(node, operator_signature(node), mesh, {}, device) for node in nodes)
