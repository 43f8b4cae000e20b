"""What becomes of a sharded tree's activations between forward and backward pass: by default, what MindSpore does.

`recompute.recompute()` and `recompute.swap()` give a tree another policy.
"""

from contextlib import nullcontext
from dataclasses import dataclass

__all__ = ["ActivationPolicy", "Keeper"]


@dataclass(frozen=True)
class Keeper:
    """What a generated program calls an operator through, so that its results are kept in another way.

    Attributes:
        imports: the line that a module needs at its top.
        name: what the object is called there.
        constructor: the expression that makes it; it is called with a function of tensors, and these tensors.
        takes_collectives: whether the collectives of a distributed algorithm are called through it, too.
    """

    imports: str
    name: str
    constructor: str
    takes_collectives: bool = True


class ActivationPolicy:
    """What a sharded tree asks. This one leaves all as it is.

    Attributes:
        marks: whether programs for PyNative differ from those for compiled functions.
    """

    marks = False

    def marked(self, path, frame, compiled):
        """The `FramePlan` of a call of the Cell at `path`, with a `Keeper` for some instructions.

        Raises:
            ValueError: the policy can't be honoured, in the program or in a `compiled` function.
        """
        return frame

    def calling(self):
        """A context manager around a call of a Cell from outside, in PyNative."""
        return nullcontext()

    def check_splitting(self):
        """Raise `ValueError` where weights' gradients can't be computed apart from those of inputs."""

    def keeps_weights(self, unit):
        """Whether the weights of a unit that were gathered for its forward pass stay for its backward pass."""
        return False

    def explained(self, frame):
        """Lines of text for `explain()` of a root's `FramePlan`."""
        return []
