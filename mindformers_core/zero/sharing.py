"""`share_parts()`: one part for several Cells on a rank that hold the same parameter."""

from dataclasses import replace

from mindformers_core.zero.storage import storage_of

__all__ = ["share_parts"]


def share_parts(cells, paths):
    """Let Cells of one rank update a parameter together that each of them computes with: stages of a pipeline whose
    embedding is the output layer, too.

    The first Cell's part is what all of them have afterwards, in `cell.trainable_params()`, too: it is stored, updated
    and counted once. Call this before stages and optimizers are made of the Cells.

    Args:
        cells: what `hsdp()` was called with, alike.
        paths: of parameters; those of any that only one Cell has, or none, are left as they are.

    Raises:
        ValueError: parameters of a path that are cut otherwise, or of other shapes or dtypes.
    """
    for path in paths:
        holders = [(storage, storage.find(path)) for storage in map(storage_of, cells)]
        holders = [(storage, stored) for storage, stored in holders if stored is not None]
        for storage, stored in holders[1:]:
            _check_alike(path, *holders[0], storage, stored)
            storage.check_closed()
            storage.share(stored, holders[0][1])


def _check_alike(path, first_storage, first, storage, stored):
    plans = [replace(one.plan, unit="", reason="") for one in (first, stored)]
    if plans[0] != plans[1] or first.part.layout != stored.part.layout:
        raise ValueError(
            f"share_parts(): parameter '{path}' is {_shown(first)} in {first_storage.label}, but {_shown(stored)} in "
            f"{storage.label}: only what shard() and hsdp() treat alike can be one parameter"
        )


def _shown(stored):
    trained = "trained" if stored.plan.trainable else "frozen"
    dtypes = f"{stored.plan.dtype}, updated in {stored.plan.part_dtype}"
    return f"{trained}, of shape {stored.plan.shape}, {dtypes}, a part of {stored.part_shape} as {stored.part.layout}"
