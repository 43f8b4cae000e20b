"""The comparison of all ranks' values with those of one card, and the faults that it finds."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mindformers_core.program.plan import OperatorPlan
from mindformers_core.verification.comparison import TermSums, close, expected_part, gradient_terms, is_tie
from mindformers_core.verification.report import fault_lines
from mindformers_core.verification.rounding import FACTOR, allowed

_KEPT = 16  # faults of a rank; the first one counts


@dataclass(frozen=True)
class Precision:
    """The floating dtype of a verification.

    Attributes:
        dtype: name of the dtype of all floating tensors, whatever their dtypes in the model.
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
        perturbed: a `OneCard` whose numbers were changed by units of rounding; None: no rounding is allowed for.
        is_whole: whether the tensors inside of programs are compared in every pass, not in the first ones only.
        notes: sentences about what isn't verified.
        faults: the `Fault`s.
        compared: number of tensors.
        rounded: number of those that differ by no more than rounding may, as `perturbed` says.
        ties: `(order, place)` of the choices among equal numbers that were made otherwise.
        sources: key -> `ModuleSource`, see `Observer.generated`.
    """

    mesh: object
    plans: dict
    truth: object
    precision: Precision
    notes: tuple = ()
    is_whole: bool = False
    perturbed: object = None
    faults: list = field(default_factory=list)
    compared: int = 0
    rounded: int = 0
    ties: list = field(default_factory=list)
    roots: dict = field(default_factory=dict)
    sources: dict = field(default_factory=dict)
    _sums: TermSums = field(default_factory=TermSums)
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
            yield (
                "not verified: what follows a choice among equal numbers, where it isn't defined which one is taken: "
                + min(self.ties)[1]
            )
        yield from self.notes

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
        name, place = "values" if what == "value" else "gradients", (call, seen.value.id)
        terms = gradient_terms(seen.layout) if what == "gradient" else 1
        is_known = place in getattr(self.truth, name)[stage, label]
        used = [use.path for use in seen.frame.graph.parameters if use.value.id == seen.value.id]
        if tensor is None or not is_known and (what == "gradient" or not used):
            # no gradient came, or a Parameter's, or another name's of the same tensor; a tensor of another call
            # that is handed on, and was compared there
            return

        def value(card):
            if not is_known:  # a weight that a Cell above passes on
                return card.parameters[used[0]].asnumpy()
            array = getattr(card, name)[stage, label][place]
            array = array if what == "value" else np.broadcast_to(array, seen.value.shape)
            return array if terms == 1 else array / terms

        key = call, seen.value.id, layout
        at, order = (stage, label, seen, path, file), (0, label, stage) if what == "value" else (1, label, -stage)
        order = (*order, self.compared)
        scale = self.truth.largest(what, label)
        self.hold(order, rank, what, at, layout, tensor, value, scale, key, call=call)

    def hold(self, order, rank, what, at, layout, tensor, value, scale=0.0, key=None, limits=None, call=None):
        """Compare a local tensor with a global one in a layout; the arguments are those of `Fault`.

        `value` is the function of a `OneCard` that returns the global array, or, without a layout, the expected local
        one. `scale` is the largest magnitude of the terms that were
        summed. `key` is the same on all ranks that hold terms of a tensor. `limits` are tolerance and rounding, as of
        `Precision`. Default: those of the verification.
        """
        stage, label, _, path, _ = at
        key, array = (what, stage, label, path, key), tensor.asnumpy()
        self.compared += 1
        if layout is not None and layout.partial:
            array = self._sums.add(key, layout, rank, array)
            if array is None:
                return
        value, pick = value(self.truth), value
        expected = value if layout is None else expected_part(value, layout, rank)
        tolerance, rounding = limits or (self.precision.tolerance, self.precision.rounding)
        rounding *= scale
        if close(array, expected, tolerance, rounding):
            return
        if self.perturbed and close(array, expected, tolerance, rounding + allowed(value, pick(self.perturbed))):
            self.rounded += 1
        elif call is not None and self._is_tie(at, call, layout, rank, array, value):
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
