"""A recorded run: the digests of global tensors, assembled from those of the ranks' parts. Pure Python."""

from dataclasses import dataclass, field

import numpy as np

from mindformers_core.diff.digests import PROJECTIONS
from mindformers_core.diff.files import read_rows, read_table, recorded_ranks
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

__all__ = ["Copy", "Run", "assembled"]


@dataclass(eq=False)
class Copy:
    """A copy of a tensor in one layout.

    Attributes:
        layout: the `Layout`; None for a whole tensor on every rank.
        moved: text of the redistribution that made it, or None.
        again: whether the backward pass has computed it again.
        time: of the first rank, in ns.
        terms: rank -> digest of its part.
        wholes: rank -> digest of the whole tensor, as it and the ranks with its other parts hold it together.
    """

    layout: object
    moved: str | None
    again: bool
    time: int
    terms: dict = field(default_factory=dict)
    wholes: dict = field(default_factory=dict)


def assembled(layout, terms):
    """Digests of a whole tensor, one for every set of ranks that hold it together; sets without all terms are left out.

    Args:
        layout: the `Layout`, or None.
        terms: rank -> digest.
    """
    if layout is None:
        return dict(terms)
    axes = [axis for axes in layout.dims for axis in axes] + [axis for axis, _ in layout.partial]
    divisor = layout.mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])
    found, done = {}, set()
    for rank in sorted(terms):
        group = layout.mesh.group(rank, tuple(axes))
        if rank in done or not all(other in terms for other in group):
            continue
        done.update(group)
        digests = np.array([terms[other] for other in group])
        whole = digests.sum(0)
        whole[PROJECTIONS + 1] = digests[:, PROJECTIONS + 1].max()
        whole[:PROJECTIONS] /= divisor
        found[rank] = whole
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
        self.folder, self.title, self._ranks = folder, title or str(folder), recorded_ranks(folder)
        if not self._ranks:
            raise FileNotFoundError(
                f"'{folder}' has no recorded steps: record a run with monitor.digests=true, or with record_digests()"
            )
        self._tables = {0: read_table(folder, 0)}
        everyone = list(range(self._tables[0]["about"].get("ranks", 1)))  # others are of an earlier run
        self._tables |= {rank: read_table(folder, rank) for rank in everyone[1:]}
        self.steps = [step for step, ranks in self._ranks.items() if set(everyone) <= set(ranks)]
        self.about = self._tables[0]["about"]
        # passes of a pipeline begin with the gradient 1 / micro-batches, those of an accumulation with 1
        slope = self.about.get("slope", 1.0)
        self._slope = np.array([slope] * PROJECTIONS + [slope**2, slope, 1.0])
        self.facts = {name: each for table in self._tables.values() for name, each in table["facts"].items()}
        self._layouts = {rank: [_layout(entry) for entry in table["layouts"]] for rank, table in self._tables.items()}

    def step(self, number):
        """`{(what, pass, name): [Copy, …]}` of a step in order of time; the first copy is the one first made.

        The number of a pass, from 0, counts the labels of a step; None outside of the passes.
        """
        rows = {rank: read_rows(self.folder, number, rank) for rank in self._tables}
        labels = sorted({tuple(label) for _, _, found in rows.values() for label in found.tolist()})
        passes = {label: place for place, label in enumerate(labels)}
        found = {}
        for rank, (numbers, digests, own) in rows.items():
            table, seen = self._tables[rank]["rows"], {}
            own = [passes[tuple(label)] for label in own.tolist()] + [None]
            for (row, place, again, time), values in zip(numbers.tolist(), digests):
                what, name, layout, moved = table[row]
                key, layout = (what, own[place], name), self._layouts[rank][layout]
                seen[row, place, again] = ordinal = seen.get((row, place, again), -1) + 1
                copies, which = found.setdefault(key, {}), (layout, moved, again, ordinal)
                copy = copies.get(which)
                if copy is None:
                    copy = copies[which] = Copy(layout, moved, bool(again), time)
                if key[0] in ("gradient", "weight gradient"):
                    values = values / self._slope
                copy.terms[rank], copy.time = values, min(time, copy.time)
        return _in_order({key: _wholes(key[0], list(copies.values())) for key, copies in found.items()})


def _wholes(what, copies):
    """The copies with their whole digests, the first made in front; terms of tied weights' gradients added."""
    for copy in copies:
        copy.wholes = assembled(copy.layout, copy.terms)
    copies = [copy for copy in copies if copy.wholes]
    copies.sort(key=lambda copy: (copy.moved is not None, copy.again, copy.time))
    if what == "weight gradient" and len(copies) > 1:  # stages have one term each
        firsts = [next(iter(copy.wholes.values())) for copy in copies]
        copies[0].wholes = {min(copies[0].wholes): np.sum(firsts, 0)}
        return copies[:1]
    return copies


def _in_order(found):
    made = {key: copies for key, copies in found.items() if copies}
    return dict(sorted(made.items(), key=lambda entry: entry[1][0].time))


def _layout(entry):
    if entry is None:
        return None
    (shape, names, ranks), dims, partial, varying = entry
    return Layout.on(DeviceMesh(shape, names, ranks), dims, [tuple(pair) for pair in partial], varying)
