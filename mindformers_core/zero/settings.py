"""The arguments of `hsdp()`, checked. Pure Python."""

from dataclasses import dataclass, replace

from mindformers_core.hints import nearest
from mindformers_core.mesh import DeviceMesh
from mindformers_core.zero.plan import LEVELS
from mindformers_core.zero.precision import MixedPrecision


@dataclass(frozen=True)
class HsdpSettings:
    """The arguments of `hsdp()`.

    Attributes:
        mesh, shard_axes, replicate_axes: see `data_parallel_axes`.
        axes: the data-parallel ones, major to minor.
        shard_size, threshold, level, accumulate_grad_step, reshard_after_forward, prefetch, precision,
            gradient_accumulation_shard: see `hsdp`.
        gradients_mean: whether gradients are averaged over data-parallel ranks; otherwise they are terms of a sum.

    Raises:
        TypeError, ValueError: an argument out of its range, or of another type.
    """

    mesh: DeviceMesh
    shard_axes: tuple
    replicate_axes: tuple
    axes: tuple
    shard_size: int
    threshold: float
    level: str
    accumulate_grad_step: int
    reshard_after_forward: bool | None
    prefetch: int
    precision: MixedPrecision
    gradients_mean: bool
    gradient_accumulation_shard: bool | None

    def __post_init__(self):
        _check_int("accumulate_grad_step", self.accumulate_grad_step, 1)
        _check_int("prefetch", self.prefetch, 0)
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)):
            raise TypeError(f"hsdp(threshold={self.threshold!r}): should be a number of KB")
        if not self.threshold >= 0:  # NaN neither
            raise ValueError(
                f"hsdp(threshold={self.threshold}): should be at least 0 KB (0: parameters of any size are cut)"
            )
        if self.level not in tuple(LEVELS):
            raise ValueError(
                f"hsdp(optimizer_level={self.level!r}): choose of {', '.join(LEVELS)}"
                f"{nearest(self.level, LEVELS)}; plain data parallelism is shard_size=1"
            )
        if not isinstance(self.precision, MixedPrecision):
            raise TypeError(
                f"hsdp(mixed_precision={self.precision!r}): should be a MixedPrecision, such as "
                'MixedPrecision(compute="float16")'
            )
        for name in ("gradients_mean", "reshard_after_forward", "gradient_accumulation_shard"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"hsdp({name}={value!r}): should be True or False, or None for the default")

    @property
    def group_size(self):
        """Number of data-parallel ranks."""
        return self.mesh.axis_size(*self.replicate_axes, *self.shard_axes)

    def without(self, cut):
        """The same for parameters that some of the data-parallel axes cut: over the others; the scale is another."""
        if not cut:
            return self
        kept = [tuple(axis for axis in axes if axis not in cut) for axes in (self.shard_axes, self.replicate_axes)]
        return replace(self, shard_axes=kept[0], replicate_axes=kept[1], shard_size=self.mesh.axis_size(*kept[0]))

    @property
    def sums_shards(self):
        """Whether the gradients of each micro-step are reduce-scattered, and shards of gradients summed."""
        asked = self.gradient_accumulation_shard
        return self.shard_size > 1 and (self.level != "level1" if asked is None else asked)

    @property
    def reduces_as_they_come(self):
        """Whether gradients are reduced during the backward pass; at level 1 whole gradients stay until its end."""
        return self.shard_size == 1 or self.level != "level1" or self.sums_shards

    @property
    def scale(self):
        """The factor of sums of gradients."""
        return 1 / ((self.group_size if self.gradients_mean else 1) * self.accumulate_grad_step)


def _check_int(name, value, least):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"hsdp({name}={value!r}): should be an int")
    if value < least:
        raise ValueError(f"hsdp({name}={value}): should be at least {least}")


def data_parallel_axes(mesh, axes, shard_size):
    """`(mesh, shard_axes, replicate_axes)`: the axes of one mesh that parameters are sharded and replicated over.

    Shards are those of neighbours, of the last ones of the data-parallel `axes`. Where `shard_size` cuts one of these
    axes, it is split into `axis_replicate` and `axis_shard`: see `DeviceMesh.split_axis`.

    Raises:
        TypeError, ValueError: an unknown axis; a size that doesn't divide the axes; a mesh with axes of those names.
    """
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"hsdp(axis={axis!r}): the mesh has the axes {', '.join(mesh.axis_names)}"
                f"{nearest(axis, mesh.axis_names)}; where the Cell is sharded over other axes, give the whole mesh: "
                "hsdp(…, mesh=…)"
            )
    _check_int("shard_size", shard_size, 1)
    fitting, inner = [], 1
    for size in map(mesh.axis_size, reversed(axes)):
        fitting += [inner * part for part in range(1, size + 1) if size % part == 0 and inner * part not in fitting]
        inner *= size
    if shard_size not in fitting:
        raise ValueError(
            f"hsdp(shard_size={shard_size}): doesn't divide the {inner} ranks of {shown_axes(axes)} of {mesh}: choose "
            f"of {', '.join(map(str, fitting))}"
        )
    sharding, replicating, left = (), (), shard_size
    for axis in reversed(axes):
        size = mesh.axis_size(axis)
        part, left = min(left, size), max(1, left // size)
        if part == size:
            sharding = (axis, *sharding)
        elif part == 1:
            replicating = (axis, *replicating)
        else:
            names = replicate, shard = f"{axis}_replicate", f"{axis}_shard"
            for name in names:
                if name in mesh.axis_names:
                    raise ValueError(
                        f"hsdp(shard_size={shard_size}) cuts axis '{axis}' of {mesh} into {' and '.join(names)}, but "
                        f"the mesh has an axis '{name}': rename that"
                    )
            mesh = mesh.split_axis(axis, **{replicate: size // part, shard: part})
            sharding, replicating = (shard, *sharding), (replicate, *replicating)
    return mesh, sharding, replicating


def shown_axes(axes):
    """Axes in a sentence: `axis 'dp'`, `axes 'dp' and 'cp'`."""
    return f"{'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(repr, axes))}"
