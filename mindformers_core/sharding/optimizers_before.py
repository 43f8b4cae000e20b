"""Optimizers that were built before `shard()` or `hsdp()`: they hold Parameters that were replaced since."""

import gc
from itertools import compress

from mindspore import Parameter, nn

from mindformers_core.communication.world import stands_for_another
from mindformers_core.program.graph import cell_label


def refuse_optimizers_of(cell, function, replaced=None):
    """Raise `ValueError` where an optimizer holds a parameter of `cell` that `function` replaces.

    Optimizers are Cells with a list `parameters`, as MindSpore's. They are found among all Python objects, since
    Parameters have no references to their optimizers.

    Args:
        function: name of the function, for the error.
        replaced: paths of the replaced parameters. Default: all.
    """
    named = cell.parameters_and_names()
    paths = {id(parameter): path for path, parameter in named if replaced is None or path in replaced}
    own = {id(child) for _, child in cell.cells_and_names()}
    if not paths or not optimizers_holding(paths, own):
        return
    gc.collect()  # unreachable optimizers may only wait for it
    for optimizer, held in optimizers_holding(paths, own):
        raise ValueError(
            f"{type(optimizer).__name__} was built with parameters of {cell_label('', cell)}, '{paths[id(held[0])]}' "
            f"for one, before {function}(), which gives the Cell others: build the optimizer afterwards, of "
            "cell.trainable_params()"
        )


def optimizers_holding(parameters, others=()):
    """`(optimizer, list of the parameters that it holds)` of every optimizer that holds any of `parameters`.

    Args:
        parameters: ids of Parameters.
        others: ids of Cells that are left out.

    A thread that stands for a rank of another world has none: the objects of its process are those of all ranks.
    """
    if stands_for_another():
        return []
    things, found = gc.get_objects(), []
    types = [*map(type, things)]
    kinds = {kind for kind in set(types) if issubclass(kind, nn.Cell)}
    for cell in compress(things, map(kinds.__contains__, types)):
        if id(cell) in others:
            continue
        entries = getattr(cell, "parameters", ())
        entries = entries if isinstance(entries, (tuple, list)) else ()
        held = [entry for entry in entries if isinstance(entry, Parameter) and id(entry) in parameters]
        if held:
            found.append((cell, held))
    return found
