"""The eager engine: `DTensor`, and the dispatcher of operators on DTensors."""

from mindformers_core.dtensor.dispatch import dispatch
from mindformers_core.dtensor.dtensor import DTensor, distribute_tensor

__all__ = ["DTensor", "distribute_tensor"]

DTensor.__fallback__ = staticmethod(dispatch)
