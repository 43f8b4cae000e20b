"""Placements of a tensor on one mesh axis: sharded, replicated, varying or partial. Pure Python."""

from dataclasses import dataclass

from mindformers_core.hints import nearest

PARTIAL_OPS = ("sum", "max", "min", "avg")


@dataclass(frozen=True)
class Shard:
    """The local tensor is a slice of the global one along tensor dim `dim`."""

    dim: int


@dataclass(frozen=True)
class Replicate:
    """The local tensor is the whole tensor, equal on all ranks along the axis."""


@dataclass(frozen=True)
class Varying:
    """As `Replicate`, but consumers differ along the axis: the gradient is a partial sum."""


@dataclass(frozen=True)
class Partial:
    """The local tensor is one term of a reduction along the axis: `op` is `sum`, `max`, `min` or `avg`."""

    op: str = "sum"

    def __post_init__(self):
        if self.op not in PARTIAL_OPS:
            raise ValueError(
                f"Partial({self.op!r}): a partial is one of {', '.join(PARTIAL_OPS)}{nearest(self.op, PARTIAL_OPS)}"
            )
