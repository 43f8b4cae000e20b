"""Optimizers that were built too early: they hold Parameters that a Cell computes with no longer."""

import gc

from mindspore import Parameter, nn

from mindformers_core.program.graph import cell_label

__all__ = ["optimizers_holding", "refuse_optimizers_of"]


def refuse_optimizers_of(cell, function, replaced=None):
    """Raise `ValueError` where an optimizer holds a parameter of `cell` in whose place `function` puts another one.

    Those are the ones with the paths `replaced`; by default all. Optimizers are Cells with a list `parameters`,
    as MindSpore's do. They are found among all objects that there are, since Parameters don't know who holds them.
    """
    named = cell.parameters_and_names()
    paths = {id(parameter): path for path, parameter in named if replaced is None or path in replaced}
    own = {id(child) for _, child in cell.cells_and_names()}
    if not paths or not optimizers_holding(paths, own):
        return
    gc.collect()  # some that nobody has any more may only wait for it
    for optimizer, held in optimizers_holding(paths, own):
        raise ValueError(
            f"{type(optimizer).__name__} was built with parameters of {cell_label('', cell)}, '{paths[id(held[0])]}' "
            f"for one, before {function}(), which gives the Cell others: build the optimizer afterwards, of "
            "cell.trainable_params()"
        )


def optimizers_holding(parameters, others=()):
    """`(optimizer, those that it holds)` of every optimizer that holds any of `parameters`, keyed by id, as a list;
    except Cells whose ids are in `others`."""
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, nn.Cell)}
    found = []
    for cell in [thing for thing in things if type(thing) in kinds and id(thing) not in others]:
        held = [parameter for parameter in _held(cell) if id(parameter) in parameters]
        if held:
            found.append((cell, held))
    return found


def _held(cell):
    """The Parameters in a Cell's list `parameters`, if it has one."""
    entries = getattr(cell, "parameters", ())
    entries = entries if isinstance(entries, (tuple, list)) else ()
    return [entry for entry in entries if isinstance(entry, Parameter)]
