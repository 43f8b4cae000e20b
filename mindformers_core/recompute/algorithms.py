"""What runs in the place of an operator with a distributed algorithm, for those who foretell what it keeps."""

from mindformers_core.capture.algorithm_graph import algorithm_graph
from mindformers_core.dtensor.move import cost_model
from mindformers_core.redistribution import plan_redistribution

__all__ = ["algorithm_of"]


def algorithm_of(plan):
    """Pair of an algorithm's `CellGraph` and, for each of its nodes, the `Step`s of a redistribution or None.

    Args:
        plan: an `OperatorPlan` that has an `algorithm`.

    Raises:
        CaptureError: the algorithm looks at values.
    """
    mesh = plan.inputs[0].mesh
    graph = algorithm_graph(plan, mesh, mesh.rank_list[0])
    return graph, [_steps(node) for node in graph.nodes]


def _steps(node):
    if node.operator != "Redistribute":
        return None
    value, source, target = node.args
    return plan_redistribution(source, target, source.global_shape(value.shape), value.dtype, cost_model()).steps
