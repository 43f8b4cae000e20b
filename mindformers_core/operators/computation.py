"""The work of an operator on one rank: floating-point operations, bytes of memory, and their time. Pure Python.

Multiplications and additions count one each, so a matmul of (m, k) by (k, n) has 2·m·n·k, as in Megatron-LM's formula
(Narayanan et al., 2021). An elementary function (exp, square root) counts one, and so does the copy of an element.
"""

from math import prod

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.operators.registry import facts_of
from mindformers_core.operators.views import INPUT_IF_OF_ITS_DTYPE, strided
from mindformers_core.placement import axes_in


def _local_sizes(signature, mesh, axes_of):
    """Factor -> its size on one rank, where `axes_of` says which mesh axes shard it."""
    counts = {factor: mesh.axis_size(*axes_in(entry)) for factor, entry in axes_of.items()}
    return {factor: size // counts.get(factor, 1) for factor, size in signature.sizes.items()}


def _rounds(signature, mesh, axes_of):
    """How often a rank computes with tensors of the local sizes: once for every part along factors cut jointly."""
    joint = signature.joint_axes(axes_of).items()
    return prod(mesh.axis_size(*axes) ** (len(group) - 1) for group, axes in joint)


def computation_seconds(name, signature, mesh, axes_of, dtypes, device_model):
    """Seconds of one forward call of an operator: a roofline of operations and of bytes read and written.

    Operations are 2·m·n·k for products, attention (the scores that a static mask shows) and convolutions; 1 to 10 for
    each element of the largest tensor for others. Views take nothing.

    Args:
        name, signature: the operator and its `Signature`.
        mesh, axes_of: factor -> the axes of the mesh that shard it.
        dtypes: names of the dtypes of all inputs and outputs, in order.
    """
    facts = facts_of(name)
    if facts.view not in (None, strided, INPUT_IF_OF_ITS_DTYPE):  # else results are always views
        return 0.0
    sizes = _local_sizes(signature, mesh, axes_of)
    tensors = (*signature.inputs, *signature.outputs)
    elements = [prod([sizes[factor] for factors in dims for factor in factors]) for dims in tensors]
    each, count = [number * ITEM_BYTES[dtype] for number, dtype in zip(elements, dtypes)], len(signature.inputs)
    counted, nbytes = (elements[count:], 2 * sum(each[count:])) if facts.reads_a_part else (elements, sum(each))
    work = facts.operations(sizes) if callable(facts.operations) else facts.operations * max(counted, default=0)
    return device_model.computation(work * signature.part, nbytes) * _rounds(signature, mesh, axes_of)
