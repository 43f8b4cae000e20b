"""Models of few layers: an MLP, several heads, a mixture of experts, a recurrent cell, two towers."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer

from mindformers_core.layout import layout
from models.example import Example, columns, first, floats, ids, rows

__all__ = ["EXAMPLES"]

BATCH = 8


class Regression(nn.Cell):
    """An MLP, and the square of its error."""

    def __init__(self):
        super().__init__()
        layers = nn.Dense(8, 16), nn.ReLU(), nn.Dropout(p=0.0), nn.Dense(16, 8), nn.LayerNorm((8,)), nn.Identity()
        self.layers = nn.SequentialCell(*layers, nn.Dense(8, 4))
        self.loss = nn.MSELoss()

    def construct(self, x, target):
        return self.loss(self.layers(x), target)


def regression_plan(axes):
    inputs = {"x": layout(axes.batch), "target": layout(axes.batch)}
    return {"": {"input": inputs, "output": layout()}, "layers.0": columns(axes), "layers.3": rows(axes)}


class ManyHeads(nn.Cell):
    """One trunk, three heads; a tuple comes out with a tuple and a dict in it, and what is no tensor."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Dense(8, 16, activation="relu")
        self.kind, self.place, self.height = nn.Dense(16, 4), nn.Dense(16, 8), nn.Dense(16, 1)

    def construct(self, x, kind, targets):
        hidden = self.trunk(x)
        place, height = self.place(hidden), self.height(hidden).squeeze(-1)
        logits = self.kind(hidden)
        wrong = ops.smooth_l1_loss(place, targets["place"], reduction="mean")
        loss = ops.cross_entropy(logits, kind) + 0.5 * wrong + ops.square(height - targets["height"]).mean()
        return loss, (logits, place), {"height": height, "classes": logits.shape[-1], "none": None}


def heads_plan(axes):
    inputs = {name: layout(axes.batch) for name in ("x", "kind", "targets")}
    return {
        "": {"input": inputs, "output": (layout(),)},
        "trunk": columns(axes),
        "kind": rows(axes),
        "place": columns(axes),
    }


def heads_inputs(seed):
    targets = {"place": floats(seed + 2, BATCH, 8), "height": floats(seed + 3, BATCH)}
    return (floats(seed, BATCH, 8), ids(seed + 1, 4, BATCH), targets), {}


class Experts(nn.Cell):
    """A dense mixture of experts: all compute every token, weighted by its best two."""

    def __init__(self, size=8, inner=16, experts=4):
        super().__init__()
        self.experts = experts
        self.gate = nn.Dense(size, experts, has_bias=False)
        self.up = Parameter(initializer(Normal(0.3), (experts, size, inner)))
        self.down = Parameter(initializer(Normal(0.3), (experts, inner, size)))

    def construct(self, x):
        values, places = ops.topk(ops.softmax(self.gate(x), -1), 2)
        weights = values / values.sum(-1, keepdims=True)
        chosen = ops.one_hot(places, self.experts, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))
        share = (chosen * weights.expand_dims(-1)).sum(axis=-2)
        results = ops.matmul(ops.silu(ops.matmul(x, self.up)), self.down)
        return (results * share.transpose(1, 0).unsqueeze(-1)).sum(0), share


class Routed(nn.Cell):
    """The experts between two linear layers, and a loss that evens their load."""

    def __init__(self):
        super().__init__()
        self.first, self.experts, self.last = nn.Dense(6, 8), Experts(), nn.Dense(8, 4)

    def construct(self, x, target):
        hidden = self.first(x)
        mixed, share = self.experts(hidden)
        load = mint.mean(share, 0)
        uneven = mint.sum(ops.where(load > 0.1, load * load, ops.zeros_like(load)))
        return ops.mean(ops.square(self.last(hidden + mixed) - target)) + 0.1 * uneven


def routed_plan(axes):
    inputs = {"x": layout(axes.batch), "target": layout(axes.batch)}
    cut = {"up": layout(axes.tensor), "down": layout(axes.tensor)}
    return {"": {"input": inputs, "output": layout()}, "experts": {"weight": cut}, "last": rows(axes)}


class Recurrent(nn.Cell):
    """A recurrent cell, unrolled over the dim of time, with constants of its own and methods of tensors."""

    def __init__(self, size=8):
        super().__init__()
        self.size = size
        self.inner, self.outer = nn.Dense(4, 4 * size), nn.Dense(size, 4 * size, has_bias=False)
        self.head = nn.Dense(size, 4)

    def construct(self, x, target):
        state = memory = ops.zeros((x.shape[0], self.size), x.dtype)
        for step in range(x.shape[1]):
            i, f, g, o = ops.split(self.inner(x[:, step]) + self.outer(state), self.size, -1)
            memory = memory * ops.sigmoid(f) + ops.sigmoid(i) * ops.tanh(g)
            state = ops.sigmoid(o) * ops.tanh(memory)
        error = (self.head(state) - target).abs().max(axis=1).mean() + state.sum(axis=-1, keepdims=True).mean()
        return error, state.transpose(1, 0), memory.astype(ms.float16).astype(ms.float32), state.argmax(0)


def recurrent_plan(axes):
    inputs = {"x": layout(axes.batch), "target": layout(axes.batch)}
    return {
        "": {"input": inputs, "output": (layout(),)},
        "inner": columns(axes),
        "outer": columns(axes, bias=False),
        "head": rows(axes),
    }


class Tower(nn.Cell):
    """Words (batch, length) to one vector of length 1 each."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.up, self.down = nn.Dense(8, 16, activation="tanh"), nn.Dense(16, 8)

    def construct(self, words):
        vectors = self.down(self.up(self.words(words).mean(1)))
        return vectors / ops.sqrt(ops.sum(vectors * vectors, -1, keepdim=True) + 1e-6)


class TwoTowers(nn.Cell):
    """Questions and answers through one encoder; the right answer is the one at the same place in the batch."""

    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.scale = Parameter(Tensor(np.float32([3.0])), name="scale")

    def construct(self, question, answer):
        first, second = self.tower(question), self.tower(answer)
        logits = ops.matmul(first, second.T) * self.scale
        return ops.cross_entropy(logits, ops.arange(question.shape[0]).astype(ms.int32))


def towers_plan(axes):
    inputs = {"question": layout(axes.batch), "answer": layout(axes.batch)}
    return {
        "": {"input": inputs, "output": layout()},
        "tower.words": {"weight": layout(axes.tensor)},
        "tower.up": columns(axes),
        "tower.down": rows(axes),
    }


EXAMPLES = {
    "mlp": Example(
        Regression, lambda seed: ((floats(seed, BATCH, 8), floats(seed + 1, BATCH, 4)), {}), regression_plan
    ),
    "heads": Example(ManyHeads, heads_inputs, heads_plan, first),
    "experts": Example(Routed, lambda seed: ((floats(seed, BATCH, 6), floats(seed + 1, BATCH, 4)), {}), routed_plan),
    "recurrent": Example(
        Recurrent,
        lambda seed: ((floats(seed, BATCH, 3, 4), floats(seed + 1, BATCH, 4)), {}),
        recurrent_plan,
        first,
    ),
    "two towers": Example(
        TwoTowers, lambda seed: ((ids(seed, 32, BATCH, 4), ids(seed + 1, 32, BATCH, 6)), {}), towers_plan
    ),
}
