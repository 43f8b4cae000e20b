"""Rules of operators, one small file of tables a family: importing it fills the registry. Pure Python."""

from mindformers_core.operators.rules import (  # noqa: F401
    convolution,
    experts,
    fused,
    indexing,
    joining,
    losses,
    normalization,
    reduction,
    scattering,
    shape,
    slicing,
)
