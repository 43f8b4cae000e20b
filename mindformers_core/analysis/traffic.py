"""Traffic of one rank in one step: numbers and bytes of collectives by mesh axes. Pure Python."""

from dataclasses import dataclass

from mindformers_core.grouping import grouped
from mindformers_core.redistribution.steps import COLLECTIVES, Step


@dataclass(frozen=True)
class StepEntry:
    """One step of a redistribution, or of a distributed algorithm.

    Attributes:
        step: the `redistribution.Step`.
        gradient: whether a gradient flows back through it in training.
        recomputed: whether its forward operation runs again in the backward pass.
        forward: whether it runs in the forward pass: else in the backward pass alone, as `recomputed`.
    """

    step: Step
    gradient: bool
    recomputed: bool = False
    forward: bool = True

    @property
    def collectives(self):
        """`(direction, name, bytes)` of each collective, without local operations."""
        ways = [("forward", self.step.forward)] if self.forward else []
        ways += [("backward", self.step.backward)] if self.gradient else []
        ways += [("backward", self.step.forward)] if self.recomputed else []
        return tuple((way, name, count) for way, (name, count) in ways if name in COLLECTIVES)


def total(rows):
    """Traffic of the rows of a Cell, including those of called Cells.

    Returns:
        A dict `(axes, direction, name)` -> `(number of collectives, bytes)`; `direction` is `"forward"` or
        `"backward"`, `name` a key of `COLLECTIVES`, and `bytes` the sum over them that one rank sends.
    """

    def sent():
        for row in rows:
            for entry in row.steps:
                yield from (((entry.step.axes, way, name), (1, count)) for way, name, count in entry.collectives)
            yield from row.report.traffic.items() if row.report else ()

    return summed(sent())


def summed(entries):
    """Key -> the sums of all pairs of numbers with this key, of `(key, (number, number))`."""
    return {key: tuple(map(sum, zip(*pairs))) for key, pairs in grouped(entries).items()}


def bytes_by_axes(traffic):
    """`axes -> (bytes forward, bytes backward)` of a `total`; a group over several axes has its own entry."""
    return _by_direction((axes, way, count) for (axes, way, _), (_, count) in traffic.items())


def collectives_of(traffic, axes=None):
    """`name -> (number forward, number backward)` of a `total`, over `axes` or (None) over all."""
    chosen = ((key, number) for key, (number, _) in traffic.items() if axes in (None, key[0]))
    return _by_direction((name, way, number) for (_, way, name), number in chosen)


def _by_direction(entries):
    """`key -> (sum forward, sum backward)` of triples `(key, direction, number)`, by ascending keys."""
    pairs = ((key, (number, 0) if way == "forward" else (0, number)) for key, way, number in entries)
    return dict(sorted(summed(pairs).items()))
