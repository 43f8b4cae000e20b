"""`Observer`: receives what generated programs compute, while they run. Pure Python."""

from contextlib import nullcontext
from dataclasses import dataclass

from mindformers_core.program.structure import Value

__all__ = ["Observed", "Observer"]


@dataclass(frozen=True, eq=False)
class Observed:
    """A tensor that a generated function reports to the observer.

    Attributes:
        number: that of the report, in its module.
        frame: the `CellPlan` of the function.
        entry: the instruction that produces the tensor, or the `ParameterUse` that it is; None: the program's argument.
        value, layout: what it is.
        variable: its name in the source.
    """

    number: int
    frame: object
    entry: object
    value: Value
    layout: object
    variable: str


class Observer:
    """Receives what the programs of a rank compute; `process_state().observer` is the current one.

    This class, the default, ignores all.

    Attributes:
        instruments: whether programs that are made now report their tensors; compiled ones can't.
    """

    instruments = False

    def placed(self, cell, parameters):
        """The Parameters that a Cell gets by `shard()`: id of the present one -> this rank's shard."""
        return parameters

    def dtype(self, name):
        """The name of the dtype to compute with in the place of a dtype of the model."""
        return name

    def planned(self, tree, path, plan):
        """The `(CellGraph, CellPlan)` of a program of the Cell at `path`; `plan()` captures and propagates."""
        return plan()

    def text(self, text):
        """The source of a module in place of the generated one."""
        return text

    def loaded(self, module, source):
        """Complete a generated module before it runs; an instrumented one needs `observed(cell, number, tensor)`.

        Args:
            module: the module, with its constants.
            source: the `ModuleSource`, whose `observed` has the `Observed` of each number.
        """

    def in_pass(self, label, direction):
        """The context of a pass.

        Args:
            label: `(key, number)`: the pass's key of `ForwardBackward`, and the number of earlier passes of that key.
            direction: "forward" or "backward".
        """
        return nullcontext()

    def weight_gradient(self, parameter, gradient):
        """A backward pass has computed the gradient of a Parameter, not yet reduced over data-parallel ranks."""

    def held(self, what, tensor, parameter=None):
        """A step holds a tensor outside of its passes: that of a Parameter, or a whole one."""

    def end_step(self, step):
        """An optimizer step, of this number, is done."""
