"""The check of optimizers under `hsdp()`: they hold the Parameters that `trainable_params()` returns."""

from mindformers_core.sharding.optimizers_before import optimizers_holding


def check_optimizers(storage):
    """Raise `ValueError` for an optimizer that holds unsharded weights of an `HsdpStorage`, whose memory is freed."""
    wholes = {id(stored.unsharded): stored.plan.path for stored in storage.parameters if stored.is_copied}
    for optimizer, held in optimizers_holding(wholes):
        raise ValueError(
            f"{type(optimizer).__name__} holds '{wholes[id(held[0])]}' of {storage.label} as it computes, whose memory "
            "comes and goes under hsdp(): build the optimizer of cell.trainable_params()"
        )
