"""Where the tokens of a call lie, and which places each sees: the one thing that models know of masks."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, nn, ops
from mindspore.common.initializer import Normal, initializer

from mindformers_core.batches import places_of
from mindformers_core.layout import layout


def places_seen(length, order, positions=None, places=None, slots=None, starts=None):
    """The positions of tokens, and the ranges of places that they see.

    Args:
        length: of sequences, or the number of a cache's slots.
        order: of the equal chunks of every sequence, see `static_order`.
        positions: int32 (batch, length), of each token in its document; its tokens see no other one. Default: a
            sequence is one document.
        places: int32 (batch, length), of each token in its row, where rows have orders of their own.
        slots: of a cache, where the tokens of the call are written, (tokens,).
        starts: of every row, (batch,), its first slot that isn't padding.

    Returns:
        Positions in documents, (batch, tokens) or (tokens,), None for 0 … length - 1; and (first, last, places, order,
        exact), see `attention`.
    """
    if slots is not None:
        starts = ops.expand_dims(starts, -1)
        first = ops.broadcast_to(starts, (starts.shape[0], slots.shape[0]))
        own = ops.relu(ops.sub(slots, starts))  # those of padding don't matter
        return own, (first, ops.expand_dims(ops.add(slots, 1), 0), static_ranges(length)[2], None, False)
    first, last, known = static_ranges(length, order)
    if places is None and positions is None:
        return (None if len(order) == 1 else known[0]), (first, last, known, order, True)
    known = known if places is None else places
    own = known if positions is None else positions
    return own, (ops.sub(known, own), ops.add(known, 1), known, order if places is None else None, False)


@ops.constexpr
def static_ranges(length, order=(0,)):
    """Of a sequence whose equal chunks lie in this order, the places that tokens see, first and last + 1, and their
    own: three int32 tensors (1, length), constants under `@ms.jit`.
    """
    own = places_of(order, length)[None]
    return ms.Tensor(np.zeros_like(own)), ms.Tensor(own + 1), ms.Tensor(own)


class LearnedPositions(nn.Cell):
    """Rows of a table for positions (batch, length) or (length,) → (…, hidden_size); None are 0 … length - 1.

    Args:
        config: as a `LlamaConfig`.

    Attributes:
        weight: shape (max_position_embeddings, hidden_size), whole on every rank.
    """

    def __init__(self, config):
        super().__init__()
        shape, dtype = (config.max_position_embeddings, config.hidden_size), getattr(ms, config.dtype)
        self.weight = Parameter(initializer(Normal(config.initializer_range), shape, dtype))

    def shard(self, config=None):
        return None, None, layout(None, None)

    def construct(self, length, positions=None):
        return ops.narrow(self.weight, 0, 0, length) if positions is None else ops.gather(self.weight, positions, 0)
