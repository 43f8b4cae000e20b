"""The files of a recorded run: of every rank one JSON file, and one NumPy file for each step. Pure Python.

`rank_3.json` is a dict: `about` the run, `facts` of the named tensors (see `Listing`), `layouts` (see `layout_facts`),
and `rows`: for every number of a row `[what, name, number of the layout, moved]`, where `moved` is the text of the
redistribution that made the copy, or None. `step_7.rank_3.npz` has the rows of a step. Each file is written whole, the
table before the rows that refer to it, so a reader finds complete steps.
"""

import io
import json
import os
import re

import numpy as np

from mindformers_core.diff.digests import COLUMNS
from mindformers_core.files import write_whole

__all__ = ["forget_rank", "read_rows", "read_table", "recorded_ranks", "write_rows", "write_table"]

_STEP = re.compile(r"step_(\d+)\.rank_(\d+)\.npz")


def write_table(folder, rank, table):
    """Write the table of a rank."""
    write_whole(os.path.join(folder, f"rank_{rank}.json"), json.dumps(table, separators=(",", ":")))


def write_rows(folder, step, rank, numbers, digests, labels):
    """Write the rows of a step.

    Args:
        folder, step, rank: which.
        numbers: of each row its number in the table, the number of its pass (-1 for none), whether the backward pass
            has computed the tensor again, and the time in ns.
        digests: of each row, see `digest`.
        labels: of the passes, pairs of whole numbers that sort as the passes' data do.
    """
    file = io.BytesIO()
    numbers, labels = np.array(numbers, np.int64).reshape(-1, 4), np.array(labels, np.int64).reshape(-1, 2)
    np.savez(file, numbers=numbers, digests=np.array(digests).reshape(-1, COLUMNS), labels=labels)
    write_whole(os.path.join(folder, f"step_{step}.rank_{rank}.npz"), file.getvalue())


def recorded_ranks(folder):
    """`{step: [ranks]}` of a folder; empty where nothing is recorded."""
    found = {}
    for match in map(_STEP.fullmatch, os.listdir(folder) if os.path.isdir(folder) else ()):
        if match:
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return {step: sorted(found[step]) for step in sorted(found)}


def forget_rank(folder, rank):
    """Remove what an earlier run has recorded of a rank."""
    for step, ranks in recorded_ranks(folder).items():
        if rank in ranks:
            os.unlink(os.path.join(folder, f"step_{step}.rank_{rank}.npz"))


def read_table(folder, rank):
    """The table of a rank, a dict; ValueError where the file has none."""
    path = os.path.join(folder, f"rank_{rank}.json")
    try:
        with open(path, encoding="utf-8") as file:
            table = json.load(file)
        return {entry: table[entry] for entry in ("about", "facts", "layouts", "rows")}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"'{path}' has no table of recorded tensors: {error}") from error


def read_rows(folder, step, rank):
    """`(numbers, digests, labels)` of a step of a rank, arrays; ValueError where the file has none."""
    path = os.path.join(folder, f"step_{step}.rank_{rank}.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["numbers"], file["digests"], file["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"'{path}' has no rows of recorded tensors: {error}") from error
