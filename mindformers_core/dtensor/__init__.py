"""The eager engine: `DTensor`, and the dispatcher of operators on DTensors."""

from mindformers_core.dtensor import dispatch
from mindformers_core.dtensor.algorithm_price import Shaped
from mindformers_core.dtensor.dtensor import DTensor, distribute_tensor
from mindformers_core.dtensor.interception import intercept_operators

__all__ = ["DTensor", "distribute_tensor"]

# what takes their operators, and what its first object of a process needs; both know the classes
DTensor.__fallback__ = Shaped.__fallback__ = staticmethod(dispatch.dispatch)
DTensor._intercept = staticmethod(intercept_operators)
