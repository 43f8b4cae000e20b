"""Shapes of operators that MindSpore can't run on the meta device, and tensors that it can't create on CPU.

Both are tables; what they lack is an error of the capture, which names Cell and line.
"""

import re
from functools import cache

import numpy as np
from mindspore import DeviceCtx, Tensor, dtype as mstype, get_context
from mindspore.ops import tensor_method
from mindspore.ops.function import array_func, math_func

from mindformers_core.algorithms.attention import RESULT_DTYPES
from mindformers_core.algorithms.redistribute import meta_of
from mindformers_core.operators import signature_of
from mindformers_core.operators.rules.indexing import BY_VALUES
from mindformers_core.program.structure import tree_map

ON_PLAIN_TENSORS = {"TrilExt": np.tril, "Outer": np.outer}  # operators that CPU has not, and what computes them


def without_shape(name):
    """Why an operator has no shape before it runs, as a sentence; "" for one that has."""
    if name not in BY_VALUES:
        return ""
    return (
        f"the number of results of operator '{name}' depends on the values of its inputs, which no layout can tell: "
        "keep the shape, by ops.where with the mask or by ops.topk of so many, or mark the Cell in the plan, "
        '{"layers.*.moe": {"eager": True}}, or by cell.eager() after shard()'
    )


def _einsum(operands):
    raise ValueError("a name of a dim has one size in all operands, and 1 isn't repeated: ops.broadcast_to does that")


def _vdot(x, y):
    if x.is_complex():
        raise ValueError("of complex numbers, write the conjugate as such: mint.dot(x.conj(), y)")
    return x.dtype


# Operator -> function of its arguments that gives the dtype of its result, or a tuple; shapes are those of its rule.
_DTYPES = {
    **RESULT_DTYPES,  # of operators that run, but by blocks
    **dict.fromkeys(("Experts", "ExpertRows", "ExpertSum", "ExpertCapacity"), lambda x, *_, **__: x.dtype),  # by values
    **dict.fromkeys(("ExpertPlaces", "ExpertSizes"), lambda *_, **__: (mstype.int32,) * 3),
    "AnyExt": lambda *_, **__: mstype.bool_,
    "BincountExt": lambda x, weights=None, *_, **__: mstype.int64 if weights is None else weights.dtype,
    "Einsum": _einsum,
    "Vdot": _vdot,
    **dict.fromkeys(
        ("CosineEmbeddingLoss", "CumulativeLogsumexp", "EmbeddingLookup", "MoeTokenUnpermute", "NpuGelu"),
        lambda x, *_, **__: x.dtype,
    ),
}
# Module of MindSpore, its operator that creates a tensor, and a NumPy function of the same arguments.
_CREATING = (
    (array_func, "arange_", lambda start, end, step, _: np.arange(start, end, step)),
    (array_func, "fill_scalar_", lambda size, value, _: np.full(size, value)),
    (math_func, "lin_space_ext_op", lambda start, end, steps, _: np.linspace(start, end, steps)),
)


def inferred(name, args, kwargs):
    """`(shape, dtype)` of each result of an operator without a meta kernel; None for one that isn't known here.

    Raises:
        ValueError: the shape depends on the values of a tensor.
    """
    if name not in _DTYPES:
        return None
    dtype = _DTYPES[name](*args, **kwargs)  # it may refuse
    shapes = signature_of(name, *tree_map(meta_of, (args, kwargs))).output_shapes
    return list(zip(shapes, dtype if isinstance(dtype, tuple) else (dtype,)))


def by_numpy(name, args):
    """The result of an operator of `ON_PLAIN_TENSORS`."""
    values = [arg.asnumpy() if isinstance(arg, Tensor) else arg for arg in args]
    return Tensor(ON_PLAIN_TENSORS[name](*values), args[0].dtype)


def creating_functions():
    """`(module, name, function)` for the operators that create tensors from numbers, which CPU has not."""
    return [(owner, name, _creating(getattr(owner, name), values)) for owner, name, values in _CREATING]


def _creating(operator, values):
    def create(*args):
        if get_context("device_target") != "CPU":
            return operator(*args)
        with DeviceCtx("meta"):
            dtype = operator(*args).dtype
        return Tensor(values(*args), dtype)

    return create


@cache
def method_behind(name):
    """The Python function that is a Tensor's method on devices without one of their own, or None."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removeprefix("deprecated_")
    prefixes = ("deprecated_tensor_", "tensor_") if name.startswith("Deprecated") else ("tensor_", "deprecated_tensor_")
    reduced = snake.removeprefix("reduce_")
    names = [*(prefix + snake for prefix in prefixes), f"reduce_tensor_{reduced}", f"tensor_{reduced}"]
    return next((getattr(tensor_method, known) for known in names if hasattr(tensor_method, known)), None)
