"""The arguments of `hsdp()`, checked. Pure Python."""

from dataclasses import dataclass

from mindformers_core.hints import nearest
from mindformers_core.mesh import DeviceMesh
from mindformers_core.zero.plan import LEVELS
from mindformers_core.zero.precision import MixedPrecision

__all__ = ["HsdpSettings", "REPLICATE_AXIS_SUFFIX", "SHARD_AXIS_SUFFIX", "check_flags", "check_settings"]

REPLICATE_AXIS_SUFFIX, SHARD_AXIS_SUFFIX = "_replicate", "_shard"


@dataclass(frozen=True)
class HsdpSettings:
    """The arguments of `hsdp()`, and what follows from them.

    Attributes:
        mesh: with the data-parallel axis, split in two where a part of it shards.
        axis, shard_size, threshold, level, accumulate_grad_step, reshard_after_forward, prefetch, precision,
            gradient_accumulation_shard: see `hsdp`.
        shard_axes, replicate_axes: axes of `mesh` over which parts lie, and over which they are alike.
        gradients_mean: whether gradients are averaged over data-parallel ranks; else they are terms of a sum.
    """

    mesh: DeviceMesh
    shard_axes: tuple
    replicate_axes: tuple
    axis: str
    shard_size: int
    threshold: float
    level: str
    accumulate_grad_step: int
    reshard_after_forward: bool | None
    prefetch: int
    precision: MixedPrecision
    gradients_mean: bool
    gradient_accumulation_shard: bool | None

    @property
    def sums_shards(self):
        """Whether the gradients of each micro-step are reduce-scattered, and only the sums of parts are kept."""
        asked = self.gradient_accumulation_shard
        return self.shard_size > 1 and (self.level != "level1" if asked is None else asked)

    @property
    def reduces_as_they_come(self):
        """Whether gradients are reduced while the backward pass runs; at level 1 the whole ones stay until its end."""
        return self.shard_size == 1 or self.level != "level1" or self.sums_shards

    @property
    def scale(self):
        """What sums of gradients are multiplied by."""
        count = self.mesh.axis_size(*self.replicate_axes, *self.shard_axes) if self.gradients_mean else 1
        return 1 / (count * self.accumulate_grad_step)


def check_settings(mesh, axis, shard_size, threshold, optimizer_level, accumulate_grad_step, prefetch):
    """Raise `TypeError` or `ValueError` for the first argument of `hsdp()` that can't be, with what could."""
    if axis not in mesh.axis_names:
        raise ValueError(
            f"hsdp(axis={axis!r}): the mesh has the axes {', '.join(mesh.axis_names)}{nearest(axis, mesh.axis_names)}; "
            "where the Cell is sharded over other axes, give the whole mesh: hsdp(…, mesh=…)"
        )
    for name, value, least in (
        ("shard_size", shard_size, 1),
        ("accumulate_grad_step", accumulate_grad_step, 1),
        ("prefetch", prefetch, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"hsdp({name}={value!r}): should be an int")
        if value < least:
            raise ValueError(f"hsdp({name}={value}): should be at least {least}")
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"hsdp(threshold={threshold!r}): should be a number of KB")
    if not threshold >= 0:  # NaN neither
        raise ValueError(f"hsdp(threshold={threshold}): should be at least 0 KB (0: parameters of any size are cut)")
    size = mesh.axis_size(axis)
    if size % shard_size:
        fitting = [number for number in range(1, size + 1) if size % number == 0]
        raise ValueError(
            f"hsdp(shard_size={shard_size}): doesn't divide the {size} ranks of axis '{axis}' of {mesh}: choose of "
            f"{', '.join(map(str, fitting))}"
        )
    if optimizer_level not in LEVELS:
        raise ValueError(
            f"hsdp(optimizer_level={optimizer_level!r}): choose of {', '.join(LEVELS)}"
            f"{nearest(optimizer_level, LEVELS)}; plain data parallelism is shard_size=1"
        )


def check_flags(**flags):
    """Raise `TypeError` for the first argument of `hsdp()` that is neither True, False nor None."""
    for name, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"hsdp({name}={value!r}): should be True or False, or None for the default")
