"""The plan of `hsdp()`: the parameters that are sharded over data-parallel ranks, and their dims. Pure Python."""

from dataclasses import dataclass, replace
from math import prod

from mindformers_core.dtypes import ITEM_BYTES

LEVELS = {  # of ZeRO (Rajbhandari et al. 2020) -> what is sharded
    "level1": "optimizer state",
    "level2": "optimizer state and gradients",
    "level3": "optimizer state, gradients and weights",
}


@dataclass(frozen=True)
class ParameterPlan:
    """The plan of one parameter.

    Attributes:
        path: path of the parameter.
        shape: local shape of the unsharded parameter: whole over the data-parallel axis, sharded over other axes.
        dtype: name of the dtype of the forward and backward pass.
        shard_dtype: name of the dtype that the optimizer updates.
        trainable: whether the parameter gets a gradient.
        unit: path of the Cell whose parameters are gathered together; "" for none.
        cut: the data-parallel axes that its layout cuts already, as those of experts: see `HsdpSettings.without`.
        dim: the sharded dim; None where the parameter is replicated.
        reason: the reason for a replicated parameter, in words; "" for a sharded one.
    """

    path: str
    shape: tuple
    dtype: str
    shard_dtype: str
    trainable: bool = True
    unit: str = ""
    cut: tuple = ()
    dim: int | None = None
    reason: str = ""

    @property
    def size(self):
        """Number of elements of the unsharded parameter."""
        return prod(self.shape)

    @property
    def nbytes(self):
        """Bytes of the unsharded parameter in `dtype`."""
        return self.size * ITEM_BYTES[self.dtype]

    @property
    def is_copied(self):
        """Whether the optimizer updates another tensor than that of the passes: a shard, or a copy in another dtype."""
        return self.dim is not None or self.shard_dtype != self.dtype

    def shard_bytes(self, shard_size):
        """Bytes of one of `shard_size` shards in `shard_dtype`."""
        return prod(self.shard_shape(shard_size)) * ITEM_BYTES[self.shard_dtype]

    def shard_shape(self, shard_size):
        """The shape of one of `shard_size` shards; `shape` where the parameter is replicated."""
        if self.dim is None:
            return self.shape
        return *self.shape[: self.dim], self.shape[self.dim] // shard_size, *self.shape[self.dim + 1 :]


def plan_parameters(parameters, shard_size, threshold, level):
    """Choose the dim along which each parameter is sharded into `shard_size` shards.

    A parameter is sharded along the first dim that `shard_size` divides. Parameters of at most `threshold`, parameters
    without such a dim, and, below level 3, frozen ones, which have no optimizer state, are replicated.

    Args:
        parameters: `ParameterPlan`s without `dim` and `reason`.
        shard_size: number of shards, at least 1.
        threshold: KB (1024 bytes) of the unsharded parameter in `dtype`.
        level: one of `LEVELS`.

    Returns:
        A tuple of `ParameterPlan`s, in the same order.
    """
    planned = []
    for plan in parameters:
        dims = [dim for dim, size in enumerate(plan.shape) if size % shard_size == 0 and size > 0]
        if shard_size == 1:
            reason = "shard_size is 1"
        elif not plan.trainable and level != "level3":
            reason = f"not trained, and {level} cuts what comes of gradients"
        elif plan.nbytes <= threshold * 1024:
            reason = f"{plan.nbytes / 1024:g} KB, not more than the threshold of {threshold:g} KB"
        else:
            reason = "" if dims else f"no dim of {list(plan.shape)} can be cut into {shard_size} equal parts"
        planned.append(replace(plan, dim=None if reason else dims[0], reason=reason))
    return tuple(planned)
