"""The files of a recorded run: for every rank one JSON file, and one NumPy file for each step. Pure Python.

`rank_3.json` says what is recorded: facts about the run, the named tensors, their layouts, and for every number of a
row what it is. `step_7.rank_3.npz` has the rows of a step. Each file is written whole, the table before the rows that
refer to it, so a reader finds complete steps.
"""

import io
import json
import os
import re
from dataclasses import dataclass, field

import numpy as np

from mindformers_core.diff.digests import COLUMNS
from mindformers_core.files import write_whole

__all__ = ["RankTable", "Rows", "read_rank", "read_rows", "recorded_ranks", "write_rows"]

_STEP = re.compile(r"step_(\d+)\.rank_(\d+)\.npz")


@dataclass
class RankTable:
    """What the rows of a rank are about.

    Attributes:
        about: facts about the run, plain data.
        facts: name of a tensor -> dict, see `Listing`.
        layouts: see `layout_facts`.
        rows: for every number of a row a dict: `what` ("value", "gradient", …), `name`, `layout` (its number), `moved`
            (text of the redistribution that made this copy, or None).
    """

    about: dict
    facts: dict = field(default_factory=dict)
    layouts: list = field(default_factory=list)
    rows: list = field(default_factory=list)

    def write(self, folder, rank):
        """Write the table of a rank."""
        text = json.dumps(vars(self), separators=(",", ":"))
        write_whole(os.path.join(folder, f"rank_{rank}.json"), text)


@dataclass
class Rows:
    """The rows of a step on a rank, which come one by one.

    Attributes:
        numbers: of each row its number in the table, the number of its pass (see `labels`; -1 for none), whether the
            backward pass has computed the tensor again, and the time in ns.
        digests: see `digest`.
        labels: of the passes, pairs of whole numbers that sort as the passes' data do.
    """

    numbers: list = field(default_factory=list)
    digests: list = field(default_factory=list)
    labels: dict = field(default_factory=dict)

    def add(self, number, label, again, time, values):
        """Add a row."""
        place = -1 if label is None else self.labels.setdefault(label, len(self.labels))
        self.numbers.append((number, place, again, time))
        self.digests.append(values)


def write_rows(folder, step, rank, rows):
    """Write the rows of a step."""
    file = io.BytesIO()
    np.savez(
        file,
        numbers=np.array(rows.numbers, np.int64).reshape(-1, 4),
        digests=np.array(rows.digests).reshape(-1, COLUMNS),
        labels=np.array(list(rows.labels), np.int64).reshape(-1, 2),
    )
    write_whole(os.path.join(folder, f"step_{step}.rank_{rank}.npz"), file.getvalue())


def recorded_ranks(folder):
    """`{step: [ranks]}` of a folder; empty where nothing is recorded."""
    found = {}
    for entry in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        match = _STEP.fullmatch(entry)
        if match:
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return {step: sorted(found[step]) for step in sorted(found)}


def read_rank(folder, rank):
    """The `RankTable` of a rank.

    Raises:
        ValueError: the file has no table.
    """
    path = os.path.join(folder, f"rank_{rank}.json")
    try:
        with open(path, encoding="utf-8") as file:
            return RankTable(**json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"'{path}' has no table of recorded tensors: {error}") from error


def read_rows(folder, step, rank):
    """`(numbers, digests, labels)` of a step of a rank, arrays.

    Raises:
        ValueError: the file has no rows.
    """
    path = os.path.join(folder, f"step_{step}.rank_{rank}.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["numbers"], file["digests"], file["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"'{path}' has no rows of recorded tensors: {error}") from error
