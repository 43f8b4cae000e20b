"""The comparison of all ranks' values with those of one card, and the faults that it finds."""

from dataclasses import dataclass, field

import numpy as np

from mindformers_core.verification.comparison import TermSums, close, expected_part, gradient_terms
from mindformers_core.verification.report import fault_lines

__all__ = ["FLOAT32_KERNELS", "PRECISIONS", "Check", "Fault", "Precision"]

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
FLOAT32_KERNELS = frozenset({"LayerNorm", "LayerNormExt", "MaskedFill"})


@dataclass(frozen=True, eq=False)
class Fault:
    """A tensor of a rank that differs from one card's.

    Attributes:
        order: sort key: the earliest fault is the smallest.
        rank: the global rank.
        what: "value", "gradient", or what is compared after the passes: "reduced gradient", "norm", ….
        stage, label: of the pass; None after the passes.
        seen: the `Observed`, or None.
        path: of the Cell, or of the parameter.
        file: the generated module, or, of a reduced gradient, the bucket that reduces it.
        layout: the layout that the tensor should have.
        found, expected: arrays.
        value: the global array.
        key: the same for all ranks' faults of one tensor, together with the other attributes.
    """

    order: tuple
    rank: int
    what: str
    stage: int | None
    label: tuple | None
    seen: object
    path: str
    file: str | None
    layout: object
    found: np.ndarray
    expected: np.ndarray
    value: np.ndarray
    key: object

    @property
    def number(self):
        """Number of the tensor in its module."""
        return None if self.seen is None else self.seen.number

    def same_tensor(self, other):
        """Whether another fault is one of the same tensor, on this or another rank."""
        names = ("what", "stage", "label", "path", "key")
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(eq=False)
class Check:
    """What all ranks of one verification share.

    Attributes:
        mesh: of all ranks.
        plans: from `plans_of`.
        roots: as `plans`, the `CellPlan`s of what has run: under recompute() others.
        truth: the `OneCard`.
        precision: the `Precision` of all ranks and of the truth.
        notes: sentences about what isn't verified.
        faults: the `Fault`s.
        compared: number of tensors.
    """

    mesh: object
    plans: dict
    truth: object
    precision: Precision
    notes: tuple = ()
    faults: list = field(default_factory=list)
    compared: int = 0
    roots: dict = field(default_factory=dict)
    _sums: TermSums = field(default_factory=TermSums)
    _counts: dict = field(default_factory=dict)  # rank -> faults kept

    def report(self):
        """The text of the verification."""
        mesh = self.mesh
        compared = f"{self.compared:,} tensors on {mesh.size} ranks {mesh} compared with one card"
        if not self.faults:
            return "\n".join([f"verified: {compared}, no difference", *self.notes])
        first = min(self.faults, key=lambda fault: fault.order)
        others = [fault for fault in self.faults if fault is not first and first.same_tensor(fault)]
        return "\n".join(
            [
                f"a fault: {compared}",
                *fault_lines(first, others, mesh, self.roots.values()),
                *self.notes,
            ]
        )

    def compare(self, rank, what, at, layout, tensor):
        """Compare a tensor of an instruction with the one card's.

        Args:
            rank: the global rank.
            what: "value" or "gradient".
            at: `(stage, label of the pass)`, number of the call, the `Observed`, path of the Cell, file of its module.
            layout: of the tensor.
            tensor: the local tensor.
        """
        (stage, label), call, seen, path, file = at
        table = self.truth.values if what == "value" else self.truth.gradients
        value = table[stage, label].get(call, {}).get(seen.value.id)
        if value is None and what == "gradient":
            return  # a Parameter's, or another name's of the same tensor
        if value is None:  # a weight that a Cell above passes on
            (used,) = [use.path for use in seen.frame.graph.parameters if use.value.id == seen.value.id]
            value = self.truth.parameters[used].asnumpy()
        if what == "gradient":
            terms, value = gradient_terms(seen.layout), np.broadcast_to(value, seen.value.shape)
            value = value if terms == 1 else value / terms
        place = (0, label, stage) if what == "value" else (1, label, -stage)
        key = call, seen.value.id, layout
        at = stage, label, seen, path, file
        rounding = self.precision.rounding * self.truth.largest(what, label)
        self.hold((*place, self.compared), rank, what, at, layout, tensor, value, key, rounding=rounding)

    def hold(self, order, rank, what, at, layout, tensor, value, key=None, tolerance=None, rounding=0.0):
        """Compare a local tensor with the global value `value` in a layout; the arguments are those of `Fault`.

        Without a layout `value` is the expected local one. `key` is the same on all ranks that hold terms of a tensor.
        `tolerance` and `rounding` are those of `close`.
        """
        stage, label, seen, path, file = at
        array = tensor.asnumpy()
        self.compared += 1
        if layout is not None and layout.partial:
            array = self._sums.add((what, stage, label, path, key), layout, rank, array)
            if array is None:
                return
        expected = value if layout is None else expected_part(value, layout, rank)
        is_right = close(array, expected, tolerance or self.precision.tolerance, rounding)
        if not is_right and self._counts.get(rank, 0) < _KEPT:
            self._counts[rank] = self._counts.get(rank, 0) + 1
            self.faults.append(
                Fault(order, rank, what, stage, label, seen, path, file, layout, array, expected, value, key)
            )
