"""Memory that outlives the processes of a job: a folder of /dev/shm, which this process holds until it ends."""

import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from mindformers_core.files import lock_folder

ROOT, PREFIX = Path("/dev/shm"), "mindformers."


@contextmanager
def held_memory(root=ROOT):
    """The path of a new folder, which is removed at the end of the block; None where there is no such memory.

    Those of processes that were killed, which hold no lock any more, are removed, too.
    """
    if not root.is_dir():
        yield None
        return
    for left in root.glob(f"{PREFIX}*"):
        with suppress(OSError), lock_folder(left):
            shutil.rmtree(left)
    made = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root)
    with lock_folder(made):  # before it has the name that others look for
        folder = os.path.join(root, os.path.basename(made).removeprefix("."))
        os.rename(made, folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
