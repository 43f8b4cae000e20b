"""Optimizers and `hsdp()`: they have to update parts element by element."""

from mindspore import nn
from mindspore.nn.optim.thor import ThorAscend, ThorGpu

from mindformers_core.sharding.optimizers_before import optimizers_holding

__all__ = ["check_optimizers"]

# What a step of these does to an element depends on others of its tensor: norms, means, or a matrix of all of it. All
# other optimizers of MindSpore 2.10 (nn, mint.optim, mindspore.experimental.optim) update element by element.
_BY_TENSOR = (
    nn.Lamb, nn.LARS, nn.AdaFactor, nn.AdaSumByGradWrapCell, nn.AdaSumByDeltaWeightWrapCell, ThorAscend, ThorGpu,
)  # fmt: skip


def check_optimizers(storage):
    """Raise `ValueError` where an optimizer can't do with the parameters of an `HsdpStorage` what it does.

    That is one that holds weights as they compute, whose memory comes and goes, or one whose step needs whole tensors
    and that holds parts of them.
    """
    wholes = {id(stored.unsharded): stored.plan.path for stored in storage.parameters if stored.is_copied}
    cut = {id(stored.shard): stored.plan.path for stored in storage.parameters if any(stored.shard.layout.dims)}
    for optimizer, held in optimizers_holding(wholes | cut):
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


def _centralized(optimizer):
    """The Parameters whose gradients an optimizer centralizes."""
    flags = getattr(optimizer, "grad_centralization_flags", ()) if isinstance(optimizer, nn.Optimizer) else ()
    return [parameter for parameter, flag in zip(optimizer.parameters, flags) if flag]
