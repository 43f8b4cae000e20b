"""The eager engine: `DTensor`, and the dispatcher of operators on DTensors."""

from mindformers_core.dtensor import dispatch
from mindformers_core.dtensor.dtensor import DTensor, distribute_tensor
from mindformers_core.dtensor.interception import intercept_operators

__all__ = ["DTensor", "distribute_tensor"]

# what takes its operators, and what its first object of a process needs; both know the class
DTensor.__fallback__, DTensor._intercept = staticmethod(dispatch.dispatch), staticmethod(intercept_operators)
