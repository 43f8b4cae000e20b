"""What the distributed algorithm of an operator communicates, read off the graph of what it does on one rank."""

from mindformers_core.capture.algorithm_graph import algorithm_graph
from mindformers_core.dtensor.move import cost_model
from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import values_in
from mindformers_core.propagation.operators import NO_GRADIENT
from mindformers_core.redistribution import plan_redistribution

__all__ = ["algorithm_steps"]


def algorithm_steps(plan):
    """Pairs (`Step`, whether a gradient flows back through it) of an `OperatorPlan` with an `algorithm`, in order.

    This is what `explain_plan` and `page` take as `algorithm_steps`; steps are those of this process's device.
    """
    mesh = plan.inputs[0].mesh
    graph = algorithm_graph(plan, mesh, mesh.rank_list[0])
    flowing = {value.id for value in values_in(graph.arguments) if is_float(value.dtype)}
    found = []
    for node in graph.nodes:
        flows = node.operator not in NO_GRADIENT and any(v.id in flowing for v in values_in((node.args, node.kwargs)))
        if node.operator == "Redistribute":
            value, source, target = node.args
            shape = source.global_shape(value.shape)
            steps = plan_redistribution(source, target, shape, value.dtype, cost_model()).steps
            found += [(step, flows) for step in steps]
        if flows:
            flowing |= {value.id for value in values_in(node.outputs) if is_float(value.dtype)}
    return tuple(found)
