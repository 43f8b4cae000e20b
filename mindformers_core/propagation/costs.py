"""The cost of a decision: bytes and seconds of communication, and the work of a rank. Pure Python."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mindformers_core.operators.registry import facts_of
from mindformers_core.placement import axes_in
from mindformers_core.redistribution import plan_redistribution


@dataclass(frozen=True)
class Cost:
    """The cost of one training step on a rank.

    Attributes:
        nbytes: bytes sent in redistributions, forward, and backward for tensors that depend on a trained parameter.
        seconds: their time by the device model.
        work: terms that the operators compute, forward; replicated work counts on every rank.
    """

    nbytes: int
    seconds: float
    work: int

    def __add__(self, other):
        return Cost(self.nbytes + other.nbytes, self.seconds + other.seconds, self.work + other.work)

    def improves_on(self, other):
        """Whether no component is larger than in `other`, and one is smaller."""
        slack = 1e-9 * max(self.seconds, other.seconds)
        less = self.seconds < other.seconds - slack or (self.nbytes, self.work) < (other.nbytes, other.work)
        return less and self.is_no_more_than(other)

    def is_no_more_than(self, other):
        """Whether no component is larger than in `other`."""
        slack = 1e-9 * max(self.seconds, other.seconds)
        return self.nbytes <= other.nbytes and self.work <= other.work and self.seconds <= other.seconds + slack


NOTHING_PAID = Cost(0, 0.0, 0)


@lru_cache(maxsize=65536)
def move_cost(source, target, shape, dtype, trained, device_model):
    """The `Cost` of one redistribution; `trained` says whether a gradient flows back."""
    plan = plan_redistribution(source, target, shape, dtype, device_model)
    nbytes = sum(step.nbytes + (step.backward[1] if trained else 0) for step in plan.steps)
    return Cost(nbytes, plan.forward_cost + (plan.backward_cost if trained else 0.0), 0)


def forms_cost(forms, value, trained, device_model):
    """The `Cost` of all needed redistributions of one tensor."""
    total = NOTHING_PAID
    for target in forms.needed():
        total += move_cost(forms.moves[target][0], target, value.shape, value.dtype, trained, device_model)
    return total


def work_of(plan, mesh):
    """The number of terms that a rank computes for an operator: the product of its local factor sizes; 0 for a view."""
    if facts_of(plan.node.operator).computes_nothing:
        return 0
    return prod(
        size // mesh.axis_size(*axes_in(plan.axes_of.get(factor, ()))) for factor, size in plan.signature.sizes.items()
    )
