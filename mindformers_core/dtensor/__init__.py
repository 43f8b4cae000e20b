"""The eager engine: `DTensor`, and the dispatcher of operators on DTensors."""

from mindformers_core.dtensor.dtensor import DTensor, distribute_tensor
from mindformers_core.dtensor.interception import intercept_operators

__all__ = ["DTensor", "distribute_tensor"]

intercept_operators()
