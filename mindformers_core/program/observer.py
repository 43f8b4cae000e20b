"""What takes part in the programs of a rank: `Instrumentation` may change them, an `Observer` only sees. Pure Python.

`process_state()` has one of each; those here do nothing.
"""

from contextlib import nullcontext
from dataclasses import dataclass

from mindformers_core.program.structure import Value


@dataclass(frozen=True, eq=False)
class Observed:
    """A tensor that a generated function reports to the observer."""

    number: int  # of the report, in its module
    plan: object  # the `CellPlan` of the function
    entry: object  # the instruction that produces it, or the `ParameterUse` that it is; None: the program's argument
    value: Value
    layout: object
    variable: str  # its name in the source


class Instrumentation:
    """Changes how the programs of a rank are made, and in which dtypes they compute."""

    def placed(self, cell, parameters):
        """The Parameters that a Cell gets by `shard()`: id of the present one -> this rank's shard."""
        return parameters

    def dtype(self, name):
        """The name of the dtype to compute with in the place of a dtype of the model."""
        return name

    def planned(self, tree, path, plan):
        """`(CellGraph, CellPlan, PythonState)` of a program of the Cell at `path`; `plan()` captures and plans."""
        return plan()

    def generated(self, key, generate):
        """The `ModuleSource` of a plan, the first entry of `key`; `generate()` makes it, on a rank from `key` alone."""
        return generate()

    def text(self, text):
        """The source of a module in place of the generated one."""
        return text

    def loaded(self, module, source):
        """Complete the module of a `ModuleSource`, which has its constants, before it runs."""


class Observer:
    """Receives what the programs of a rank compute.

    Attributes:
        instruments: whether programs that are made now report their tensors; compiled ones can't.
    """

    instruments = False

    def sharded(self, cell):
        """A Cell has got its Parameters by `shard()`."""

    def observed(self, source, cell, number, tensor):
        """A program reports a tensor: `source.observed[number]` is its `Observed`, of the `ModuleSource`."""

    def in_pass(self, label, direction):
        """The context of a pass, "forward" or "backward".

        `label`: `(key, number)`: the pass's key of `ForwardBackward`, and the number of earlier passes of that key.
        """
        return nullcontext()

    def weight_gradient(self, parameter, gradient):
        """A backward pass has computed the gradient of a Parameter, not yet reduced over data-parallel ranks."""

    def held(self, what, tensor, parameter=None):
        """A step holds a tensor outside of its passes: that of a Parameter, or a whole one."""

    def end_step(self, step):
        """An optimizer step, of this number, is done."""
