"""A recorded run: the digests of global tensors, assembled from those of the ranks' parts. Pure Python."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from mindformers_core.diff.digests import PROJECTIONS
from mindformers_core.diff.files import NO_PASS, layout_of, read_rows, read_table, recorded_steps
from mindformers_core.layout import Layout

__all__ = ["Copy", "Run", "assembled"]


@dataclass(frozen=True, eq=False)
class Copy:
    """A whole tensor, as a rank and the ranks with its other parts hold it together.

    Attributes:
        layout: the `Layout`; None for a whole tensor on every rank.
        moved: text of the redistribution that made it, or None.
        again: whether the backward pass has computed it again.
        terms: rank -> digest of its part, of all ranks with this layout of the tensor.
        rank: the first one of those that hold this copy.
        values: its digest.
    """

    layout: Layout | None
    moved: str | None
    again: bool
    terms: dict
    rank: int
    values: np.ndarray


def assembled(layout, terms):
    """Digests of a whole tensor, one for every set of ranks that hold it together; sets without all terms are left out.

    Args:
        layout: the `Layout`, or None.
        terms: rank -> digest.
    """
    if layout is None:
        return dict(terms)
    axes = [*chain(*layout.dims), *(axis for axis, _ in layout.partial)]
    divisor = layout.mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])
    found = {}
    for rank in sorted(terms):
        group = layout.mesh.group(rank, tuple(axes))
        if rank == min(group) and all(other in terms for other in group):
            digests = np.array([terms[other] for other in group])
            found[rank] = digests.sum(0)
            found[rank][:PROJECTIONS] /= divisor
            found[rank][PROJECTIONS + 1] = digests[:, PROJECTIONS + 1].max()
    return found


class Run:
    """A recorded run.

    Args:
        folder: of `record_digests`.
        title: what reports call it; default: the folder.

    Attributes:
        steps: numbers of the steps that all ranks have recorded.
        about: facts about the run.
        facts: name of a tensor -> dict, see `Listing`.

    Raises:
        FileNotFoundError: nothing is recorded there. ValueError: a file that can't be read.
    """

    def __init__(self, folder, title=None):
        self.folder, self.title = folder, title or str(folder)
        if not recorded_steps(folder, 0):
            raise FileNotFoundError(
                f"'{folder}' has no recorded steps: record a run with monitor.digests=true, or with record_digests()"
            )
        tables = [read_table(folder, 0)]
        self.about = tables[0]["about"]
        self._ranks = range(self.about.get("ranks", 1))  # others are of an earlier run
        tables += [read_table(folder, rank) for rank in self._ranks[1:]]
        self._table = [table["rows"] for table in tables]
        self.facts = {name: each for table in tables for name, each in table["facts"].items()}
        self.steps = sorted(set.intersection(*(recorded_steps(folder, rank) for rank in self._ranks)))

    def step(self, number):
        """`{(what, pass, name): [Copy, …]}` of a step in order of time; the first copy is the one first made.

        The number of a pass, from 0, counts the labels of a step; None outside of the passes.
        """
        rows = np.concatenate([read_rows(self.folder, number, rank) for rank in self._ranks])
        rows = rows[np.argsort(rows["time"], kind="stable")]
        labels = sorted({tuple(label) for label in rows["label"].tolist()} - {NO_PASS}, key=lambda label: label[::-1])
        passes = {label: place for place, label in enumerate(labels)} | {NO_PASS: None}
        # passes of a pipeline begin with the gradient 1 / micro-batches, those of an accumulation with 1
        slope = self.about.get("slope", 1.0)
        slopes = np.array([slope] * PROJECTIONS + [slope**2, slope, 1.0])
        found, seen = {}, Counter()
        columns = [rows[field].tolist() for field in ("rank", "row", "label", "again")]
        for rank, row, label, again, values in zip(*columns, rows["digest"]):
            what, name, layout, moved = self._table[rank][row]
            key, turn = (what, passes[tuple(label)], name), (rank, row, *label, again)
            groups = found.setdefault(key, {})
            terms = groups.setdefault((layout, moved, again, seen[turn]), {})
            terms[rank] = values / slopes if what in ("gradient", "weight gradient") else values
            seen[turn] += 1
        found = {key: _copies(key[0], groups) for key, groups in found.items()}
        return {key: copies for key, copies in found.items() if copies}


def _copies(what, groups):
    """The copies, the first made in front; terms of tied weights' gradients added."""
    found = []
    for (text, moved, again, _), terms in groups.items():
        layout = layout_of(text)
        wholes = assembled(layout, terms).items()
        found += [[Copy(layout, moved, again, terms, rank, values) for rank, values in wholes]] if wholes else []
    if what == "weight gradient" and len(found) > 1:  # stages have one term each
        return [replace(found[0][0], values=sum(copies[0].values for copies in found))]
    return sorted(chain(*found), key=lambda copy: (copy.moved is not None, copy.again))
