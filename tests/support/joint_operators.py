"""Operators whose factors an axis may cut jointly, `pair_sum`, or although no input is cut so, `few` and `many`."""

from mindspore import ops

from mindformers_core.operators import Algorithm, Signature, elementwise, register_algorithm, register_operator
from mindformers_core.tensor_parallel import custom_operator

__all__ = ["few", "many", "pair_sum", "register"]


def pairs(x, y):
    """For every row of x the sum over all rows of y of a function of both: (s, d), (t, d) → (s, d)."""
    return ops.sum(ops.tanh(ops.expand_dims(x, 1) * ops.expand_dims(y, 0)), 1)


def ring(operator, args, context):
    """Parts of y go round: each rank adds what its rows of x make with all of them."""
    x, y = args
    total = operator(x, y)
    for _ in range(context.count - 1):
        y = context.shift(y, 1)
        total = total + operator(x, y)
    return total


def _pairs_rule(x, y):
    (s, d), (t, _) = x.shape, y.shape
    inputs = (("s",), ("d",)), (("t",), ("d",))
    return Signature(
        inputs, inputs[:1], {"s": s, "t": t, "d": d}, reduced={"t": "sum"}, joint={("s", "t"): "pair_ring"}
    )


def smoothed(x):
    """Row by row, (n, d) → (n, d)."""
    return ops.tanh(x) * ops.cos(x)


def _rows_rule(x):
    """Rows may be cut although they arrive whole."""
    plain = elementwise(x)
    return Signature(plain.inputs, plain.outputs, plain.sizes, offers=(("d0",),))


def register():
    """Enter the operators: in a process of its own, or while the registry is a copy."""
    register_algorithm(Algorithm("pair_ring", "parts of the second list go round; sums over them", False, ring))
    register_operator("PairSum", source="support.joint_operators.pairs", algorithms=("pair_ring",))(_pairs_rule)
    for name, operations in (("Few", 3), ("Many", lambda sizes: 10**6 * sizes["d0"] * sizes["d1"])):
        register_operator(name, source="support.joint_operators.smoothed", operations=operations)(_rows_rule)


pair_sum = custom_operator("PairSum", pairs)
few, many = custom_operator("Few", smoothed), custom_operator("Many", smoothed)
