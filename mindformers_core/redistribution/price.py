"""The price of a decision: seconds of communication and of computation on one rank. Pure Python."""

from dataclasses import dataclass
from functools import lru_cache

from mindformers_core.redistribution.planner import plan_redistribution


@dataclass(frozen=True)
class Price:
    """The price of a part of one training step on a rank, by a `DeviceModel`.

    Of two prices the lower one gives up fewer declared cuts; of equally many the one with fewer seconds is lower.

    Attributes:
        given_up: number of declared cuts that operators give up: see `OperatorCall.kept`.
        communication: seconds of collectives, forward, and backward where a gradient flows.
        computation: seconds of operators, forward, and backward where a gradient flows; work that several ranks do
            alike counts on each.
    """

    given_up: int
    communication: float
    computation: float

    def __add__(self, other):
        return Price(
            self.given_up + other.given_up,
            self.communication + other.communication,
            self.computation + other.computation,
        )

    @property
    def seconds(self):
        """Communication and computation, one after the other."""
        return self.communication + self.computation

    def improves_on(self, other):
        """Whether this price is lower than `other`, by more than rounding."""
        if self.given_up != other.given_up:
            return self.given_up < other.given_up
        return self.seconds < other.seconds * (1 - 1e-9)


FREE = Price(0, 0.0, 0.0)


def steps_price(steps, device_model):
    """The `Price` of pairs (`Step`, whether a gradient flows back through it): the collectives of all of them."""
    ways = [(step, step.forward) for step, _ in steps], [(step, step.backward) for step, gradient in steps if gradient]

    def seconds(way):
        return sum(device_model.seconds(name, step.axes, step.group_size, step.whole) for step, (name, _) in way)

    return Price(0, sum(map(seconds, ways)), 0.0)


@lru_cache(maxsize=65536)
def redistribution_price(source, target, shape, dtype, gradient, device_model):
    """The `Price` of one redistribution; `gradient` says whether a gradient flows back. Varying marks alone are priced.

    Args:
        source, target, shape, dtype, device_model: as of `plan_redistribution`.
    """
    steps = plan_redistribution(source, target, shape, dtype, device_model).steps
    return steps_price([(step, gradient) for step in steps], device_model)
