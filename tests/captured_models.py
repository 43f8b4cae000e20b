"""Small models, written without any thought of parallelism, for the tests of capture: `MODELS`."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer

from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.tensor_parallel.initialize import materialize

__all__ = ["MODELS", "Closure", "Function", "Passing", "assert_unchanged", "small_llama", "snapshot"]


class Function(nn.Cell):
    """A Cell that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


def snapshot(cell):
    """All that a capture must not change."""
    values = {p.name: (p.asnumpy().copy(), p.device, p.requires_grad) for p in cell.get_parameters()}
    cells = {name: (type(child), dict(child.__dict__)) for name, child in cell.cells_and_names()}
    return values, cells


def assert_unchanged(cell, before):
    values, cells = before
    for parameter in cell.get_parameters():
        value, device, trainable = values[parameter.name]
        np.testing.assert_array_equal(parameter.asnumpy(), value)
        assert (parameter.device, parameter.requires_grad) == (device, trainable)
    for name, child in cell.cells_and_names():
        kind, attributes = cells[name]
        assert type(child) is kind
        assert child.__dict__.keys() == attributes.keys()
        assert all(child.__dict__[key] is value for key, value in attributes.items())


def floats(seed, *shape):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def ids(seed, high, *shape):
    return Tensor(np.random.default_rng(seed).integers(0, high, shape).astype(np.int32))


def small_llama(**changes):
    """A Llama of two layers, and what makes a batch."""
    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    with ms.DeviceCtx("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))
    materialize(model, seed=1)
    return model, lambda seed: ((ids(seed, 32, 2, 8),), {"labels": ids(seed + 9, 32, 2, 8)})


def mlp():
    layers = nn.Dense(6, 8), nn.ReLU(), nn.Dropout(p=0.0), nn.LayerNorm((8,)), nn.Dense(8, 4), nn.Identity()
    return nn.SequentialCell(*layers), lambda seed: ((floats(seed, 3, 6),), {})


class Classifier(nn.Cell):
    """Two convolutions with batch norm, pooling, a linear layer."""

    def __init__(self):
        super().__init__()
        self.features = nn.SequentialCell(
            nn.Conv2d(3, 4, 3, has_bias=True),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(4, 6, 3),
            nn.AvgPool2d(2, 2),
        )
        self.flatten = nn.Flatten()
        self.head = nn.Dense(24, 5)

    def construct(self, image, label=None):
        logits = self.head(self.flatten(self.features(image)))
        return logits if label is None else (logits, ops.cross_entropy(logits, label))


def classifier():
    return Classifier(), lambda seed: ((floats(seed, 2, 3, 8, 8), ids(seed, 5, 2)), {})


class EncoderLayer(nn.Cell):
    """MindSpore's own attention, and a feed-forward block, each after a norm."""

    def __init__(self, size, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm((size,)), nn.LayerNorm((size,))
        self.fc1, self.fc2 = nn.Dense(size, 2 * size), nn.Dense(2 * size, size)
        self.dropout = nn.Dropout(p=0.0)

    def construct(self, x, mask=None):
        normed = self.norm1(x)
        mixed = self.attention(normed, normed, normed, key_padding_mask=mask, need_weights=False)[0]
        x = x + self.dropout(mixed)
        return x + self.fc2(ops.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Cell):
    """Words and positions embedded, layers in a CellList, the first position pooled; a dict comes out."""

    def __init__(self, layers=2):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.positions = Parameter(initializer(Normal(0.1), (16, 8)), name="positions")
        self.kinds = nn.Embedding(2, 8)
        self.layers = nn.CellList([EncoderLayer(8, 2) for _ in range(layers)])
        self.pool = nn.Dense(8, 8, activation="tanh")

    def construct(self, words, kinds=None, keep=None):
        batch, length = words.shape
        x = self.words(words) + self.positions[:length]
        if kinds is not None:
            x = x + self.kinds(kinds)
        mask = None if keep is None else ops.logical_not(keep)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return {"hidden": x, "pooled": self.pool(x[:, 0]), "batch": batch, "mask": mask}


def encoder():
    def make(seed):
        keep = Tensor(np.arange(6) < [[4], [6]])
        return (ids(seed, 20, 2, 6),), {"keep": keep, "kinds": ids(seed, 2, 2, 6)}

    return Encoder(), make


class Structures(nn.Cell):
    """Tuples, lists and dicts in and out, None, `*args`, `**kwargs`, non-tensors, one tensor twice."""

    def construct(self, pair, table, *more, scale=1.0, nothing=None, **named):
        first, (second, third) = pair
        assert nothing is None
        x = first * scale + second - third + table["bias"]
        for extra in more:
            x = x + extra
        return [x, (x, named["other"])], {"size": x.shape, "dims": x.ndim, "none": None, "in": table["bias"]}


def structures():
    class Around(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Structures()

        def construct(self, x, y):
            table = {"bias": y, "name": "table"}
            (a, (b, c)), facts = self.inner((x, [y, x]), table, y, y, other=x, scale=2.0)
            return a + b, c, facts

    return Around(), lambda seed: ((floats(seed, 2, 3), floats(seed + 1, 2, 3)), {})


class Shared(nn.Cell):
    """One Cell at two places and called several times with several shapes, one parameter in two Cells, a CellDict."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.again = self.first
        self.parts = nn.CellDict({"a": nn.Dense(4, 4, has_bias=False), "b": nn.Tanh()})
        self.parts["a"].weight = self.first.weight
        scales = Parameter(Tensor([2.0], ms.float32), name="s0"), Parameter(Tensor([3.0], ms.float32), name="s1")
        self.scales = ParameterTuple(scales)
        self.table = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))

    def construct(self, x, index):
        y = self.first(x) * self.scales[0]
        y = self.again(y.reshape(-1, 4)).reshape(x.shape) + self.parts["b"](self.parts["a"](y)) * self.scales[1]
        return y + self.table[index] + ops.matmul(y, self.parts["a"].weight) + self.table[1]


def shared():
    return Shared(), lambda seed: ((floats(seed, 2, 3, 4), ids(seed, 3, 2, 3)), {})


class Closure(nn.Cell):
    """Passes a tensor on by an attribute, and one by a list that the other Cell fills."""

    def __init__(self):
        super().__init__()
        self.reader, self.writer = Reader(), Writer()

    def construct(self, x):
        kept = []
        y = self.writer(x * 2, kept, self.reader)
        return self.reader(y) + kept[0]


class Writer(nn.Cell):
    def construct(self, x, kept, reader):
        kept.append(ops.exp(x))
        reader.seen = ops.sin(x)
        return x + 1


class Reader(nn.Cell):
    def __init__(self):
        super().__init__()
        self.seen = None

    def construct(self, x):
        return x * self.seen


class Passing(nn.Cell):
    """Gives its arguments back."""

    def construct(self, x, y=None):
        return x if y is None else (x, y)


class Recurrent(nn.Cell):
    """A recurrent cell, unrolled over the dim of time, with constants of its own and methods of tensors."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Dense(3, 16), nn.Dense(4, 16)

    def construct(self, x):
        state = memory = ops.zeros((x.shape[0], 4), x.dtype)
        for step in range(x.shape[1]):
            i, f, g, o = ops.split(self.inner(x[:, step]) + self.outer(state), 4, -1)
            memory = memory * ops.sigmoid(f) + ops.sigmoid(i) * ops.tanh(g)
            state = ops.sigmoid(o) * ops.tanh(memory)
        total = state.sum(axis=-1, keepdims=True) + state.max(axis=1).mean()
        return total, state.transpose(1, 0), memory.astype(ms.float16).astype(ms.float32), state.argmax(0)


def recurrent():
    return Recurrent(), lambda seed: ((floats(seed, 2, 3, 3),), {})


class Router(nn.Cell):
    """A dense mixture of experts: every token goes to all, weighted by its best two."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Dense(4, 3, has_bias=False)
        self.experts = nn.CellList([nn.Dense(4, 4) for _ in range(3)])

    def construct(self, x):
        values, places = ops.topk(self.gate(x), 2)
        weights = ops.softmax(values, -1)
        chosen = ops.one_hot(places, 3, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
        share = (chosen * weights.expand_dims(-1)).sum(axis=-2)
        results = ops.stack([expert(x) for expert in self.experts], -1)
        best = ops.where(share > 0.5, share, ops.zeros_like(share))
        return (results * share.unsqueeze(-2)).sum(-1), mint.sum(best)


def router():
    return Router(), lambda seed: ((floats(seed, 5, 4),), {})


MODELS = {
    "llama": small_llama,
    "tied llama": lambda: small_llama(tie_word_embeddings=True),
    "mlp": mlp,
    "classifier": classifier,
    "encoder": encoder,
    "structures": structures,
    "shared": shared,
    "closure": lambda: (Closure(), lambda seed: ((floats(seed, 2, 3),), {})),
    "recurrent": recurrent,
    "router": router,
}
