"""Redistribution from one layout to another: the cheapest sequence of collectives, and its cost. Pure Python."""

from mindformers_core.redistribution.cost import ASCEND, CPU, GPU, CostModel, Link
from mindformers_core.redistribution.planner import Plan, plan_redistribution
from mindformers_core.redistribution.steps import STEP_KINDS, Step, StepKind, wire_bytes

__all__ = [
    "ASCEND",
    "CPU",
    "GPU",
    "STEP_KINDS",
    "CostModel",
    "Link",
    "Plan",
    "Step",
    "StepKind",
    "plan_redistribution",
    "wire_bytes",
]
