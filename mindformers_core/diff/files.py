"""The files of a recorded run: of every rank one JSON file, and one NumPy file for each step. Pure Python.

`rank_3.json` is a dict: `about` the run, `facts` of the named tensors (see `Listing`), and `rows`: for every number of
a row `[what, name, text of the layout, moved]`, where `moved` is the text of the redistribution that made the copy, or
None. `step_7.rank_3.npy` has the rows of a step, of dtype `_ROW`. Each file is written whole, the table before the rows
that refer to it, so a reader finds complete steps.
"""

import io
import json
import os
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np

from mindformers_core.diff.digests import COLUMNS
from mindformers_core.files import write_whole
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

__all__ = [
    "NO_PASS", "layout_of", "layout_text", "read_rows", "read_table", "recorded_steps", "rows_path", "write_rows",
    "write_table",
]  # fmt: skip

# time in ns; rank; number of the row in its table; (key, number) of the pass; computed again in the backward pass
_ROW = np.dtype(
    [("time", "i8"), ("rank", "i4"), ("row", "i4"), ("label", "i4", 2), ("again", "?"), ("digest", "f8", COLUMNS)]
)
NO_PASS = -1, -1


def write_table(folder, rank, table):
    """Write the table of a rank."""
    write_whole(os.path.join(folder, f"rank_{rank}.json"), json.dumps(table, separators=(",", ":")))


def rows_path(folder, step, rank):
    """The file with the rows of a step of a rank."""
    return os.path.join(folder, f"step_{step}.rank_{rank}.npy")


def write_rows(folder, step, rank, rows):
    """Write the rows of a step, tuples with the fields of `_ROW`."""
    file = io.BytesIO()
    np.save(file, np.array(rows, _ROW))
    write_whole(rows_path(folder, step, rank), file.getvalue())


def recorded_steps(folder, rank):
    """The numbers of the steps that a rank has recorded, a set."""
    return {int(path.name[5:].partition(".")[0]) for path in Path(folder).glob(f"step_*.rank_{rank}.npy")}


def read_table(folder, rank):
    """The table of a rank, a dict; ValueError where the file has none."""
    with _reading(os.path.join(folder, f"rank_{rank}.json"), "table") as file:
        table = json.load(file)
        return {entry: table[entry] for entry in ("about", "facts", "rows")}


def read_rows(folder, step, rank):
    """The rows of a step of a rank, an array; ValueError where the file has none."""
    with _reading(rows_path(folder, step, rank), "rows") as file:
        return np.load(file, allow_pickle=False).astype(_ROW, casting="no")


@contextmanager
def _reading(path, what):
    """The open file."""
    try:
        with open(path, "rb") as file:
            yield file
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' has no {what} of recorded tensors: {error}") from error


def layout_text(layout):
    """A `Layout`, or None, as text."""
    if layout is None:
        return None
    mesh = layout.mesh
    return json.dumps([mesh.shape, mesh.axis_names, list(mesh.rank_list), layout.dims, layout.partial, layout.varying])


@lru_cache(maxsize=1 << 12)
def layout_of(text):
    """The `Layout`, or None, of a text."""
    if text is None:
        return None
    shape, names, ranks, dims, partial, varying = json.loads(text)
    return Layout.on(DeviceMesh(shape, names, ranks), dims, partial, varying)
