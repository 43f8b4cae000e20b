"""Models of words as their authors write them on one card; each returns its loss."""

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

__all__ = ["Bert", "CapacityExperts", "Recogniser", "Tagger"]

SEED = 12


def parameter(name, *shape, scale=0.3):
    """A Parameter of normal numbers, which depend on its name."""
    values = np.random.default_rng([SEED, *name.encode()]).normal(size=shape) * scale
    return Parameter(Tensor(values.astype(np.float32)), name=name)


class Bert(nn.Cell):
    """Words, positions and kinds, a built-in encoder with a mask of padding, hidden words found by tied embeddings."""

    def __init__(self, words=16, size=8, heads=2, layers=2, length=6):
        super().__init__()
        self.words, self.kinds = nn.Embedding(words, size), nn.Embedding(2, size)
        self.positions = parameter("positions", 1, length, size)
        layer = nn.TransformerEncoderLayer(size, heads, 2 * size, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.transform, self.norm = nn.Dense(size, size, activation="gelu"), nn.LayerNorm((size,))
        self.bias = parameter("bias", words)

    def construct(self, ids, kinds, label):
        x = self.words(ids) + self.positions + self.kinds(kinds)
        x = self.encoder(x, src_key_padding_mask=ops.equal(ids, 0))
        logits = ops.matmul(self.norm(self.transform(x)), self.words.embedding_table.T) + self.bias
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), label.reshape(-1), ignore_index=-100)


class Tagger(nn.Cell):
    """Words read in both directions by gated recurrent units, and a tag for each."""

    def __init__(self, words=16, size=6, hidden=8, tags=4):
        super().__init__()
        self.words = nn.Embedding(words, size)
        self.recurrent = nn.GRU(size, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Dense(2 * hidden, tags)

    def construct(self, ids, label):
        states, _ = self.recurrent(self.words(ids))
        return ops.cross_entropy(self.head(states).swapaxes(1, 2), label)


class Recogniser(nn.Cell):
    """Whisper's stem, an encoder's feed-forward block, and the loss of connectionist temporal classification."""

    def __init__(self, channels=6, size=8, words=8):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, size, 3, has_bias=True)
        self.conv2 = nn.Conv1d(size, size, 3, stride=2, has_bias=True)
        self.norm, self.up, self.down = nn.LayerNorm((size,)), nn.Dense(size, 2 * size), nn.Dense(2 * size, size)
        self.head = nn.Dense(size, words)

    def construct(self, sound, label, lengths):
        x = ops.gelu(self.conv2(ops.gelu(self.conv1(sound)))).swapaxes(1, 2)
        x = x + self.down(ops.gelu(self.up(self.norm(x))))
        scores = ops.log_softmax(self.head(x), -1).swapaxes(0, 1)
        steps = ops.full((scores.shape[1],), scores.shape[0], dtype=label.dtype)
        loss, _ = ops.ctc_loss(scores, label, steps, lengths, zero_infinity=True)
        return loss


class CapacityExperts(nn.Cell):
    """GShard: two experts a token, places in their buffers by a running count, what exceeds the capacity dropped."""

    def __init__(self, size=8, experts=4, capacity=6):
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.router = mint.nn.Linear(size, experts, bias=False)
        self.up, self.down = parameter("up", experts, size, 2 * size), parameter("down", experts, 2 * size, size)

    def construct(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        shares = ops.softmax(self.router(tokens), -1)
        weights, chosen = ops.topk(shares, 2)
        chosen = ops.one_hot(chosen, self.experts).swapaxes(0, 1).reshape(-1, self.experts)
        places = ops.cumsum(chosen, 0) * chosen - 1
        fits = ops.logical_and(places >= 0, places < self.capacity).astype(x.dtype)
        buffers = ops.one_hot(ops.clamp(places, 0, self.capacity - 1), self.capacity).astype(x.dtype)
        buffers = (buffers * fits.expand_dims(2)).reshape(2, -1, self.experts, self.capacity)
        combine = (buffers * weights.T.reshape(2, -1, 1, 1)).sum(0)
        inputs = ops.matmul(buffers.sum(0).reshape(-1, self.experts * self.capacity).T, tokens)
        inputs = inputs.reshape(self.experts, self.capacity, -1)
        outputs = mint.bmm(mint.nn.functional.silu(mint.bmm(inputs, self.up)), self.down)
        mixed = mint.matmul(combine.flatten(start_dim=1), outputs.flatten(start_dim=0, end_dim=1))
        balance = (shares.mean(0) * chosen.astype(x.dtype).mean(0)).sum() * self.experts
        return (mixed**2).mean() + 0.01 * balance
