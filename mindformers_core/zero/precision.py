"""Which dtype each tensor of a training has (Micikevicius et al., "Mixed Precision Training", 2018). Pure Python."""

from dataclasses import dataclass, fields

from mindformers_core.hints import nearest

__all__ = ["MixedPrecision"]

_ALLOWED = ("float32", "float16", "bfloat16")
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of `hsdp(…, mixed_precision=…)`: each "float32", "float16", "bfloat16", that MindSpore dtype, or None.

    The attributes are names, whatever was given. The paper's policy is `parameter="float32", compute="float16"`; the
    memory that ZeRO (Rajbhandari et al. 2020) counts is that of `gradient="float16"` besides.

    Args:
        parameter: of the parts that the optimizer updates, the master copy. Default: as the Cell has them.
        compute: of the weights in forward and backward; floating inputs of the root Cell are cast to it, too.
            Default: weights as the Cell has them, inputs as they come.
        reduce: in which gradients are summed, over ranks and over micro-steps. Default: float32 for gradients of half
            precision, otherwise theirs.
        gradient: in which reduced gradients wait until they are handed out. Half precision saves memory. Default: that
            of `reduce`.
        output: of the floating results of the root Cell. Default: as they come.

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
            object.__setattr__(self, field.name, _name(field.name, getattr(self, field.name)))

    def parameter_dtype(self, own):
        """Dtype name of the part that the optimizer updates, of a parameter that the Cell has in dtype `own`."""
        return self.parameter or own

    def compute_dtype(self, own):
        """Dtype name that a weight computes in, of a parameter that the Cell has in dtype `own`."""
        return self.compute or own

    def reduce_dtype(self, compute):
        """Dtype name in which gradients of a weight that computes in `compute` are summed."""
        return self.reduce or ("float32" if compute in _HALVES else compute)

    def gradient_dtype(self, compute):
        """Dtype name in which reduced gradients of a weight that computes in `compute` wait."""
        return self.gradient or self.reduce_dtype(compute)


def _name(field, dtype):
    """The name of `dtype`, a name or a MindSpore dtype; None for None."""
    if dtype is None:
        return None
    name = str(dtype).lower()  # str(mindspore.float32) is "Float32"
    if name not in _ALLOWED:
        raise ValueError(
            f"MixedPrecision({field}={dtype!r}): use {', '.join(_ALLOWED)}, or None for the default"
            + nearest(name, _ALLOWED)
        )
    return name
