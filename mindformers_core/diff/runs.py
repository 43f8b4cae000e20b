"""A recorded run: its files, and the digests of global tensors, assembled from those of the ranks' parts. Pure Python.

Of every rank there is `rank_3.json`: `about` the run, `facts` of the tensors, and `rows`, one for every `row` of a
`_ROW`: `[what, name, text of the layout, moved]`; and for each step `step_7.rank_3.npy`, an array of `_ROW`. The table
is written before the rows that refer to it, and each file whole, so a reader finds complete steps.
"""

import io
import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np

from mindformers_core.diff.digests import COLUMNS, PROJECTIONS
from mindformers_core.files import write_whole
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

# time in ns; rank; number of the row in its table; (key, number) of the pass; computed again in the backward pass
_ROW = np.dtype(
    [("time", "i8"), ("rank", "i4"), ("row", "i4"), ("label", "i4", 2), ("again", "?"), ("digest", "f8", COLUMNS)]
)
NO_PASS = -1, -1


def write_table(folder, rank, table):
    """Write the table of a rank."""
    write_whole(os.path.join(folder, f"rank_{rank}.json"), json.dumps(table, separators=(",", ":")))


def write_rows(folder, step, rank, rows):
    """Write the rows of a step, tuples with the fields of `_ROW`."""
    file = io.BytesIO()
    np.save(file, np.array(rows, _ROW))
    write_whole(os.path.join(folder, f"step_{step}.rank_{rank}.npy"), file.getvalue())


def row_files(folder, rank):
    """Number of a step -> path of the file with its rows, of one rank."""
    return {int(path.name[5:].partition(".")[0]): path for path in Path(folder).glob(f"step_*.rank_{rank}.npy")}


def _read(path, what, load):
    try:
        with open(path, "rb") as file:
            return load(file)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' has no {what} of recorded tensors: {error}") from error


def _read_table(folder, rank):
    path = os.path.join(folder, f"rank_{rank}.json")
    return _read(path, "table", lambda file: itemgetter("about", "facts", "rows")(json.load(file)))


def _read_rows(path):
    return _read(path, "rows", lambda file: np.load(file).astype(_ROW, casting="no"))


def layout_text(layout):
    """A `Layout`, or None, as text."""
    if layout is None:
        return None
    mesh = layout.mesh
    return json.dumps([mesh.shape, mesh.axis_names, list(mesh.rank_list), layout.dims, layout.partial, layout.varying])


@lru_cache(maxsize=1 << 12)
def _layout_of(text):
    shape, names, ranks, dims, partial, varying = json.loads(text)
    return Layout.on(DeviceMesh(shape, names, ranks), dims, partial, varying)


@dataclass(frozen=True, eq=False)
class Copy:
    """A whole tensor, as a rank and the ranks with its other parts hold it together."""

    layout: Layout | None  # None: whole on every rank
    moved: str | None  # text of the redistribution that made it
    again: bool  # whether the backward pass has computed it again
    terms: dict  # rank -> digest of its part, of all ranks with this layout of the tensor
    rank: int  # the first of those that hold this copy
    values: np.ndarray  # the copy's digest


def holders(layout, rank):
    """The ranks whose parts or terms make a whole tensor of a layout, or None, with those of a rank."""
    if layout is None:
        return (rank,)
    return layout.mesh.group(rank, (*chain(*layout.axes), *(axis for axis, _ in layout.partial)))


def assembled(layout, terms):
    """Rank -> digest of a whole tensor, for every set of ranks that hold all its terms, rank -> digest, together."""
    if layout is None:
        return dict(terms)
    divisor = layout.mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])
    found = {}
    for rank in sorted(terms):
        group = holders(layout, rank)
        if rank == min(group) and terms.keys() >= set(group):
            digests = np.array([terms[other] for other in group])
            found[rank] = digests.sum(0)
            found[rank][:PROJECTIONS] /= divisor
            found[rank][PROJECTIONS + 1] = digests[:, PROJECTIONS + 1].max()
    return found


class Run:
    """The run recorded in a folder, or its `digests`; reports call it `title`, or the folder.

    Attributes:
        steps: numbers of the steps that all ranks have recorded.
        about, facts: of the run, and of its tensors: name -> see `tensor_facts`.

    Raises:
        FileNotFoundError: nothing is recorded there. ValueError: a file that can't be read.
    """

    def __init__(self, folder, title=None):
        inner = os.path.join(folder, "digests")
        self.title, folder = title or str(folder), inner if os.path.isdir(inner) else folder
        if not row_files(folder, 0):
            raise FileNotFoundError(
                f"'{folder}' has no recorded steps: record a run with monitor.digests=true, or with record_digests()"
            )
        self.about = {"mesh": "ranks", "context": "recorded by record_digests()", "ranks": 1, "slope": 1.0}
        self.about |= _read_table(folder, 0)[0]
        ranks = range(self.about["ranks"])  # others are of an earlier run
        tables = [_read_table(folder, rank) for rank in ranks]
        self.facts = {name: each for _, facts, _ in tables for name, each in facts.items()}
        self._tables = [rows for _, _, rows in tables]
        self._files = [row_files(folder, rank) for rank in ranks]
        self.steps = sorted(set.intersection(*map(set, self._files)))

    def step(self, number):
        """`{(what, number of the pass or None, name): [Copy, …]}` of a step, in order of time.

        A tensor of which ranks lack parts has no copy.
        """
        rows = np.concatenate([_read_rows(files[number]) for files in self._files])
        rows = rows[np.argsort(rows["time"], kind="stable")]
        labels = sorted({tuple(label) for label in rows["label"].tolist()} - {NO_PASS}, key=lambda label: label[::-1])
        passes = {label: place for place, label in enumerate(labels)} | {NO_PASS: None}
        # passes of a pipeline begin with the gradient 1 / micro-batches, those of an accumulation with 1
        slopes = self.about["slope"] ** np.array([1] * PROJECTIONS + [2, 1, 0])
        found, seen = {}, Counter()
        columns = [rows[field].tolist() for field in ("rank", "row", "label", "again")]
        for rank, row, label, again, values in zip(*columns, rows["digest"]):
            what, name, layout, moved = self._tables[rank][row]
            key, turn = (what, passes[tuple(label)], name), (rank, row, *label, again)
            groups = found.setdefault(key, {})
            terms = groups.setdefault((layout, moved, again, seen[turn]), {})
            terms[rank] = values / slopes if what in ("gradient", "weight gradient") else values
            seen[turn] += 1
        return {key: _copies(key[0], groups) for key, groups in found.items()}


def _copies(what, groups):
    """The copies, the first made in front; terms of tied weights' gradients added."""
    found = []
    for (text, moved, again, _), terms in groups.items():
        layout = text and _layout_of(text)
        found.append([Copy(layout, moved, again, terms, *whole) for whole in assembled(layout, terms).items()])
    firsts = [copies[0] for copies in found if copies]
    if what == "weight gradient" and len(firsts) > 1:  # stages have one term each
        return [replace(firsts[0], values=sum(copy.values for copy in firsts))]
    return sorted(chain(*found), key=lambda copy: (copy.moved is not None, copy.again))
