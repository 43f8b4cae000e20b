"""Models of language: an encoder, an encoder with a decoder, a language model with tied embeddings, Llama."""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, One, initializer

from mindformers_core.batches import places_of
from mindformers_core.layout import layout
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.sharding.initialize import materialize
from models.attention import Attention, FeedForward, attention_plan
from models.example import Example, columns, floats, ids, rows

__all__ = ["EXAMPLES", "SHARED", "llama"]

BATCH, LENGTH, WORDS, SIZE, HEADS = 4, 8, 32, 16, 4


class EncoderLayer(nn.Cell):
    """Attention and a feed-forward block, a norm after each (Devlin et al., 2019)."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(SIZE, HEADS), FeedForward(SIZE, 2 * SIZE)
        self.norm1, self.norm2 = nn.LayerNorm((SIZE,)), nn.LayerNorm((SIZE,))

    def construct(self, x, bias=None):
        x = self.norm1(x + self.attention(x, x, bias=bias))
        return self.norm2(x + self.mlp(x))


class Encoder(nn.Cell):
    """Words, positions and kinds embedded, layers in a CellList, the first position pooled; a dict comes out."""

    def __init__(self, layers=1):
        super().__init__()
        self.words, self.kinds = nn.Embedding(WORDS, SIZE), nn.Embedding(2, SIZE)
        self.positions = Parameter(initializer(Normal(0.5), (16, SIZE)), name="positions")
        self.norm = nn.LayerNorm((SIZE,))
        self.layers = nn.CellList([EncoderLayer() for _ in range(layers)])
        self.pool, self.head = nn.Dense(SIZE, SIZE, activation="tanh"), nn.Dense(SIZE, 2)

    def construct(self, words, label, kinds=None, keep=None):
        length = words.shape[1]
        x = self.words(words) + self.positions[:length]
        if kinds is not None:
            x = x + self.kinds(kinds)
        bias = None if keep is None else (1.0 - keep[:, None, None, :].astype(x.dtype)) * -10000.0
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, bias=bias)
        logits = self.head(self.pool(x[:, 0]))
        return {"loss": ops.cross_entropy(logits, label), "hidden": x, "length": length, "bias": bias}


def encoder_plan(axes):
    given = {name: layout(axes.batch, axes.sequence) for name in ("words", "kinds", "keep")}
    return {
        "": {"input": {**given, "label": layout(axes.batch)}, "output": {"loss": layout()}},
        "words": {"weight": layout(axes.tensor)},
        **attention_plan("layers.*.attention", axes),
        "layers.*.mlp.up": columns(axes),
        "layers.*.mlp.down": rows(axes),
    }


def named_loss(result):
    """The loss of a model that returns a dict."""
    return result["loss"]


def encoder_inputs(seed):
    keep = Tensor((np.arange(LENGTH) < [[4], [6], [8], [5]]).astype(np.int32))
    return (ids(seed, WORDS, BATCH, LENGTH), ids(seed + 1, 2, BATCH)), {
        "keep": keep,
        "kinds": ids(seed + 2, 2, BATCH, LENGTH),
    }


class ScaleNorm(nn.Cell):
    """A norm without mean and bias, written out, as T5 has it (Raffel et al., 2020)."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(initializer(One(), (SIZE,)))

    def construct(self, x):
        return self.weight * (x * ops.rsqrt(x.square().mean(-1, keep_dims=True) + 1e-6))


class RelativeBias(nn.Cell):
    """What is added to a head's scores, by how far apart two positions are."""

    def __init__(self, two_sided, buckets=6):
        super().__init__()
        self.two_sided, self.buckets = two_sided, buckets
        self.table = nn.Embedding(buckets, HEADS)

    def construct(self, length):
        apart = np.arange(length)[None, :] - np.arange(length)[:, None]
        apart = apart + self.buckets // 2 if self.two_sided else -apart
        bias = self.table(Tensor(np.clip(apart, 0, self.buckets - 1).astype(np.int32)))
        return bias.permute(2, 0, 1).unsqueeze(0)


class CrossLayer(nn.Cell):
    """Attention to itself, to `memory` if there is one, and a feed-forward block, a norm before each."""

    def __init__(self, is_decoder):
        super().__init__()
        self.attention, self.norm1 = Attention(SIZE, HEADS, has_bias=False), ScaleNorm()
        if is_decoder:
            self.cross, self.norm2 = Attention(SIZE, HEADS, has_bias=False), ScaleNorm()
        self.mlp, self.norm3 = FeedForward(SIZE, 2 * SIZE, ops.relu, has_bias=False), ScaleNorm()

    def construct(self, x, bias, memory=None):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, bias)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.mlp(self.norm3(x))


class EncoderDecoder(nn.Cell):
    """One layer of each, one table of words for both and for the output."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, SIZE)
        self.encoder, self.decoder = CrossLayer(False), CrossLayer(True)
        self.near, self.before = RelativeBias(True), RelativeBias(False)
        self.norm, self.last = ScaleNorm(), ScaleNorm()

    def construct(self, words, target, labels):
        memory = self.norm(self.encoder(self.words(words), self.near(words.shape[1])))
        length = target.shape[1]
        causal = Tensor(np.triu(np.full((length, length), -1e9, np.float32), 1))
        x = self.last(self.decoder(self.words(target), self.before(length) + causal, memory=memory))
        logits = ops.matmul(x * SIZE**-0.5, self.words.embedding_table.T)
        return ops.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


def encoder_decoder_plan(axes):
    plan = {
        "": {"input": {name: layout(axes.batch) for name in ("words", "target", "labels")}, "output": layout()},
        "words": {"weight": layout(axes.tensor)},
        "*.table": {"weight": layout(None, axes.tensor)},
        "*.mlp.up": columns(axes, bias=False),
        "*.mlp.down": rows(axes),
    }
    return plan | attention_plan("*.attention", axes, bias=False) | attention_plan("*.cross", axes, bias=False)


def encoder_decoder_inputs(seed):
    return (ids(seed, WORDS, BATCH, LENGTH), ids(seed + 1, WORDS, BATCH, 4), ids(seed + 2, WORDS, BATCH, 4)), {}


class Block(nn.Cell):
    """Attention with one projection for queries, keys and values, and a feed-forward block, a norm before each."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((SIZE,)), nn.LayerNorm((SIZE,))
        self.mixed, self.out = nn.Dense(SIZE, 3 * SIZE), nn.Dense(SIZE, SIZE)
        self.mlp = FeedForward(SIZE, 2 * SIZE)

    def attend(self, x, mask):
        batch, length, size = x.shape
        parts = self.mixed(x).reshape(batch, length, HEADS, -1).swapaxes(1, 2)
        query, key, value = ops.split(parts, size // HEADS, -1)
        scores = ops.matmul(query, key.swapaxes(2, 3)) / (size // HEADS) ** 0.5
        weights = ops.softmax(scores.masked_fill(mask, -1e9), -1)
        return self.out(ops.matmul(weights, value).swapaxes(1, 2).reshape(batch, length, size))

    def construct(self, x, mask):
        x = x + self.attend(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Cell):
    """Predicts the next word; the table of words is the output layer, too. Some labels don't count."""

    def __init__(self, layers=1):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, SIZE), nn.Embedding(16, SIZE)
        self.layers = nn.CellList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm((SIZE,))
        self.mask = Tensor(np.triu(np.ones((16, 16), bool), 1))

    def construct(self, words, labels):
        length = words.shape[1]
        x = self.words(words) + self.positions(ops.arange(length))
        for layer in self.layers:
            x = layer(x, self.mask[:length, :length])
        logits = ops.dense(self.norm(x), self.words.embedding_table)
        return ops.cross_entropy(logits.view(-1, WORDS), labels.view(-1), ignore_index=-100)


def language_model_plan(axes):
    """Sequence parallel (Korthikanti et al., 2023): between the blocks positions are cut over the axes of weights."""
    given = layout(axes.batch, axes.sequence)
    between = tuple(name for name in (axes.sequence, *(axes.tensor or ())) if name) or None
    return {
        "": {"input": {"words": given, "labels": given}, "output": layout()},
        "words": {"weight": layout(axes.tensor), "output": layout(axes.batch, between)},
        "layers.*": {"output": layout(axes.batch, between)},
        "layers.*.mixed": columns(axes),
        "layers.*.out": rows(axes),
        "layers.*.mlp.up": columns(axes),
        "layers.*.mlp.down": rows(axes),
    }


def language_model_inputs(seed):
    labels = ids(seed + 1, WORDS, BATCH, LENGTH).asnumpy()
    labels[1, 2:5] = -100
    return (ids(seed, WORDS, BATCH, LENGTH), Tensor(labels)), {}


# of a Llama whose number of layers is the test's
TINY_LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 16}
TINY_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}


class BatchSecond(nn.Cell):
    """A layer of MindSpore's own encoder, whose inputs have the sequence first, and a loss over all words."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(SIZE, HEADS, 24, dropout=0.0)
        self.head = nn.Dense(SIZE, WORDS)

    def construct(self, x):
        words = ops.reshape(self.head(self.layer(x)), (-1, WORDS))
        return ops.mean(ops.square(words) * ops.softmax(words, -1))


def batch_second_plan(axes):
    given = {"": {"input": {"x": layout(axes.sequence, axes.batch)}, "output": layout()}}
    return {**given, "layer.dense1": columns(axes), "layer.dense2": rows(axes)}


def llama(**changes):
    """A Llama of two layers."""
    sizes = {"vocab_size": WORDS, "hidden_size": SIZE, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 4, "max_position_embeddings": 16}
    with ms.DeviceCtx("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))
    materialize(model, seed=1)
    return model


@dataclass(frozen=True)
class LlamaSettings:
    """What the hooks of Llama look at."""

    batch_axes: str | None
    sequence_parallel: bool = False


def llama_plan(axes):
    """Its own hooks cut the weights over tp; from outside come the batch and the sequence."""
    given = layout(axes.batch, axes.sequence)
    return {"": {"input": {"input_ids": given, "labels": given}, "output": layout()}}


def llama_inputs(seed):
    args, _ = language_model_inputs(seed)
    return args[:1], {"labels": args[1]}


def documents_llama():
    """A Llama whose sequences two ranks share in a balanced order, by a ring."""
    model = llama()
    model.share_sequences(BALANCED, "ring")
    return model


def documents_inputs(seed):
    """Rows of one document, of several, some of one token, and of such alone."""
    args, labels = llama_inputs(seed)
    positions = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 2, 0, 0, 1, 2], [0] * 8, [0, 1, 2, 3, 4, 0, 1, 0]]
    return args, labels | {"positions": Tensor(np.int32(positions)[:, places_of(BALANCED, LENGTH)])}


def documents_plan(axes):
    plan = llama_plan(axes)
    plan[""]["input"]["positions"] = plan[""]["input"]["labels"]
    return plan


EXAMPLES = {
    "encoder": Example(Encoder, encoder_inputs, encoder_plan, named_loss),
    "encoder and decoder": Example(EncoderDecoder, encoder_decoder_inputs, encoder_decoder_plan),
    "tied language model": Example(LanguageModel, language_model_inputs, language_model_plan),
    "batch second": Example(BatchSecond, lambda seed: ((floats(seed, LENGTH, BATCH, SIZE),), {}), batch_second_plan),
    "llama": Example(llama, llama_inputs, llama_plan, config=lambda axes: LlamaSettings(axes.batch)),
}
BALANCED = 0, 3, 1, 2
SHARED = {  # of which sequences are cut, nothing else
    "llama of documents": Example(
        documents_llama, documents_inputs, documents_plan, config=lambda axes: LlamaSettings(axes.batch)
    )
}
