"""The price of the steps of a plan's algorithm, by its graph and as an eager call asks for it."""

from dataclasses import replace

from mindformers_core.capture.algorithm_graph import algorithm_of, redistribution_steps
from mindformers_core.dtensor.algorithm_price import algorithm_price
from mindformers_core.operators import tensor_meta
from mindformers_core.operators.choice import OperatorCall, Resolution
from mindformers_core.operators.registry import rule_attributes
from mindformers_core.program.structure import Value, tree_fill
from mindformers_core.propagation.algorithms import algorithm_steps, own_gradient_steps
from mindformers_core.redistribution import FREE, steps_price


def program_price(plan, graph=None):
    """The price, where this is the algorithm's graph. Default: it is captured."""
    captured = (graph, [redistribution_steps(plan, node) for node in graph.nodes]) if graph else algorithm_of(plan)
    steps = algorithm_steps(plan, lambda _: captured)
    return steps_price([*steps, *((step, False) for step in own_gradient_steps(plan, algorithm_of))], plan.device_model)


def eager_price(plan):
    """The same, without a capture, as an eager call asks for it."""
    node, use = plan.node, plan.node.primitive
    metas = tuple(tensor_meta(value.shape, value.dtype, given) for value, given in plan.consumed)
    args, kwargs = tree_fill((node.args, node.kwargs), metas, Value)
    node = replace(node, args=args, kwargs=kwargs, primitive=None)
    mesh = plan.outputs[0].mesh
    call = OperatorCall(node.operator, plan.signature, metas, mesh, plan.device_model, trained=frozenset({0}))
    found = Resolution(plan.choice, plan.inputs, plan.outputs, (plan.algorithm, plan.cut_axes), FREE, FREE)
    attributes = {} if use is None else rule_attributes(node.operator, use.attributes)
    return algorithm_price(node, attributes, call, found)
