"""The folders of a run's checkpoints: the newest complete one, and those to remove. Pure Python."""

import os
import re

from mindformers_core.checkpoint.index import CHECKSUMS, CONFIG, MODEL_INDEX
from mindformers_core.checkpoint.slices import FileLayer

INCOMPLETE, REPLACED = ".incomplete", ".replaced"  # ends of the names of folders that aren't, or are old, checkpoints
_STEP = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")


def step_folder(run_folder, step):
    """The folder of the checkpoint after a step."""
    return os.path.join(run_folder, "checkpoint", f"step_{step}")


def find_checkpoint(path):
    """The folder of a checkpoint at `path`: the folder itself, or the newest complete one of a run folder.

    Args:
        path: one of our folders, or of Hugging Face's, with `model.safetensors`; or a run folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if any(os.path.isfile(os.path.join(path, name)) for name in (CHECKSUMS, MODEL_INDEX, "model.safetensors")):
        return path
    below = os.path.join(path, "checkpoint")
    found = {}
    for name in os.listdir(below) if os.path.isdir(below) else ():
        match = _STEP.fullmatch(name)
        if match and os.path.isfile(os.path.join(below, name, CHECKSUMS)):
            found[int(match[1]), not match[2]] = name
    if not found:
        raise FileNotFoundError(
            f"'{path}' is neither a checkpoint (a folder with {CHECKSUMS}), nor a Hugging Face model ({CONFIG} and "
            f"model.safetensors), nor a run folder with complete checkpoints (checkpoint/step_N)"
        )
    return os.path.join(below, found[max(found)])


def prune(folder, keep_last, keep_every=0, files=None):
    """Remove old checkpoints beside the new one in `folder`, and what crashes left there. One rank calls this.

    A folder that is removed is renamed first, so that a part of it is never taken for a checkpoint.

    Args:
        folder: of the new checkpoint, `…/step_N`, which always stays.
        keep_last: number of checkpoints that stay, those of the highest steps; 0: all.
        keep_every: the checkpoints of each so many steps stay as well; 0: none.
        files: the `FileLayer`.
    """
    files, above = files or FileLayer(), os.path.dirname(folder) or "."
    matches = [_STEP.fullmatch(name) for name in os.listdir(above)]
    steps = sorted({int(match[1]) for match in matches if match and not match[2]}, reverse=True)
    last = steps[:keep_last] if keep_last else steps
    for match in filter(None, matches):
        step, path = int(match[1]), os.path.join(above, match[0])
        is_old = step in steps if match[2] else step not in last and not (keep_every and step % keep_every == 0)
        if is_old and os.path.abspath(path) != os.path.abspath(folder):
            files.remove(path + INCOMPLETE)
            files.rename(path, path + INCOMPLETE)
    for name in os.listdir(above):
        if name.startswith("step_") and name.endswith(INCOMPLETE):
            files.remove(os.path.join(above, name))
