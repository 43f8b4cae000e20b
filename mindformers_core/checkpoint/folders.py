"""The folders of a run's checkpoints: the newest complete one, and those to remove. Pure Python."""

import os
import re

from mindformers_core.checkpoint.index import ADAPTERS, CHECKSUMS, CONFIG, MODEL_INDEX
from mindformers_core.checkpoint.slices import FileLayer
from mindformers_core.scopes import errors_at

INCOMPLETE, REPLACED = ".incomplete", ".replaced"  # ends of the names of folders that aren't, or are old, checkpoints
_STEP = re.compile(rf"step_(\d+)({re.escape(REPLACED)})?")


def step_folder(run_folder, step):
    """The folder of the checkpoint after a step."""
    return os.path.join(run_folder, "checkpoint", f"step_{step}")


def step_of(folder):
    """The number of the step of a `step_folder`."""
    return int(_STEP.fullmatch(os.path.basename(folder))[1])


def find_checkpoint(path):
    """The folder of a checkpoint at `path`: the folder itself, or the newest complete one of a run folder.

    Args:
        path: one of our folders, or of Hugging Face's, with `model.safetensors` or adapters; or a run folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if any(
        os.path.isfile(os.path.join(path, name)) for name in (CHECKSUMS, MODEL_INDEX, "model.safetensors", ADAPTERS)
    ):
        return path
    found = newest_checkpoint(path)
    if found is None:
        raise FileNotFoundError(
            f"'{path}' is neither a checkpoint (a folder with {CHECKSUMS}), nor a Hugging Face model ({CONFIG} and "
            f"model.safetensors), nor a run folder with complete checkpoints (checkpoint/step_N)"
        )
    return found


def newest_checkpoint(run_folder):
    """The folder of the newest complete checkpoint of a run folder, or None."""
    below, found = os.path.join(run_folder, "checkpoint"), {}
    for name in os.listdir(below) if os.path.isdir(below) else ():
        match = _STEP.fullmatch(name)
        if match and os.path.isfile(os.path.join(below, name, CHECKSUMS)):
            found[int(match[1]), not match[2]] = name
    return os.path.join(below, found[max(found)]) if found else None


def set_aside(run_folder, step):
    """Rename the checkpoints of a run after a step, from which it is taken up again: a list of the new names.

    Otherwise the highest step would be of the steps that are given up, and `prune` would keep those.
    """
    above, found = os.path.join(run_folder, "checkpoint"), []
    for name in sorted(os.listdir(above)) if os.path.isdir(above) else ():
        match = _STEP.fullmatch(name)
        if match and int(match[1]) > step:
            free = (f"{name}.given_up.{number}" for number in range(1, 10**6))
            found.append(next(each for each in free if not os.path.exists(os.path.join(above, each))))
            os.rename(os.path.join(above, name), os.path.join(above, found[-1]))
    return found


def prune(folder, keep_last, keep_every=0, files=None):
    """Remove old checkpoints beside the new one in `folder`, and what crashes left there. One rank calls this.

    Args:
        folder: of the new checkpoint, `…/step_N`, which always stays.
        keep_last: number of checkpoints that stay, those of the highest steps; 0: all.
        keep_every: the checkpoints of each so many steps stay as well; 0: none.
        files: the `FileLayer`.

    Raises:
        OSError: a folder can't be removed.
    """
    files, above = files or FileLayer(), os.path.dirname(folder) or "."
    with errors_at(f"the checkpoint {folder} is saved, but older ones can't be removed: ", kinds=(OSError,)):
        tidy(folder, files)
        steps = sorted((int(match[1]) for match in map(_STEP.fullmatch, os.listdir(above)) if match), reverse=True)
        for step in steps[keep_last:] if keep_last else ():
            path = os.path.join(above, f"step_{step}")
            if not (keep_every and step % keep_every == 0) and os.path.abspath(path) != os.path.abspath(folder):
                discard(path, files)


def tidy(folder, files):
    """Remove what crashed saves left beside a checkpoint; a replaced folder that has no successor gets its name back.

    Args:
        folder: of the checkpoint, which needn't exist; where it is a `step_N`, all those of the run are tidied.
        files: the `FileLayer`.
    """
    above, base = os.path.split(folder)
    for name in sorted(os.listdir(above or ".")):
        path, stem = os.path.join(above, name), name.removesuffix(INCOMPLETE).removesuffix(REPLACED)
        if stem == name or not (stem == base or _STEP.fullmatch(stem) and _STEP.fullmatch(base)):
            continue
        if name.endswith(INCOMPLETE):
            files.remove(path)
        elif os.path.isdir(os.path.join(above, stem)):
            discard(path, files)
        else:
            files.rename(path, os.path.join(above, stem))


def discard(path, files):
    """Remove a folder; it is renamed first, so that a part of it is never taken for a checkpoint."""
    files.remove(path + INCOMPLETE)
    files.rename(path, path + INCOMPLETE)
    files.remove(path + INCOMPLETE)
