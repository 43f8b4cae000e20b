"""Which parameters are cut over the data-parallel ranks, along which dim, and why others stay whole. Pure Python."""

from dataclasses import dataclass
from math import prod

from mindformers_core.dtypes import ITEM_BYTES

__all__ = ["LEVELS", "ParameterPlan", "plan_parameters"]

LEVELS = ("level1", "level2", "level3")  # of ZeRO (Rajbhandari et al. 2020): optimizer state, gradients, weights


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter, and what a rank keeps of it.

    Attributes:
        path: of the parameter.
        shape: of what this rank computes with: whole over the data-parallel axis, its part over others.
        dtype: name of the dtype that it computes with.
        shard_dtype: name of the dtype that the optimizer updates.
        trainable: whether it gets a gradient.
        unit: path of the Cell whose parameters are gathered together with it.
        dim: the dim that is cut, or None where the parameter stays whole.
        reason: why it stays whole, in words; empty where it is cut.
    """

    path: str
    shape: tuple
    dtype: str
    shard_dtype: str
    trainable: bool = True
    unit: str = ""
    dim: int | None = None
    reason: str = ""

    @property
    def size(self):
        """Number of elements, whole."""
        return prod(self.shape)

    @property
    def nbytes(self):
        """Bytes of the whole in the dtype that it computes with."""
        return self.size * ITEM_BYTES[self.dtype]

    def shard_shape(self, shard_size):
        """The shape of one of `shard_size` parts; that of the whole where it isn't cut."""
        if self.dim is None:
            return self.shape
        return *self.shape[: self.dim], self.shape[self.dim] // shard_size, *self.shape[self.dim + 1 :]


def plan_parameters(parameters, shard_size, threshold, level):
    """Decide for every parameter whether, and along which dim, it is cut into `shard_size` parts.

    It is cut along the first dim that `shard_size` divides. It stays whole at or under the threshold, where no dim can
    be cut, and, below level 3, where it isn't trained: it has no optimizer state then.

    Args:
        parameters: `ParameterPlan`s without `dim` and `reason`.
        shard_size: number of parts, at least 1.
        threshold: in KB (1024 bytes) of the whole as it computes.
        level: one of `LEVELS`.

    Returns:
        A tuple of `ParameterPlan`s, in the same order.
    """
    return tuple(_planned(plan, shard_size, threshold, level) for plan in parameters)


def _planned(plan, shard_size, threshold, level):
    reason = ""
    dims = [dim for dim, size in enumerate(plan.shape) if size % shard_size == 0 and size > 0]
    if shard_size == 1:
        reason = "shard_size is 1"
    elif not plan.trainable and level != "level3":
        reason = f"not trained, and {level} cuts what comes of gradients"
    elif plan.nbytes <= threshold * 1024:
        reason = f"{plan.nbytes / 1024:g} KB, not more than the threshold of {threshold:g} KB"
    elif not dims:
        reason = f"no dim of {list(plan.shape)} can be cut into {shard_size} equal parts"
    fields = {**plan.__dict__, "dim": None if reason else dims[0], "reason": reason}
    return ParameterPlan(**fields)
