"""Mixed precision (Micikevicius et al., "Mixed Precision Training", 2018): the dtype of each tensor. Pure Python."""

from dataclasses import dataclass, fields

from mindformers_core.hints import nearest

_ALLOWED = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of `hsdp(…, mixed_precision=…)`: each "float32", "float16", "bfloat16", that MindSpore dtype, or None.

    The attributes are names of dtypes. The paper's policy is `parameter="float32", compute="float16"`; the memory that
    ZeRO (Rajbhandari et al. 2020) counts is that of `gradient="float16"` besides.

    Args:
        parameter: dtype of the shards that the optimizer updates, the master copy. Default: the Cell's dtypes.
        compute: dtype of weights in forward and backward passes, and of floating inputs of the root Cell. Default:
            the Cell's dtypes, and inputs unchanged.
        reduce: dtype of sums of gradients, over ranks and micro-steps. Default: float32 for gradients of half
            precision, otherwise the gradient's dtype.
        gradient: dtype of reduced gradients until the end of a step. Half precision saves memory. Default: that of
            `reduce`.
        output: dtype of the root Cell's floating results. Default: unchanged.

    Raises:
        ValueError: another dtype.
    """

    parameter: object = None
    compute: object = None
    reduce: object = None
    gradient: object = None
    output: object = None

    def __post_init__(self):
        for field in fields(self):
            dtype = getattr(self, field.name)
            name = None if dtype is None else str(dtype).lower()  # str(mindspore.float32) is "Float32"
            if name not in (None, *_ALLOWED):
                raise ValueError(
                    f"MixedPrecision({field.name}={dtype!r}): use {', '.join(_ALLOWED)}, or None for the default"
                    + nearest(name, _ALLOWED)
                )
            object.__setattr__(self, field.name, name)

    def reduce_dtype(self, compute):
        """Name of the dtype of sums of gradients, for a weight with dtype `compute` in the backward pass."""
        return self.reduce or ("float32" if compute in ("float16", "bfloat16") else compute)

    def gradient_dtype(self, compute):
        """Name of the dtype of reduced gradients, for a weight with dtype `compute` in the backward pass."""
        return self.gradient or self.reduce_dtype(compute)
