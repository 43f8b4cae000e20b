"""`recompute()` and `swap()`: activations chosen by name, computed again or kept on the host (RFC ICY7S6).

In PyNative results of every chosen operator are freed one by one, see `keeping.py` and `offloading.py`. Compiled
functions recompute whole Cells, see `checkpointing.py`.
"""

from dataclasses import fields

from mindformers_core.hints import nearest
from mindformers_core.recompute.policy import ChosenActivations
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.sharding.sharded_cells import tree_of_root

__all__ = ["recompute", "swap"]


def recompute(cell, settings=None, *, is_part=False, **keys):
    """Have the backward pass of a sharded Cell compute again what it would otherwise keep; gives `cell`.

    What is selected are operators, or Cells: of a Cell its results are kept, everything in it is computed again. What
    is computed again is run once, on inputs that are kept, or computed again in their turn; random numbers are the
    same. Losses and gradients are bit by bit what they are without.

    Args:
        cell: the root of a tree that `shard()` made; on one card, over a mesh of one. Before or after `hsdp()`.
        settings: a `RecomputeSettings`, as a recipe has it; default: that of `keys`.
        is_part: whether the Cell is a stage of a pipeline: layers and patterns that aren't here may be on another one.
        keys: see `RecomputeSettings`: `full`, `select`, `exclude`, `mp_comm_recompute`,
            `parallel_optimizer_comm_recompute`, `budget`. For patterns, see `patterns.py`.

    Raises:
        TypeError: not a sharded Cell; a setting that there isn't.
        ValueError: a Cell below a root, or that runs eagerly, or was given here before; settings that can't be, or
            change nothing. When a program is made: a pattern that matches nothing, or `exclude` that leaves nothing. In
            compiled functions: anything but whole Cells.
    """
    return _given(cell, "recompute", "settings", _made(RecomputeSettings, "recompute", settings, keys), is_part)


def swap(cell, settings=None, *, is_part=False, **keys):
    """Have results of a sharded Cell that the backward pass needs wait for it on the host; gives `cell`.

    They are copied there as they are saved, and copied back some saved tensors ahead of their use. Of a selected Cell
    these are the results of everything in it. Losses and gradients are bit by bit what they are without. PyNative.

    Args:
        cell: the root of a tree that `shard()` made; on one card, over a mesh of one. Before or after `hsdp()`.
        settings: a `SwapSettings`, as a recipe has it; default: that of `keys`.
        is_part: whether the Cell is a stage of a pipeline: layers and patterns that aren't here may be on another one.
        keys: see `SwapSettings`: `swap`, `default_prefetch`, `layer_swap`, `op_swap`.

    Raises:
        TypeError: as for `recompute()`. ValueError: as for it; when a program is made, also what is recomputed
            and swapped; in compiled functions, anything.
    """
    return _given(cell, "swap", "swapping", _made(SwapSettings, "swap", settings, keys), is_part)


def _made(kind, function, settings, keys):
    """The settings, of names that there are; errors begin with the key's path, as those of a recipe."""
    if settings is not None:
        if keys or not isinstance(settings, kind):
            raise TypeError(f"{function}() takes a {kind.__name__}, or its keys by name, not {settings!r}, {keys}")
        return settings
    known = [entry.name for entry in fields(kind)]
    for name in keys:
        if name not in known:
            hint = f"{nearest(name, known)}; known: is_part, {', '.join(known)}: {kind.page}"
            raise TypeError(f"{function}.{name}: unknown setting{hint}")
    try:
        return kind(**keys)
    except (TypeError, ValueError) as error:  # the message begins with the key
        raise type(error)(f"{function}.{error}") from None


def _given(cell, function, which, settings, is_part):
    """Change one of the settings that the `ChosenActivations` of a root Cell are made of; gives the Cell."""
    if not settings.is_on:
        return cell
    tree = tree_of_root(cell, function, ", and name this one in a pattern")
    for path, child in tree.cells.items():
        if child._recompute_cell is not None:
            raise ValueError(
                f"{tree.label(path)} is recomputed by its own recompute() already: leave that out, and select it here"
            )
    known = {"settings": RecomputeSettings(), "swapping": SwapSettings()}
    if tree.activations.marks:
        known = {name: getattr(tree.activations, name) for name in known}
    if known[which].is_on:
        raise ValueError(f"{function}() was called with {tree.label('')} already: give everything in one call")
    tree.activations = ChosenActivations(tree, is_part=is_part, **{**known, which: settings})
    tree.forget_programs()
    return cell
