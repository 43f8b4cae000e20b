"""Scaled rotary frequencies, for sequences longer than those that a model was trained with first. Pure Python.

Types, keys and numbers are those of `rope_scaling` in Hugging Face's `config.json`.
"""

import math
from dataclasses import MISSING, dataclass, fields, replace
from typing import Literal

import numpy as np

from mindformers_core.hints import nearest
from mindformers_core.ranges import bounded, check_fields

_LENGTH = "original_max_position_embeddings"
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_KEYS = {  # type -> the keys besides rope_type and factor: those that it needs, and those that it can have
    "linear": ((), ()),
    "dynamic": ((), (_LENGTH,)),
    "llama3": (("low_freq_factor", "high_freq_factor", _LENGTH), ()),
    "yarn": ((), (_LENGTH, *_YARN)),
}


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions differ from `theta ** (-2j / head_dim)`.

    Attributes:
        rope_type: "linear" divides all by the factor (Chen et al., "Extending Context Window …", 2023). "dynamic"
            raises theta with the length of the sequences of a call, from the original length on. "llama3" divides low
            frequencies, as Llama 3.1. "yarn" divides low ones, too, and scales cosines and sines (Peng et al., "YaRN",
            2023).
        factor: how much longer sequences become.
        original_max_position_embeddings: longest sequence before the scaling; of dynamic and yarn the default is
            `max_position_embeddings`.
        low_freq_factor: of llama3: what turns less often than so in the original length is divided by the factor.
        high_freq_factor: of llama3: what turns more often than so is kept; between both, frequencies are interpolated.
        attention_factor: of yarn: factor of cosines and sines; by default from factor, mscale and mscale_all_dim.
        beta_fast: of yarn: what turns more often than so in the original length is kept, default 32.
        beta_slow: of yarn: what turns less often than so is divided by the factor, default 1.
        mscale, mscale_all_dim: of yarn: together they change the default of attention_factor.
        truncate: of yarn: whether the borders between both are whole numbers of pairs, default true.

    Raises:
        TypeError, ValueError: an unknown type, a value of the wrong type or out of range, a key that the type needs or
            doesn't have.
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float = bounded(MISSING, 1, 1e6)
    original_max_position_embeddings: int | None = bounded(None, 1, 2**24)
    low_freq_factor: float | None = bounded(None, above=0, at_most=1e6)
    high_freq_factor: float | None = bounded(None, above=0, at_most=1e6)
    attention_factor: float | None = bounded(None, above=0, at_most=1e6)
    beta_fast: float | None = bounded(None, above=0, at_most=1e6)
    beta_slow: float | None = bounded(None, above=0, at_most=1e6)
    mscale: float | None = bounded(None, above=0, at_most=1e6)
    mscale_all_dim: float | None = bounded(None, above=0, at_most=1e6)
    truncate: bool | None = None

    def __post_init__(self):
        if self.rope_type not in _KEYS:
            hint = nearest(self.rope_type, _KEYS)
            raise ValueError(f"rope_type: {self.rope_type!r} should be one of {', '.join(_KEYS)}{hint}")
        check_fields(self)
        needed, optional = _KEYS[self.rope_type]
        keys = ", ".join(("factor", *needed, *optional))
        for entry in fields(self)[2:]:
            missing = getattr(self, entry.name) is None
            if missing and entry.name in needed:
                raise ValueError(f"{entry.name}: missing; rope_type {self.rope_type} needs {keys}")
            if not missing and entry.name not in needed + optional:
                raise ValueError(f"{entry.name}: rope_type {self.rope_type} has no such key; it has {keys}")
        _check_less("low_freq_factor", self.low_freq_factor or 0, "high_freq_factor", self.high_freq_factor or 1)
        _check_less("beta_slow", self.beta_slow or 1, "beta_fast", self.beta_fast or 32)

    def of_model(self, max_position_embeddings, head_dim, theta):
        """The scaling with the model's longest sequence as its original length, where none is given.

        Raises:
            ValueError: the type has no frequencies for this size of heads or base.
        """
        if self.rope_type == "dynamic" and head_dim == 2:
            raise ValueError("rope_type: dynamic needs a head_dim of at least 4, not 2")
        if self.rope_type == "yarn" and theta <= 1:
            raise ValueError(f"rope_type: yarn needs a rope_theta greater than 1, not {theta}")
        if self.original_max_position_embeddings is None and self.rope_type in ("dynamic", "yarn"):
            return replace(self, original_max_position_embeddings=max_position_embeddings)
        return self


def rope_scaling_of(value):
    """The `RopeScaling` of a dict of its keys, which may be unknown: a `ValueError`; a `RopeScaling` as it is."""
    if isinstance(value, RopeScaling):
        return value
    known = [entry.name for entry in fields(RopeScaling)]
    for key in value:
        if key not in known:
            raise ValueError(f"{key}: unknown key{nearest(key, known)}; known: {', '.join(known)}")
    return RopeScaling(**{"rope_type": None, "factor": None} | value)


def rotary_frequencies(length, head_dim, theta, scaling=None):
    """The angle between a position and the next, of every pair of values of a head, in float64.

    Args:
        length: of the sequences of the call; only the scaling "dynamic" depends on it.
        head_dim: size of a head.
        theta: base of the frequencies.
        scaling: a `RopeScaling` with its original length, see `of_model`; None: not scaled.

    Returns:
        An array (head_dim / 2,), and the factor of cosines and sines.
    """
    exponents = np.arange(0, head_dim, 2) / head_dim
    if scaling is None:
        return theta**-exponents, 1.0
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    if scaling.rope_type == "dynamic":
        growth = factor * max(length, original) / original - (factor - 1)
        return (theta * growth ** (head_dim / (head_dim - 2))) ** -exponents, 1.0
    plain, kept, amplitude = theta**-exponents, 0.0, 1.0
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
    elif scaling.rope_type == "yarn":
        kept, amplitude = 1 - _yarn_ramp(head_dim, theta, scaling), _yarn_amplitude(scaling)
    return plain * (kept + (1 - kept) / factor), amplitude


def _yarn_ramp(head_dim, theta, scaling):
    """From 0, a frequency that is kept, to 1, one that is divided by the factor: an array (head_dim / 2,)."""

    def pair_that_turns(times):
        angle = scaling.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(angle) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast or 32), pair_that_turns(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)


def _yarn_amplitude(scaling):
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = 0.1 * math.log(scaling.factor)
    if scaling.mscale and scaling.mscale_all_dim:
        return (growth * scaling.mscale + 1) / (growth * scaling.mscale_all_dim + 1)
    return growth + 1


def _check_less(name, value, other_name, other):
    if value >= other:
        raise ValueError(f"{name}: {value} should be less than {other_name} ({other})")
