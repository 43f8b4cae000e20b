"""Streams of tokens for tests."""

from mindformers_core.data.mixture import Mixture
from mindformers_core.data.sources import Tokens
from mindformers_core.data.streams import Sequences, Stream


def token_stream(ids, seq_length, seed, vocab_size=256):
    """The `Stream` of an array of token ids, one document."""
    return Stream((Sequences(Tokens(ids, (0,), "ids"), seq_length, vocab_size),), Mixture((1,)), seed)
