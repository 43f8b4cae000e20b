"""The policy for a sharded tree's saved tensors between forward and backward pass; by default MindSpore's own.

`recompute.recompute()` and `recompute.swap()` set another policy.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Keeper:
    """A wrapper through which a generated program calls an operator, with its own policy for saved tensors.

    Attributes:
        imports: the import line of the generated module.
        name: of the wrapper object in the module.
        constructor: the expression that creates the object, which is called with a function and its tensor arguments.
        takes_collectives: whether the collectives of a distributed algorithm are called through the wrapper, too.
    """

    imports: str
    name: str
    constructor: str
    takes_collectives: bool = True


@dataclass(frozen=True)
class Annotation:
    """The annotation of an instruction with its own policy for saved tensors, in reports.

    Attributes:
        kind: `"recomputed"`: the instruction runs again in the backward pass; `"on host"`: its results are offloaded
            to the host until then; `"kept for others"`: its results are saved, since others are recomputed from them;
            of a call, `"recomputed whole"`: the whole Cell runs again; `""`: part of such a Cell, nothing is shown.
        nbytes: bytes of results and of copies of views that a rank's device doesn't save for the backward pass because
            of the policy; of `"kept for others"`, bytes that the device saves.
        sends: whether collectives of the instruction run again, too.
    """

    kind: str
    nbytes: int
    sends: bool = False


@dataclass(frozen=True)
class ExplainedActivations:
    """The report of an activation policy on one program.

    Attributes:
        lines: text on the whole program.
        notes: key of an instruction (see `Instruction`) -> its `Annotation`.
        dropped, on_host: keys of the instructions whose results are recomputed, and of those whose results are
            offloaded to the host.
        arguments_need: whether gradients flow back to the root's arguments (see `Prediction`).
    """

    lines: tuple = ()
    notes: dict = field(default_factory=dict)
    dropped: frozenset = frozenset()
    on_host: frozenset = frozenset()
    arguments_need: bool = False


class ActivationPolicy:
    """The interface of a policy; this default changes nothing.

    Attributes:
        is_active: whether programs for PyNative differ from those for compiled functions.
        layers: number of a layer -> paths of its Cells.
        recomputed_cells: paths of the outermost Cells that run again in compiled functions.
    """

    is_active = False
    layers = {}
    recomputed_cells = ()

    def annotate(self, path, plan, compiled):
        """The `CellPlan` of a call of the Cell at `path`, with a `Keeper` for some instructions.

        Args:
            path, plan: of the call.
            compiled: None for PyNative; otherwise as `ShardedTree.compiling`, empty where the whole is one function.

        Raises:
            ValueError: the policy can't be applied, in the program or in a compiled function.
        """
        return plan

    def calling(self):
        """A context manager for a call of a Cell by user code, in PyNative."""
        return nullcontext()

    def checkpoint_call(self, function, others, tensors):
        """Call a compiled function of tensors, one of `recomputed_cells`, in PyNative; `others`: its Parameters."""
        raise NotImplementedError

    def check_compiling(self):
        """Raise `ValueError` where one compiled function of the whole tree can't apply the policy."""

    def validate_for_backward(self):
        """Before gradients of the last program: raise `ValueError` for settings that match nothing or can't be applied.

        Called for Cells in evaluation mode, too.
        """

    def stage_summary(self):
        """A JSON-able summary of this stage for `check_stages` of the other stages; None: nothing."""
        return None

    def check_stages(self, summaries, is_compiled):
        """Raise `ValueError` for settings that match no stage of a pipeline, or that a compiled stage can't apply.

        Args:
            summaries: of all stages, ascending.
            is_compiled: whether this stage is compiled.
        """

    def keeps_weights(self, unit):
        """Whether the gathered weights of a unit are kept between its forward and its backward pass."""
        return False

    def explained(self, plan, path=""):
        """The `ExplainedActivations` of a program, for `explain()`.

        Args:
            path: of a called Cell: the notes are those in its first call, with keys from there. Default: the root.
        """
        return ExplainedActivations()
