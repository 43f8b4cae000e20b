"""What processes tell the supervisor of their launch, scripts/supervisor.py, in a folder of its. Pure Python."""

import json
import os
import sys

import numpy as np

from mindformers_core.files import write_whole

FOLDER = "MINDFORMERS_SUPERVISOR"  # an environment variable
MEMORY = "MINDFORMERS_MEMORY"  # another one: a folder in memory that it holds
FOR_OTHERS = 75  # exit code of a rank that ends since others failed or wait, or as a signal asks; EX_TEMPFAIL


def tell(name, facts):
    """Write a dict that JSON can hold into the supervisor's folder; no effect without one.

    Args:
        name: of the file `name.json`: `run`, what the job does; `end.<process>`, what a process ends by.
    """
    if folder := os.environ.get(FOLDER):
        try:
            write_whole(os.path.join(folder, f"{name}.json"), json.dumps(facts))
        except OSError as error:
            print(f"warning: the supervisor's folder {folder}: {error}", file=sys.stderr)


def tell_end(text, code):
    """Tell the error that ends this process, a line, and its exit code."""
    tell(f"end.{os.getpid()}", {"error": " ".join(text.split()), "code": code})


def step_counter():
    """Two numbers that the supervisor can read also when this process is killed, an array: the number of the step that
    runs, and how many steps this process has done.
    """
    folder = os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return np.zeros(2, np.int64)
    return np.memmap(os.path.join(folder, f"steps.{os.getpid()}"), np.int64, "w+", shape=(2,))
