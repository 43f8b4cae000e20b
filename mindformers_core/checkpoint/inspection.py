"""Reports about a checkpoint: its tensors as a table, its state, its checksums. Pure Python."""

import os

from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.hints import bytes_shown, columns


def inspect(path):
    """The text of a checkpoint's tensors, in the order of the files, and of its state.

    Args:
        path: as of `find_checkpoint`.

    Raises:
        FileNotFoundError: there is none. ValueError: a damaged header or list.
    """
    checkpoint = open_checkpoint(find_checkpoint(path))
    order = sorted((group, placed.file, placed.offset, name) for (group, name), placed in checkpoint.tensors.items())
    rows = [("tensor", "shape", "dtype", "bytes", "file")]
    for group, file, _, name in order:
        placed, file = checkpoint.tensors[group, name], os.path.relpath(file, checkpoint.folder)
        rows.append((name, str(placed.shape), placed.dtype, f"{placed.nbytes:,}", file))
    return "\n".join([*_head(checkpoint), "", *columns(rows)])


def _head(checkpoint):
    lines = [f"folder     {checkpoint.folder}"]
    for group in sorted({group for group, _ in checkpoint.tensors}):
        sizes = [placed.nbytes for (own, _), placed in checkpoint.tensors.items() if own == group]
        lines.append(f"{group:<10} {len(sizes)} tensors, {bytes_shown(sum(sizes))}")
    if checkpoint.state is None:
        return [*lines, "state      none: weights only"]
    known = {"format": "format", "step": "step", "consumed": "samples", "seed": "seed", "loss_scale": "loss scale"}
    found = {title: checkpoint.state.get(key) for key, title in known.items()}
    return [*lines, "state      " + ", ".join(f"{title} {each}" for title, each in found.items() if each is not None)]


def check(path):
    """Read all tensors of a checkpoint, and compare them with the checksums: the text of the result.

    Args:
        path: as of `find_checkpoint`.

    Raises:
        FileNotFoundError: there is none, or a file of it is missing. ValueError: the first tensor or file that isn't
            what was saved; or a folder of Hugging Face's, which has no checksums.
    """
    checkpoint = open_checkpoint(find_checkpoint(path))
    if not checkpoint.pieces:
        raise ValueError(f"{checkpoint.folder} has no checksums, since mindformers_core didn't save it")
    nbytes = check_checksums(checkpoint)
    count = sum(map(len, checkpoint.pieces.values()))
    return (
        f"{checkpoint.folder} is what was saved: {len(checkpoint.tensors)} tensors, {bytes_shown(nbytes)}, {count} "
        "checksums"
    )
