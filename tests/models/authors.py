"""Models of today's families as their authors write them on one card; each returns its loss."""

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from mindformers_core.layout import layout
from models.author_images import Autoencoder, Diffusion, ResNet, Transformer, UNet, Views
from models.author_language import Bert, CapacityExperts, Recogniser, Tagger
from models.example import Example, floats, ids

__all__ = ["AUTHORS"]

BATCH, SEED = 4, 11


def parameter(name, *shape, scale=0.3):
    """A Parameter of normal numbers, which depend on its name."""
    values = np.random.default_rng([SEED, *name.encode()]).normal(size=shape) * scale
    return Parameter(Tensor(values.astype(np.float32)), name=name)


class StateSpace(nn.Cell):
    """Mamba-2's state-space dual form: a causal convolution, decays as sums of logarithms, one masked product."""

    def __init__(self, size=8, heads=2, state=4):
        super().__init__()
        self.heads, self.state = heads, state
        self.enter = nn.Dense(size, 2 * size + 2 * state + heads)
        self.conv = parameter("conv", size, 1, 3)
        self.decay, self.skip = parameter("decay", heads), parameter("skip", heads)
        self.leave = nn.Dense(size, size)

    def construct(self, x):
        batch, length, size = x.shape
        z, u, b, c, step = ops.split(self.enter(x), [size, size, self.state, self.state, self.heads], 2)
        u = ops.conv1d(ops.pad(u.swapaxes(1, 2), (2, 0)), self.conv, groups=size).swapaxes(1, 2)
        u = ops.silu(u).reshape(batch, length, self.heads, -1)
        step = ops.softplus(step)
        logs = ops.cumsum(-step * ops.exp(self.decay), 1)
        gaps = logs.expand_dims(2) - logs.expand_dims(1)
        mask = ops.tril(ops.ones((length, length), x.dtype)).reshape(1, length, length, 1)
        weights = ops.exp(gaps * mask) * mask * ops.matmul(c, b.swapaxes(1, 2)).expand_dims(3)
        y = ops.matmul(weights.transpose(0, 3, 1, 2), (u * step.expand_dims(3)).transpose(0, 2, 1, 3))
        y = y.transpose(0, 2, 1, 3) + u * self.skip.reshape(1, 1, -1, 1)
        return (self.leave(y.reshape(batch, length, size) * ops.silu(z)) ** 2).mean()


class Recommender(nn.Cell):
    """DLRM: bags of embeddings summed by segments, their products with dense features, a loss of logits."""

    def __init__(self, size=4):
        super().__init__()
        self.table = parameter("table", 32, size)
        self.dense, self.top = nn.Dense(6, size), nn.Dense(size + 1, 1)

    def construct(self, features, clicks, rows, label):
        bags = ops.unsorted_segment_sum(ops.gather(self.table, clicks, 0), rows, 4)
        dense = ops.relu(self.dense(features))
        logits = self.top(ops.cat((dense, (bags * dense).sum(1, keepdims=True)), 1)).squeeze(1)
        return ops.binary_cross_entropy_with_logits(logits, label, ops.ones_like(label), ops.ones_like(label))


class GraphNetwork(nn.Cell):
    """Messages along edges, added up at their targets, divided by degrees; a node's class."""

    def __init__(self, size=8):
        super().__init__()
        self.message, self.own, self.head = nn.Dense(6, size), nn.Dense(6, size), nn.Dense(size, 4)

    def construct(self, nodes, sources, targets, label):
        messages = self.message(ops.gather(nodes, sources, 0))
        sums = ops.zeros((8, messages.shape[1]), nodes.dtype).index_add(0, targets, messages)
        degrees = ops.unsorted_segment_sum(ops.ones_like(targets).astype(nodes.dtype), targets, 8)
        hidden = ops.relu(self.own(nodes) + sums / ops.maximum(degrees, 1.0).expand_dims(1))
        return ops.cross_entropy(self.head(hidden), label)


class Contrastive(nn.Cell):
    """CLIP: two towers, unit vectors, every image against every text, a temperature that is learned."""

    def __init__(self, size=8):
        super().__init__()
        self.image, self.text = nn.Dense(12, size), nn.Embedding(16, size)
        self.temperature = parameter("temperature", 1)

    def construct(self, image, text):
        a = ops.L2Normalize(axis=1)(self.image(image))
        b = ops.L2Normalize(axis=1)(self.text(text).mean(1))
        logits = ops.matmul(a, b.T) * ops.exp(self.temperature)
        labels = ops.arange(logits.shape[0]).astype(text.dtype)
        return (ops.cross_entropy(logits, labels) + ops.cross_entropy(logits.T, labels)) / 2


class SparseExperts(nn.Cell):
    """A router's two best experts of each token, tokens of an expert by one-hot rows, results added back by scatter."""

    def __init__(self, size=8, experts=4):
        super().__init__()
        self.experts = experts
        self.router = nn.Dense(size, experts, has_bias=False)
        self.up, self.down = parameter("up", experts, size, 2 * size), parameter("down", experts, 2 * size, size)

    def construct(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        scores = ops.softmax(self.router(tokens), -1)
        weights, chosen = ops.topk(scores, 2)
        shares = weights / weights.sum(-1, keepdims=True)
        gates = ops.tensor_scatter_elements(ops.zeros_like(scores), chosen, shares, 1, "add")
        hidden = ops.silu(ops.matmul(tokens.expand_dims(0), self.up))
        outputs = ops.matmul(hidden, self.down)
        return ((outputs * gates.T.expand_dims(2)).sum(0) ** 2).mean()


class SpeechStem(nn.Cell):
    """Whisper's stem: two convolutions over time in `mint`, GELU, positions, a norm, logits of words."""

    def __init__(self, size=8):
        super().__init__()
        self.conv1, self.conv2 = parameter("conv1", size, 6, 3), parameter("conv2", size, size, 3)
        self.positions = parameter("positions", 8, size)
        self.norm, self.head = nn.LayerNorm((size,)), nn.Dense(size, 16)

    def construct(self, sound, label):
        x = ops.gelu(ops.conv1d(sound, self.conv1, pad_mode="pad", padding=1))
        x = ops.gelu(ops.conv1d(x, self.conv2, stride=2, pad_mode="pad", padding=1))
        x = self.norm(x.swapaxes(1, 2) + self.positions)
        return ops.cross_entropy(self.head(x).reshape(-1, 16), label.reshape(-1))


class Conformer(nn.Cell):
    """A convolution module between two half steps of feed-forward: gates, depthwise convolution, batch norm, Swish."""

    def __init__(self, size=8):
        super().__init__()
        self.norms = nn.CellList([nn.LayerNorm((size,)) for _ in range(3)])
        self.batch_norm = nn.BatchNorm1d(size)
        self.up, self.down = nn.Dense(size, 4 * size), nn.Dense(4 * size, size)
        self.gated, self.point = nn.Dense(size, 2 * size), nn.Dense(size, size)
        self.depth = nn.Conv1d(size, size, 3, group=size, has_bias=True)

    def construct(self, x):
        x = x + 0.5 * self.down(ops.silu(self.up(self.norms[0](x))))
        y = ops.glu(self.gated(self.norms[1](x)), -1)
        y = self.batch_norm(self.depth(y.swapaxes(1, 2))).swapaxes(1, 2)
        x = x + self.point(ops.silu(y))
        return (self.norms[2](x) ** 4).mean()


class LatentAttention(nn.Cell):
    """MLA of DeepSeek: keys and values from one small latent vector, positions rotated in a part of their own."""

    def __init__(self, size=16, heads=4, latent=8, rotated=4):
        super().__init__()
        self.heads, self.rotated = heads, rotated
        self.q = nn.Dense(size, heads * 2 * rotated, has_bias=False)
        self.kv_down = nn.Dense(size, latent + rotated, has_bias=False)
        self.kv_up = nn.Dense(latent, heads * 2 * rotated, has_bias=False)
        self.leave = nn.Dense(heads * rotated, size, has_bias=False)

    def rotate(self, x):
        angles = ops.arange(x.shape[2]).astype(x.dtype).expand_dims(1) * 0.3
        a, b = ops.chunk(x, 2, -1)
        return ops.cat((a * ops.cos(angles) - b * ops.sin(angles), b * ops.cos(angles) + a * ops.sin(angles)), -1)

    def construct(self, x):
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, self.heads, -1).swapaxes(1, 2)
        latent, k_rotated = ops.split(self.kv_down(x), [8, self.rotated], -1)
        k, v = ops.chunk(self.kv_up(latent).reshape(batch, length, self.heads, -1).swapaxes(1, 2), 2, -1)
        q, q_rotated = ops.chunk(q, 2, -1)
        k_rotated = self.rotate(k_rotated.expand_dims(1))
        scores = ops.matmul(q, k.swapaxes(2, 3)) + ops.matmul(self.rotate(q_rotated), k_rotated.swapaxes(2, 3))
        mask = ops.triu(ops.ones((length, length), x.dtype), 1) * -1e4
        mixed = ops.matmul(ops.softmax(scores * 0.35 + mask, -1), v)
        return (self.leave(mixed.swapaxes(1, 2).reshape(batch, length, -1)) ** 2).mean()


class LinearAttention(nn.Cell):
    """Attention without a softmax: positive features, sums of keys times values, normalised."""

    def __init__(self, size=8, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Dense(size, size), nn.Dense(size, size), nn.Dense(size, size)

    def construct(self, x):
        batch, length, size = x.shape
        q, k, v = [f(x).reshape(batch, length, self.heads, -1).swapaxes(1, 2) for f in (self.q, self.k, self.v)]
        q, k = ops.elu(q) + 1, ops.elu(k) + 1
        context = ops.matmul(k.swapaxes(2, 3), v)
        total = ops.matmul(q, k.sum(2).expand_dims(3))
        return (ops.matmul(q, context) / total).abs().mean()


class Distillation(nn.Cell):
    """A student's logits in `mint` held against a teacher's: KL divergence with a temperature, and the label's loss."""

    def __init__(self, size=8, classes=8):
        super().__init__()
        self.student, self.classes = mint.nn.Linear(size, classes), classes

    def construct(self, x, teacher, label):
        logits = self.student(x)
        soft = ops.kl_div(ops.log_softmax(logits / 2, -1), ops.softmax(teacher / 2, -1), "batchmean")
        return ops.cross_entropy(logits, label) + 4 * soft


def with_batch(names, extra=None):
    """A plan of named inputs whose first dim is the batch, and weights cut over the tensor axis: paths -> dims."""

    def plan(axes):
        inputs = {"": {"input": {name: layout(axes.batch) for name in names}, "output": layout()}}
        for path, weights in (extra or {}).items():
            cut = {name: layout(*(axes.tensor if dim else None for dim in dims)) for name, dims in weights.items()}
            inputs.setdefault(path, {})["weight"] = cut
        return inputs

    return plan


ROW, COLUMN = {"weight": (0, 1)}, {"weight": (1, 0)}
WIDE = {"weight": (1, 0), "bias": (1,)}
CHANNELS = {"weight": (1,), "bias": (1,)}


def example(make, inputs, names, weights=None):
    """An `Example` of a model with values of its own; `names` are the inputs that have the batch as first dim."""
    return Example(lambda: make().set_train(), lambda seed: (inputs(seed), {}), with_batch(names, weights))


AUTHORS = {
    "resnet": example(
        ResNet,
        lambda seed: (floats(seed, BATCH, 3, 8, 8), ids(seed, 4, BATCH)),
        ("image", "label"),
        {"blocks.0.conv1": {"weight": (1,)}, "blocks.0.conv2": {"weight": (0, 1)}},
    ),
    "unet": example(
        UNet,
        lambda seed: (floats(seed, BATCH, 3, 8, 8), floats(seed + 1, BATCH, 3, 8, 8)),
        ("image", "target"),
        {"enter": CHANNELS, "up": {"weight": (0, 1)}},
    ),
    "dit": example(Diffusion, lambda seed: (floats(seed, BATCH, 3, 4, 4),), ("image",), {"up": WIDE, "down": ROW}),
    "mamba2": example(StateSpace, lambda seed: (floats(seed, BATCH, 6, 8),), ("x",), {"leave": ROW}),
    "dlrm": example(
        Recommender,
        lambda seed: (
            floats(seed, BATCH, 6),
            ids(seed, 32, 12),
            Tensor(np.int32([0, 1, 2, 3] * 3)),
            ids(seed + 1, 2, BATCH).astype("float32"),
        ),
        ("features", "clicks", "rows", "label"),
        {"": {"table": (1, 0)}},
    ),
    "gnn": example(
        GraphNetwork,
        lambda seed: (floats(seed, 8, 6), ids(seed, 8, 20), ids(seed + 1, 8, 20), ids(seed + 2, 4, 8)),
        ("nodes", "sources", "targets", "label"),
        {"message": WIDE, "own": WIDE},
    ),
    "clip": example(
        Contrastive, lambda seed: (floats(seed, BATCH, 12), ids(seed, 16, BATCH, 5)), ("image", "text"), {"image": WIDE}
    ),
    "moe": example(SparseExperts, lambda seed: (floats(seed, BATCH, 3, 8),), ("x",), {"": {"up": (1,), "down": (1,)}}),
    "whisper": example(
        SpeechStem,
        lambda seed: (floats(seed, BATCH, 6, 16), ids(seed, 16, BATCH, 8)),
        ("sound", "label"),
        {"": {"conv1": (1,)}, "head": WIDE},
    ),
    "conformer": example(
        Conformer, lambda seed: (floats(seed, BATCH, 6, 8),), ("x",), {"up": WIDE, "down": ROW, "depth": CHANNELS}
    ),
    "mla": example(
        LatentAttention,
        lambda seed: (floats(seed, BATCH, 6, 16),),
        ("x",),
        {"q": COLUMN, "kv_up": COLUMN, "leave": ROW},
    ),
    "linear": example(
        LinearAttention, lambda seed: (floats(seed, BATCH, 6, 8),), ("x",), {name: WIDE for name in "qkv"}
    ),
    "distillation": example(
        Distillation,
        lambda seed: (floats(seed, BATCH, 8), floats(seed + 1, BATCH, 8), ids(seed, 8, BATCH)),
        ("x", "teacher", "label"),
        {"student": WIDE},
    ),
    "vae": example(Autoencoder, lambda seed: (floats(seed, BATCH, 3, 8, 8),), ("image",), {"grow": WIDE, "mean": ROW}),
    "vit": example(
        Transformer,
        lambda seed: (floats(seed, BATCH, 3, 4, 4), ids(seed, 4, BATCH)),
        ("image", "label"),
        {"mlp.0": WIDE, "mlp.2": ROW, "head": WIDE},
    ),
    "simclr": example(
        Views,
        lambda seed: (floats(seed, BATCH, 3, 8, 8), floats(seed + 1, BATCH, 3, 8, 8)),
        ("first", "second"),
        {"up": WIDE, "down": ROW},
    ),
    "bert": example(
        Bert,
        lambda seed: (ids(seed, 16, BATCH, 6), ids(seed + 1, 2, BATCH, 6), ids(seed + 2, 16, BATCH, 6)),
        ("ids", "kinds", "label"),
        {"encoder.layers.*.dense1": WIDE, "encoder.layers.*.dense2": ROW, "words": {"embedding_table": (1, 0)}},
    ),
    "gru": example(
        Tagger, lambda seed: (ids(seed, 16, BATCH, 5), ids(seed + 1, 4, BATCH, 5)), ("ids", "label"), {"head": ROW}
    ),
    "ctc": example(
        Recogniser,
        lambda seed: (floats(seed, BATCH, 6, 16), ids(seed, 7, BATCH, 3) + 1, ids(seed + 1, 3, BATCH) + 1),
        ("sound", "label", "lengths"),
        {"up": WIDE, "down": ROW, "head": WIDE},
    ),
    "gshard": example(
        CapacityExperts, lambda seed: (floats(seed, BATCH, 4, 8),), ("x",), {"": {"up": (1,), "down": (1,)}}
    ),
}
