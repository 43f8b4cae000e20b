"""Propagation: layouts for all tensors of a captured Cell tree from those declared for a few. Pure Python."""

from mindformers_core.tensor_parallel.propagation.plan import CallPlan, FramePlan, Move, OperatorPlan
from mindformers_core.tensor_parallel.propagation.propagate import derive_parameters, propagate

__all__ = ["CallPlan", "FramePlan", "Move", "OperatorPlan", "derive_parameters", "propagate"]
