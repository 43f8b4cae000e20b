"""The check of optimizers under `hsdp()`: shards are updated element by element."""

from mindspore import nn
from mindspore.nn.optim.thor import ThorAscend, ThorGpu

from mindformers_core.sharding.optimizers_before import optimizers_holding

# These update an element by norms, means or a matrix of its tensor. All other optimizers of MindSpore 2.10 (nn,
# mint.optim, mindspore.experimental.optim) update element by element.
_BY_TENSOR = (
    nn.Lamb, nn.LARS, nn.AdaFactor, nn.AdaSumByGradWrapCell, nn.AdaSumByDeltaWeightWrapCell, ThorAscend, ThorGpu,
)  # fmt: skip


def check_optimizers(storage):
    """Raise `ValueError` for an optimizer that can't update the parameters of an `HsdpStorage`.

    Such an optimizer holds unsharded weights, whose memory is freed, or holds shards and needs whole tensors.
    """
    wholes = {id(stored.unsharded): stored.plan.path for stored in storage.parameters if stored.is_copied}
    cut = {id(stored.shard): stored.plan.path for stored in storage.parameters if any(stored.shard.layout.dims)}
    for optimizer, held in optimizers_holding(wholes | cut):
        name, centralized = type(optimizer).__name__, _centralized(optimizer, cut)
        for parameter in held:
            if id(parameter) in wholes:
                raise ValueError(
                    f"{name} holds '{wholes[id(parameter)]}' of {storage.label} as it computes, whose memory comes and "
                    "goes under hsdp(): build the optimizer of cell.trainable_params()"
                )
        if isinstance(optimizer, _BY_TENSOR):
            part, what = held[0], f"{name} computes a step from whole tensors"
            cure = (
                "use mindformers_core.zero.Lamb, whose norms are taken across ranks, or an optimizer that updates "
                "element by element, such as nn.AdamWeightDecay"
            )
        elif centralized:
            part, what = centralized[0], f"{name} has a group with grad_centralization=True, means over whole rows"
            cure = "leave grad_centralization out"
        else:
            continue
        raise ValueError(
            f"{what}, but of '{cut[id(part)]}' of {storage.label}, {tuple(part.global_shape)}, this rank has the part "
            f"{tuple(part.shape)}, {part.layout}: {cure}"
        )


def _centralized(optimizer, cut):
    """The shards `cut` without whole rows whose gradients an optimizer centralizes."""
    flags = getattr(optimizer, "grad_centralization_flags", ()) if isinstance(optimizer, nn.Optimizer) else ()
    flagged = [parameter for parameter, flag in zip(optimizer.parameters, flags) if flag and id(parameter) in cut]
    return [parameter for parameter in flagged if any(parameter.layout.dims[1:])]
