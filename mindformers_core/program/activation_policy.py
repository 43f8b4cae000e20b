"""What becomes of a sharded tree's activations between forward and backward pass: by default, what MindSpore does.

`recompute.recompute()` and `recompute.swap()` give a tree another policy.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

__all__ = ["ActivationPolicy", "ExplainedActivations", "Keeper", "Mark"]


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


@dataclass(frozen=True)
class Mark:
    """What is said of an instruction whose results are kept in another way.

    Attributes:
        kind: `"recomputed"`: it runs again in the backward pass; `"on host"`: its results wait for that on the host;
            `"kept for others"`: what it makes is kept, since others are computed again from it; of a call of a Cell,
            `"recomputed whole"`: all in it runs again; `""`: it does as part of such a Cell, and nothing is shown.
        nbytes: on one rank, bytes that the device doesn't keep for the backward pass because of it, of its results and
            of copies of views; of the last kind, bytes that it keeps.
        sends: whether the collectives in it run again, too.
    """

    kind: str
    nbytes: int
    sends: bool = False


@dataclass(frozen=True)
class ExplainedActivations:
    """What there is to say about a program.

    Attributes:
        lines: text about the whole program.
        marks: key of an instruction -> its `Mark`. A key is the indices of the calls that lead there, among the
            `instructions` of each `CellPlan`, and its own.
        dropped, on_host: keys of the instructions whose results are computed again, and of those whose results wait on
            the host.
        arguments_need: whether gradients flow back to the root's arguments, see `Prediction`.
    """

    lines: tuple = ()
    marks: dict = field(default_factory=dict)
    dropped: frozenset = frozenset()
    on_host: frozenset = frozenset()
    arguments_need: bool = False


class ActivationPolicy:
    """What a sharded tree asks. This one leaves all as it is.

    Attributes:
        marks: whether programs for PyNative differ from those for compiled functions.
        layers: number of a layer -> paths of the Cells that are it.
        recomputed_cells: paths of the outermost Cells that run again where they are compiled.
    """

    marks = False
    layers = {}
    recomputed_cells = ()

    def marked(self, path, frame, compiled):
        """The `CellPlan` of a call of the Cell at `path`, with a `Keeper` for some instructions.

        Args:
            path, frame: of the call.
            compiled: None for PyNative; otherwise as `ShardedTree.compiling`, empty where the whole is one function.

        Raises:
            ValueError: the policy can't be honoured, in the program or in a compiled function.
        """
        return frame

    def calling(self):
        """A context manager around a call of a Cell from outside, in PyNative."""
        return nullcontext()

    def checkpoint_call(self, function, others, tensors):
        """Call a compiled function of tensors, one of `recomputed_cells`, in PyNative; it reads other Parameters."""
        raise NotImplementedError

    def check_compiling(self):
        """Raise `ValueError` where a compiled function that calls the Cells as a whole can't do what is asked."""

    def validate_for_backward(self):
        """Before gradients of the program that was asked for last, also of Cells that aren't in training mode: raise
        `ValueError` for what matches nothing, or can't be honoured."""

    def stage_summary(self):
        """What the policies of a pipeline's other stages have to know, as JSON can hold it; None: nothing."""
        return None

    def check_stages(self, summaries):
        """Raise `ValueError` for what none of a pipeline's stages has; `summaries`: of every stage, ascending."""

    def check_compiled_stage(self, summaries):
        """Raise `ValueError` for what a compiled stage can't do; as `check_stages`, with `"compiled"` in each."""

    def keeps_weights(self, unit):
        """Whether the weights of a unit that were gathered for its forward pass stay for its backward pass."""
        return False

    def explained(self, frame, path=""):
        """The `ExplainedActivations` of a program, for `explain()`.

        Args:
            frame: its `CellPlan`.
            path: of a Cell that it calls: the marks are those in the first call of this one, with their keys in there.
        """
        return ExplainedActivations()
