"""The layouts that each operator admits: the registry, and one file of rules for each family. Pure Python."""

from mindformers_core.operators import rules  # noqa: F401  (its tables fill the registry)
from mindformers_core.operators.algorithms import Algorithm
from mindformers_core.operators.choice import Choice, OperatorCall, Resolution
from mindformers_core.operators.registry import facts_of, register_algorithm, register_operator, signature_of
from mindformers_core.operators.resolve import resolve
from mindformers_core.operators.rules.dims import equation
from mindformers_core.operators.rules.elementwise import elementwise
from mindformers_core.operators.rules.matmul import contraction
from mindformers_core.operators.signature import LocalCall, Signature, TensorMeta, is_float, tensor_meta

__all__ = [
    "Algorithm", "Choice", "LocalCall", "OperatorCall", "Resolution", "Signature", "TensorMeta",
    "contraction", "elementwise", "equation", "facts_of", "is_float", "register_algorithm", "register_operator",
    "resolve", "signature_of", "tensor_meta",
]  # fmt: skip
