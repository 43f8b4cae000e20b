"""Redistribution from one layout to another: the cheapest sequence of collectives, and its cost. Pure Python."""

from mindformers_core.redistribution.device_model import ASCEND, CPU, GPU, DeviceModel, Link
from mindformers_core.redistribution.planner import Plan, plan_redistribution
from mindformers_core.redistribution.price import FREE, Price, redistribution_price, steps_price
from mindformers_core.redistribution.steps import STEP_KINDS, Step, StepKind, routing_step, shift_step, wire_bytes

__all__ = [
    "ASCEND", "CPU", "FREE", "GPU", "STEP_KINDS", "DeviceModel", "Link", "Plan", "Price", "Step", "StepKind",
    "plan_redistribution", "redistribution_price", "routing_step", "shift_step", "steps_price", "wire_bytes",
]  # fmt: skip
