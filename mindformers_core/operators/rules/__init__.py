"""Rules of operators, one small file of tables a family: importing it fills the registry. Pure Python."""

from mindformers_core.operators.rules import (  # noqa: F401
    attention,
    convolution,
    draws,
    experts,
    fourier,
    fused,
    images,
    indexing,
    joining,
    losses,
    matrices,
    normalization,
    reduction,
    scattering,
    shape,
    slicing,
)
