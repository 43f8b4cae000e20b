"""The choice of the next token: the same on every rank and mesh. Pure Python."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divisor of the logits; 0: always the token with the highest one.
        top_p: only the most probable tokens that together have this probability are drawn from (nucleus sampling,
            Holtzman et al., 2020); 1: all.
        seed: of the draws.

    Raises:
        ValueError: a number out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: {self.temperature} should be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} should be a probability above 0, at most 1 (all tokens)")
        if self.seed < 0:
            raise ValueError(f"seed: {self.seed} should be a whole number from 0")


def next_tokens(logits, sampling, numbers, positions):
    """The next token of every row, int32 of shape (batch,); -1 where the highest logit isn't finite.

    A draw depends on seed, number of the prompt and position of the token only, and takes the first token, in the order
    of ids, at which the sum of probabilities exceeds a uniform number: rows of a batch don't depend on each other.

    Args:
        logits: an array (batch, vocab_size).
        numbers, positions: of every row the number of its prompt, and the position of the token in its text.
    """
    is_finite = np.isfinite(logits.max(-1))  # which NaNs are not; -inf beside others is a token that never comes
    if sampling.temperature == 0:
        return np.where(is_finite, logits.argmax(-1), -1).astype(np.int32)
    chosen = []
    rows = np.where(is_finite[:, None], logits, 0).astype(np.float64)
    for row, number, position in zip(rows, numbers, positions, strict=True):
        probabilities = np.exp((row - row.max()) / sampling.temperature)
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= sampling.top_p]] = 0
        sums = np.cumsum(probabilities)
        draw = np.random.default_rng((sampling.seed, number, position)).random() * sums[-1]
        chosen.append(np.searchsorted(sums, draw, side="right"))
    return np.where(is_finite, chosen, -1).astype(np.int32)
