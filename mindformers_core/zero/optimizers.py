"""Optimizers and `hsdp()`: they have to be built of parts, and to update them element by element."""

import gc

from mindspore import Parameter, nn
from mindspore.nn.optim.thor import ThorAscend, ThorGpu

from mindformers_core.tensor_parallel.labels import cell_label

__all__ = ["check_optimizers", "refuse_optimizers_of"]

# What a step of these does to an element depends on others of its tensor: norms, means, or a matrix of all of it. All
# other optimizers of MindSpore 2.10 (nn, mint.optim, mindspore.experimental.optim) update element by element.
_BY_TENSOR = (
    nn.Lamb, nn.LARS, nn.AdaFactor, nn.AdaSumByGradWrapCell, nn.AdaSumByDeltaWeightWrapCell, ThorAscend, ThorGpu,
)  # fmt: skip


def refuse_optimizers_of(cell):
    """Raise `ValueError` where an optimizer holds any parameter of `cell`: it would go on with them as they are.

    Optimizers are the Cells that keep a list `parameters`, as MindSpore's do. They are found among all objects that
    there are, since Parameters don't know who holds them.
    """
    paths = {id(parameter): path for path, parameter in cell.parameters_and_names()}
    own = {id(child) for _, child in cell.cells_and_names()}
    if not _holders(paths, own):
        return
    gc.collect()  # some that nobody has any more may only wait for it
    for optimizer, held in _holders(paths, own):
        raise ValueError(
            f"{type(optimizer).__name__} was built with parameters of {cell_label('', cell)}, '{paths[id(held[0])]}' "
            "for one, before hsdp(), which gives it parts instead: build the optimizer afterwards, of "
            "cell.trainable_params()"
        )


def check_optimizers(storage):
    """Raise `ValueError` where an optimizer can't do with the parameters of an `HsdpStorage` what it does.

    That is one that holds weights as they compute, whose memory comes and goes, or one whose step needs whole tensors
    and that holds parts of them.
    """
    wholes = {id(stored.whole): stored.plan.path for stored in storage.parameters if stored.is_copied}
    cut = {id(stored.part): stored.plan.path for stored in storage.parameters if any(stored.part.layout.dims)}
    for optimizer, held in _holders(wholes | cut):
        for parameter in held:
            if id(parameter) in wholes:
                raise ValueError(
                    f"{type(optimizer).__name__} holds '{wholes[id(parameter)]}' of {storage.label} as it computes, "
                    "whose memory comes and goes under hsdp(): build the optimizer of cell.trainable_params()"
                )
        _check_elementwise(optimizer, held, cut, storage.label)


def _check_elementwise(optimizer, held, cut, label):
    """Raise `ValueError` where an optimizer needs more of a tensor than the parts that it holds."""
    centralized = [parameter for parameter in _centralized(optimizer) if id(parameter) in cut]
    centralized = [parameter for parameter in centralized if any(parameter.layout.dims[1:])]
    name = type(optimizer).__name__
    if isinstance(optimizer, _BY_TENSOR):
        part, what = held[0], f"{name} computes a step from whole tensors"
        cure = (
            "use mindformers_core.zero.Lamb, whose norms are taken across ranks, or an optimizer that updates element "
            "by element, such as nn.AdamWeightDecay"
        )
    elif centralized:
        part, what = centralized[0], f"{name} has a group with grad_centralization=True, means over whole rows"
        cure = "leave grad_centralization out"
    else:
        return
    raise ValueError(
        f"{what}, but of '{cut[id(part)]}' of {label}, {tuple(part.global_shape)}, this rank has the part "
        f"{tuple(part.shape)}, {part.layout}: {cure}"
    )


def _holders(parameters, others=()):
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


def _centralized(optimizer):
    """The Parameters whose gradients an optimizer centralizes."""
    flags = getattr(optimizer, "grad_centralization_flags", ()) if isinstance(optimizer, nn.Optimizer) else ()
    return [parameter for parameter, flag in zip(optimizer.parameters, flags) if flag]
