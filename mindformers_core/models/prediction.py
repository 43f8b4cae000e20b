"""Heads that predict the tokens behind the next one (DeepSeek-AI, "DeepSeek-V3", 2024, 2.2). Single-card code."""

import mindspore as ms
from mindspore import nn, ops

from mindformers_core.layout import layout
from mindformers_core.tensor_parallel.layers import Linear, RMSNorm, cast_to, hidden_layout

IGNORED = -100


class PredictionHead(nn.Cell):
    """Hidden states, and embeddings of the tokens to come, both (batch, length, hidden_size) → hidden states, normed;
    with `routed` of a layer with experts, that is the second result, see `DecoderLayer`.

    Args:
        config: of the model, as a `DeepseekV3Config`.
        layer: the decoder layer that it has, whose further arguments are the head's, too.
    """

    def __init__(self, config, layer):
        super().__init__()
        size, settings = config.hidden_size, {"dtype": getattr(ms, config.dtype)}
        self.enorm, self.hnorm, self.norm = (RMSNorm(size, config.rms_norm_eps, **settings) for _ in range(3))
        self.eh_proj = TokenLinear(2 * size, size, **settings)
        self.layer = layer

    def construct(self, hidden_states, embedded, *seen, **routing):
        both = ops.concat((self.enorm(embedded), self.hnorm(hidden_states)), -1)
        found = self.layer(self.eh_proj(both), *seen, **routing)
        return (self.norm(found[0]), found[1]) if isinstance(found, tuple) else self.norm(found)


class TokenLinear(Linear):
    """A `Linear` of hidden states as they lie between blocks; its weight is whole on every rank of `tp`."""

    def shard(self, config=None):
        return hidden_layout(config), hidden_layout(config), self.own_layouts(layout(None, None), layout(None))


def labels_behind(labels, places):
    """The labels (batch, length) of the tokens behind those of `labels`: shifted once more, wherever a row's parts lie.

    Where a label doesn't count, as at the end of a document, what is behind it doesn't, either.

    Args:
        labels: int32 (batch, length), -100 where they don't count.
        places: int32 (batch, length) or (1, length), of each token in its row.
    """
    length = labels.shape[1]
    places = ops.broadcast_to(places, labels.shape)
    tokens = ops.cast(ops.argsort(cast_to(places, ms.float32), 1), ms.int32)  # by place
    following = ops.gather_elements(tokens, 1, ops.minimum(ops.add(places, 1), length - 1))
    found = ops.gather_elements(labels, 1, following)
    is_last = ops.logical_or(ops.equal(places, length - 1), ops.equal(labels, IGNORED))
    return ops.masked_fill(found, is_last, IGNORED)
