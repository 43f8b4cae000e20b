"""Saving the state of a run, and resuming from it on the same mesh.

`run/checkpoint/step_N/` has `state.json`, and for each rank a `rank_R.safetensors` with its shards of parameters and
optimizer state. The folder is renamed to this name after all ranks have written, so a folder `step_N` is complete.
"""

import json
import os
import re
import shutil

import mindspore as ms

from mindformers_core.hints import nearest

__all__ = ["save_state", "load_state", "find_checkpoint"]


def save_state(run_folder, state, tensors, rank, barrier):
    """Write one checkpoint; all ranks call this, with a common file system. Returns the folder.

    Args:
        run_folder: the run's folder.
        state: JSON-able dict with `step`, equal on all ranks.
        tensors: the Parameters of this rank.
        rank: this process's rank.
        barrier: a function that waits for all ranks.
    """
    target = os.path.join(run_folder, "checkpoint", f"step_{state['step']}")
    unfinished = os.path.join(run_folder, "checkpoint", f"unfinished_step_{state['step']}")
    os.makedirs(unfinished, exist_ok=True)
    entries = [{"name": tensor.name, "data": tensor} for tensor in tensors]
    ms.save_checkpoint(entries, _rank_file(unfinished, rank), format="safetensors")
    barrier()
    if rank == 0:
        if os.path.exists(target):  # of an earlier attempt, from which this run resumed before that step
            shutil.rmtree(target)
        with open(os.path.join(unfinished, "state.json"), "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
        os.replace(unfinished, target)
    barrier()
    return target


def find_checkpoint(path):
    """The checkpoint folder at `checkpoint.load_path`: the folder itself, or the newest one of a run folder.

    Raises:
        FileNotFoundError: there is none.
    """
    if os.path.exists(os.path.join(path, "state.json")):
        return path
    below = os.path.join(path, "checkpoint")
    names = os.listdir(below) if os.path.isdir(below) else []
    steps = [int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name)]
    if not steps:
        raise FileNotFoundError(
            f"checkpoint.load_path: '{path}' is neither a checkpoint (a folder with state.json) nor a run folder with "
            f"finished checkpoints (checkpoint/step_N)"
        )
    return os.path.join(below, f"step_{max(steps)}")


def load_state(folder, expected, tensors, rank):
    """Fill `tensors` from the checkpoint in `folder`, and return its state.

    Args:
        folder: from `find_checkpoint`.
        expected: dict of required entries of the saved state, as `{"mesh": {"dp": 2}, …}`.
        tensors: the Parameters of this rank, which are filled in place.
        rank: this process's rank.

    Raises:
        ValueError: saved on another mesh, with another model, or in another sharding.
        FileNotFoundError: a rank's file is missing.
    """
    with open(os.path.join(folder, "state.json"), encoding="utf-8") as file:
        state = json.load(file)
    for key, value in json.loads(json.dumps(expected)).items():
        if state.get(key) != value:
            raise ValueError(
                f"checkpoint.load_path: {folder} was saved with {key} {state.get(key)}, but this run has {value}: a "
                f"checkpoint can only be resumed with the same {key} yet"
            )
    path = _rank_file(folder, rank)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"checkpoint.load_path: {folder} has no file {os.path.basename(path)} for rank {rank}")
    saved = ms.load_checkpoint(path, format="safetensors")
    for tensor in tensors:
        if tensor.name not in saved:
            raise ValueError(f"checkpoint.load_path: {path} has no tensor '{tensor.name}'{nearest(tensor.name, saved)}")
        found = saved[tensor.name]
        if tuple(found.shape) != tuple(tensor.shape):
            raise ValueError(
                f"checkpoint.load_path: {path}: '{tensor.name}' has shape {found.shape}, not {tensor.shape}"
            )
        tensor.set_data(ms.Tensor(found.asnumpy(), tensor.dtype))
    return state


def _rank_file(folder, rank):
    return os.path.join(folder, f"rank_{rank}.safetensors")
