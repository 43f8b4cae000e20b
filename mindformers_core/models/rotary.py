"""Rotary position embedding (Su et al., "RoFormer", 2021), in the half-rotation form of Hugging Face's Llama."""

from functools import lru_cache

import mindspore as ms
import numpy as np
from mindspore import ops

from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.algorithms.rows import rotate
from mindformers_core.models.rope_scaling import rotary_frequencies
from mindformers_core.operators import register_operator
from mindformers_core.operators.rules.fused import rotary_embedding
from mindformers_core.operators.saved import SavedByOperator

register_operator(
    "Rotary", source="mindformers_core.algorithms.rows.rotate", saves=SavedByOperator((1, 2)), operations=3
)(rotary_embedding)
_rotate = custom_operator("Rotary", rotate)


@ops.constexpr
def rotary_tables(length, head_dim, theta, scaling=None):
    """Cosines and sines for positions 0 … length-1: two float32 tensors of shape (length, 1, head_dim).

    The angle of position p at index i is `p / theta ** (2j / head_dim)` with j = i modulo head_dim / 2; or what a
    `RopeScaling` makes of it. A constant under `@ms.jit`.
    """
    cosines, sines = _tables(length, head_dim, theta, scaling)
    return ms.Tensor(cosines), ms.Tensor(sines)


def apply_rotary(x, cosines, sines):
    """Rotate the pairs (i, i + head_dim / 2) of each head by the angle of its position.

    Args:
        x: shape (batch, length, heads, head_dim).
        cosines, sines: from `rotary_tables`.

    Returns:
        A tensor of the shape and dtype of x; computed in float32.
    """
    return _rotate(x, cosines, sines)


@lru_cache(maxsize=8)
def _tables(length, head_dim, theta, scaling):
    """The tables as NumPy arrays, computed in float64: float32 angles of long sequences are inexact."""
    frequencies, amplitude = rotary_frequencies(length, head_dim, theta, scaling)
    angles = np.outer(np.arange(length), frequencies)[:, None, :]
    halves = ((amplitude * turn(angles)).astype(np.float32) for turn in (np.cos, np.sin))
    return tuple(np.tile(half, 2) for half in halves)
