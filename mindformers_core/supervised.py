"""What processes tell the supervisor of their launch, scripts/supervisor.py, in a folder of its. Pure Python."""

import json
import os
import sys
from socket import gethostname

import numpy as np

from mindformers_core.files import write_whole

FOLDER = "MINDFORMERS_SUPERVISOR"  # an environment variable
MEMORY = "MINDFORMERS_MEMORY"  # another one: a folder in memory that it holds
USER, DEFECT = 2, 70  # exit codes: of the user's mistake, of a defect of this package (EX_SOFTWARE of sysexits.h)
FOR_OTHERS = 75  # of a rank that ends since others failed or wait, or as a signal asks; EX_TEMPFAIL


def tell_end(text, code):
    """Tell the error that ends this process, a line, and its exit code; no effect without a supervisor."""
    if folder := os.environ.get(FOLDER):
        try:
            facts = {"error": " ".join(text.split()), "code": code}
            write_whole(os.path.join(folder, f"end.{_process()}"), json.dumps(facts))
        except OSError as error:
            print(f"warning: the supervisor's folder {folder}: {error}", file=sys.stderr)


def step_counter():
    """Numbers that the supervisor can read also when this process is killed, an array: of the step that runs; how many
    steps this process has done; 1 once the job has its run folder, 2 where it also saves.
    """
    folder = os.environ.get(FOLDER)
    if not folder or not os.path.isdir(folder):
        return np.zeros(3, np.int64)
    return np.memmap(os.path.join(folder, f"steps.{_process()}"), np.int64, "w+", shape=(3,))


def _process():
    """The name of this process among those of all machines, which may share the folder."""
    return f"{gethostname()}.{os.getpid()}"
