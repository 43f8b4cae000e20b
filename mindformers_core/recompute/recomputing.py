"""`recompute()` and `swap()`: activations selected by name are recomputed or kept on the host (RFC ICY7S6).

In PyNative the results of each selected operator are freed separately, see `keeping.py` and `offloading.py`. Compiled
functions recompute whole Cells, see `checkpointing.py`.
"""

from dataclasses import fields

from mindformers_core.hints import nearest
from mindformers_core.mindspore_private import recompute_cell_of
from mindformers_core.recompute.policy import ChosenActivations
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.scopes import errors_at
from mindformers_core.sharding.sharded_cells import tree_of_root


def recompute(cell, settings=None, *, is_part=False, **keys):
    """Recompute selected activations of a sharded Cell in the backward pass instead of saving them; returns `cell`.

    Patterns select operators, or Cells: the results of a selected Cell are saved, all values inside are recomputed.
    Each selected operator runs once more, on saved or recomputed inputs, with the same random numbers. Losses and
    gradients are bitwise equal to those without recompute.

    Args:
        cell: root of a tree made by `shard()`; for one card, over a mesh of one. Before or after `hsdp()`.
        settings: a `RecomputeSettings`, as from a recipe; default: one made of `keys`.
        is_part: whether the Cell is a pipeline stage: missing layers and patterns may be on another stage.
        keys: fields of `RecomputeSettings`: `full`, `select`, `exclude`, `mp_comm_recompute`,
            `parallel_optimizer_comm_recompute`, `budget`. For patterns, see `patterns.py`.

    Raises:
        TypeError: not a sharded Cell; an unknown setting.
        ValueError: a Cell below a root, an eager Cell, a second call for the same Cell, settings that contradict each
            other or change nothing. When a program is made: an unmatched pattern, or an `exclude` that leaves nothing
            to recompute. In compiled functions: any selection other than whole Cells.
    """
    return _given(cell, "recompute", "settings", _made(RecomputeSettings, "recompute", settings, keys), is_part)


def swap(cell, settings=None, *, is_part=False, **keys):
    """Keep selected activations of a sharded Cell on the host until the backward pass reads them; returns `cell`.

    Each tensor is copied to the host when autograd saves it, and copied back `backward_prefetch` saved tensors before
    its use. A selected Cell stands for all results inside. Losses and gradients are bitwise unchanged. PyNative.

    Args:
        cell: root of a tree made by `shard()`; for one card, over a mesh of one. Before or after `hsdp()`.
        settings: a `SwapSettings`, as from a recipe; default: one made of `keys`.
        is_part: whether the Cell is a pipeline stage: missing layers and patterns may be on another stage.
        keys: fields of `SwapSettings`: `swap`, `default_prefetch`, `layer_swap`, `op_swap`.

    Raises:
        TypeError: as `recompute()`. ValueError: as `recompute()`; when a program is made, also an operator that
            is both recomputed and swapped; in compiled functions, any setting.
    """
    return _given(cell, "swap", "swapping", _made(SwapSettings, "swap", settings, keys), is_part)


def _made(kind, function, settings, keys):
    """The settings object of `keys`; errors begin with the key's path, as for a recipe."""
    if settings is not None:
        if keys or not isinstance(settings, kind):
            raise TypeError(f"{function}() takes a {kind.__name__}, or its keys by name, not {settings!r}, {keys}")
        return settings
    known = [entry.name for entry in fields(kind)]
    for name in keys:
        if name not in known:
            hint = f"{nearest(name, known)}; known: is_part, {', '.join(known)}: {kind.page}"
            raise TypeError(f"{function}.{name}: unknown setting{hint}")
    with errors_at(f"{function}."):  # the message begins with the key
        return kind(**keys)


def _given(cell, function, which, settings, is_part):
    """Install a `ChosenActivations` with one changed setting in a root Cell; returns the Cell."""
    if not settings.is_on:
        return cell
    tree = tree_of_root(cell, function, ", and name this one in a pattern")
    for path, child in tree.cells.items():
        if recompute_cell_of(child) is not None:
            raise ValueError(
                f"{tree.label(path)} is recomputed by its own recompute() already: leave that out, and select it here"
            )
    known = {"settings": RecomputeSettings(), "swapping": SwapSettings()}
    known = {name: getattr(tree.activations, name, off) for name, off in known.items()}
    if known[which].is_on:
        raise ValueError(f"{function}() was called with {tree.label('')} already: give everything in one call")
    tree.activations = ChosenActivations(tree, is_part=is_part, **{**known, which: settings})
    tree.forget_programs()
    return cell
