"""The comparison of all ranks' values with those of one card, and the faults that it finds."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mindformers_core.program.plan import OperatorPlan, parameter_path
from mindformers_core.verification.comparison import close, expected_part, gradient_terms, is_tie, summed
from mindformers_core.verification.report import fault_lines
from mindformers_core.verification.rounding import FACTOR

_KEPT = 16  # faults of a rank; the first one counts
_OUTSIDE = (
    "outside of verify: loss scales, data, checkpoints, graph mode, real backends, "
    "seeds and distributions of draws, Python state. `diff` compares such runs: docs/debugging.md"
)


@dataclass(frozen=True)
class Precision:
    """The floating dtype of a verification.

    Attributes:
        dtype: name of the dtype of all floating tensors, whatever their dtypes in the model; None: these.
        tolerance: largest difference, relative to the largest magnitude of a tensor.
        rounding: largest difference, relative to the largest magnitude of the terms that were summed.
    """

    dtype: str
    tolerance: float
    rounding: float


PRECISIONS = {
    "float64": Precision("float64", 2**-20, 2**-44),
    "float32 in float64": Precision("float64", 2**-18, 2**-22),  # see `FLOAT32_KERNELS`
    "float32": Precision("float32", 2**-13, 2**-17),
    "mixed": Precision(None, 2**-13, 2**-17),
}
# operators that compute float64 tensors in float32 on CPU
FLOAT32_KERNELS = frozenset({"CTCLossV2", "LayerNorm", "LayerNormExt", "LogSoftmax", "MaskedFill"})


@dataclass(frozen=True, eq=False)
class Fault:
    """A tensor of a rank that differs from one card's.

    Attributes:
        order: sort key: the earliest fault is the smallest.
        rank: the global rank.
        what: "value", "gradient", or what is compared after the passes: "reduced gradient", "norm", ….
        at: stage and label of the pass, None after the passes; the `Observed` or None; the path of the Cell, or of the
            parameter; the generated module, or, of a reduced gradient, the bucket that reduces it.
        layout: the layout that the tensor should have.
        key: the same for all ranks' faults of one tensor.
        found, expected: arrays.
        value: the global array.
    """

    order: tuple
    rank: int
    what: str
    at: tuple
    layout: object
    key: tuple
    found: np.ndarray
    expected: np.ndarray
    value: np.ndarray


@dataclass(eq=False)
class Check:
    """What all ranks of one verification share.

    Attributes:
        mesh: of all ranks.
        plans: (number of a stage, mesh of its Cell) -> `(CellGraph, CellPlan)`.
        roots: as `plans`, the `CellPlan`s of what has run: under recompute() others.
        truth: the `OneCard`.
        precision: the `Precision` of all ranks and of the truth.
        allowances: see `rounding`; empty: no rounding is allowed for.
        is_whole: whether the tensors inside of programs are compared in every pass, not in the first ones only.
        notes: sentences about what isn't verified.
        compared: number of tensors.
        rounded: number of those that differ by no more than rounding may, as `allowances` says.
        ties: `(order, place)` of the choices among equal numbers that were made otherwise.
        sources: key -> `ModuleSource`, see `Instrumentation.generated`.
    """

    mesh: object
    plans: dict
    truth: object
    precision: Precision
    notes: tuple = ()
    is_whole: bool = False
    allowances: dict = field(default_factory=dict)
    faults: list = field(default_factory=list)
    compared: int = 0
    rounded: int = 0
    ties: list = field(default_factory=list)
    roots: dict = field(default_factory=dict)
    sources: dict = field(default_factory=dict)
    _waiting: dict = field(default_factory=dict)  # terms of partial tensors, see `summed`
    _counts: Counter = field(default_factory=Counter)  # rank -> faults

    def looks_inside(self, label):
        """Whether tensors inside of the programs are compared in a pass: of each replica in the first one at least.

        Every pass runs the same programs. What later ones compute is compared as a whole: results, and the gradients
        of weights. Only where that finds a fault that began earlier is it found in another run, with `is_whole`.
        """
        return self.is_whole or label[:2] == (0, 0)

    def is_located(self):
        """Whether there is no fault, or nothing that wasn't compared can be before the first one."""
        first = min((fault.order for fault in self.faults), default=(0,))
        return self.is_whole or first[0] <= 0 or all(self.looks_inside(label) for label in self.truth.outputs)

    def followed_by(self, other):
        """This `Check` without faults, or another one of the same model that has some, with the tensors of both."""
        found = other if other.faults else self
        found.compared = self.compared + other.compared
        return found

    def report(self):
        """The text of the verification."""
        compared = f"{self.compared:,} tensors on {self.mesh.size} ranks {self.mesh} compared with one card"
        if not self.faults:
            rounded = f" but {self.rounded:,} by rounding, see below" if self.rounded else ""
            return "\n".join([f"verified: {compared}, no difference{rounded}", *self._said()])
        first = min(self.faults, key=lambda fault: fault.order)
        others = [fault for fault in self.faults if fault is not first and fault.key == first.key]
        lines = fault_lines(first, others, self.mesh, self.roots.values())
        return "\n".join([f"a fault: {compared}", *lines, *self._said()])

    def _said(self):
        """The sentences below the report."""
        if self.rounded:
            yield (
                f"rounding: {self.rounded:,} tensors differ by more than the tolerance, but by no more than one card's "
                f"do when each result changes by {FACTOR:g} units of rounding"
            )
        if self.ties:
            what = "what follows a choice among equal numbers, where it isn't defined which one is taken"
            yield f"not verified: {what}: {min(self.ties)[1]}"
        yield from self.notes
        yield _OUTSIDE

    def compare(self, rank, what, at, layout, tensor):
        """Compare a tensor of an instruction with the one card's.

        Args:
            rank: the global rank.
            what: "value" or "gradient".
            at: `(stage, label of the pass)`, number of the call, the `Observed`, path of the Cell, file of its module.
            layout: of the tensor.
            tensor: the local tensor; None where no gradient came.
        """
        (stage, label), call, seen, path, file = at
        table = self.truth.values if what == "value" else self.truth.gradients
        value = table[stage, label].get((call, seen.value.id))
        if what == "gradient" and (value is None or tensor is None):
            return  # a Parameter's, or another name's of the same tensor; or none came
        if value is None:  # a weight that a Cell above passes on
            used = [n for n, use in enumerate(seen.plan.graph.parameters) if use.value.id == seen.value.id]
            if not used:
                return  # a tensor of another call that is handed on, and was compared there
            graph = next(each for each in self.truth.graphs[stage].calls() if each.call == call)
            value = self.truth.parameters[parameter_path(seen.plan, graph, used[0])].asnumpy()
        slack = self.allowances.get(id(value), 0.0)
        if what == "gradient":
            terms, value = gradient_terms(seen.layout), np.broadcast_to(value, seen.value.shape)
            value = value if terms == 1 else value / terms
        place = (0, label, stage) if what == "value" else (1, label, -stage)
        key = call, seen.value.id, layout
        at, order = (stage, label, seen, path, file), (*place, self.compared)
        self.hold(order, rank, what, at, layout, tensor, value, self.truth.largest(what, label), key, slack=slack)

    def hold(self, order, rank, what, at, layout, tensor, value, scale=0.0, key=None, limits=None, slack=None):
        """Compare a local tensor with the global value `value` in a layout; the arguments are those of `Fault`.

        Without a layout `value` is the expected local one. `scale` is the largest magnitude of the terms that were
        summed. `key` is the same on all ranks that hold terms of a tensor. `limits` are tolerance and rounding, as of
        `Precision`. Default: those of the verification.
        """
        stage, label, _, path, _ = at
        key, array = (what, stage, label, path, key), tensor.asnumpy()
        self.compared += 1
        if layout is not None and layout.partial:
            array = summed(self._waiting, key, layout, rank, array)
            if array is None:
                return
        expected = expected_part(value, layout, rank)
        tolerance, rounding = limits or (self.precision.tolerance, self.precision.rounding)
        if close(array, expected, tolerance, rounding * scale):
            return
        slack = self.allowances.get(id(value), 0.0) if slack is None else slack
        if slack and close(array, expected, tolerance, rounding * scale + slack):
            self.rounded += 1
        elif what == "value" and self._is_tie(at, key[-1][0], layout, rank, array, value):
            self.ties.append((order, f"{at[2].entry.node.operator}, {at[2].entry.node.source}"))
        elif not self.ties or order < min(self.ties)[0]:
            self._counts[rank] += 1
            if self._counts[rank] <= _KEPT:
                self.faults.append(Fault(order, rank, what, at, layout, key, array.copy(), expected, value))

    def _is_tie(self, at, call, layout, rank, array, value):
        """Whether a rank's indices point to the same numbers as one card's; see `is_tie`."""
        stage, label, seen, *_ = at
        table, whole = self.truth.values[stage, label], value.copy()
        if not isinstance(seen.entry, OperatorPlan) or array.shape != expected_part(whole, layout, rank).shape:
            return False
        whole[layout.local_slices(value.shape, rank)] = array
        inputs = (table.get((call, each.id)) for each, _ in seen.entry.consumed)
        return is_tie(value, whole, [each for each in inputs if each is not None and each.dtype.kind == "f"])
