"""The folder of one run: who makes it, and what becomes of one that is already there."""

import os

from mindformers_core.files import write_whole

__all__ = ["open_run_folder"]


def open_run_folder(folder, config_text, keep):
    """Make `folder`, with `config_text` as its config.yaml. Called on rank 0 only.

    A finished or broken-off run that lies there is moved aside to `folder.1`, `folder.2`, …, never overwritten, unless
    `keep` says that this run carries it on.

    Returns:
        Where the earlier run was moved, or None.
    """
    moved = None
    if os.path.exists(os.path.join(folder, "config.yaml")) and not keep:
        moved = next(name for name in map(f"{folder}.{{}}".format, range(1, 10**6)) if not os.path.exists(name))
        os.rename(folder, moved)
    os.makedirs(folder, exist_ok=True)
    write_whole(os.path.join(folder, "config.yaml"), config_text)
    return moved
