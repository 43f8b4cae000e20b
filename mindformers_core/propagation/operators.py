"""The rule of one operator, applied to a node or to a rank's local call. Pure Python."""

from mindformers_core.operators import TensorMeta, signature_of, tensor_meta
from mindformers_core.operators.registry import FLOWS, facts_of, rule_attributes
from mindformers_core.operators.signature import whole_signature
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.program.structure import Value, tree_fill

TENSORS = Value, TensorMeta  # what stands for tensors among the arguments of a node


def passes_gradient(operator):
    """Whether an operator with float results has a gradient that isn't 0."""
    return facts_of(operator).gradient == FLOWS


def operator_signature(node):
    """The `Signature` of an `OperatorNode`; one without tensor inputs has the same results on every rank.

    Raises:
        ValueError: there is no rule, the rule rejects the call, or predicts other shapes than the captured ones.
    """
    values, outputs = node.taken, node.made
    if not values:
        return whole_signature((), [value.shape for value in outputs])
    metas = [tensor_meta(value.shape, value.dtype, None, value.constant) for value in values]
    signature = local_signature(node, *tree_fill((node.args, node.kwargs), metas))
    predicted = signature.output_shapes
    if predicted != [value.shape for value in outputs]:
        made = ", ".join(value.described for value in outputs)
        raise ValueError(f"operator '{node.operator}' makes {made}, where its rule predicted shapes {predicted}")
    return signature


def local_call_shapes(plan):
    """The output shapes of an `OperatorPlan`'s local call, by its rule for local shapes and arguments."""
    node = plan.node
    metas = [tensor_meta(at.local_shape(v.shape), v.dtype, None, v.constant) for v, at in plan.consumed]
    arguments = node.args, node.kwargs
    if plan.signature.local.localize is not None:  # else a wrong plan may have no local shapes
        arguments = plan.signature.local.localized(*arguments, plan.local_shapes)
    return local_signature(node, *tree_fill(arguments, metas, TENSORS)).output_shapes


def local_signature(node, args, kwargs):
    """The `Signature` of a node's operator for other arguments, by its rule; `TensorMeta`s stand for tensors."""
    attributes = node.primitive.attributes if node.primitive is not None else {}
    shapes = [value.shape for value in node.made]
    return signature_of(node.operator, args, kwargs | rule_attributes(node.operator, attributes), shapes)


def operator_plan(node, call, resolution):
    """The `OperatorPlan` of a `Resolution` of an `OperatorCall`."""
    layouts = resolution.inputs, resolution.outputs
    return OperatorPlan(node, call.signature, *layouts, resolution.choice, *resolution.algorithm, call.device_model)
