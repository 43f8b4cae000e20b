"""Small models whose activations are recomputed or swapped: their inputs, and bits of their steps."""

from functools import cache

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from models import TINY_LLAMA
from support.recomputations import count_recomputations

from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.recompute import recompute
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import hsdp, value_and_grad

CONFIG = LlamaConfig(**TINY_LLAMA, num_hidden_layers=3)
IDS = np.random.default_rng(1).integers(0, 64, (2, 2, 8)).astype(np.int32)


class Block(nn.Cell):
    """Dropout twice, once in a Cell; views, several results of an operator, and a result that is a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.dropout = nn.Dense(8, 16), nn.Dense(8, 8), nn.Dropout(p=0.3)

    def construct(self, x):
        h = ops.tanh(self.first(x))
        a, b = ops.split(h, 8, -1)
        gate = self.dropout(ops.sigmoid(a))
        mixed = ops.transpose(gate * b, (1, 0))
        mixed = ops.softmax(mixed, -1)
        mixed = ops.transpose(mixed, (1, 0))
        y = x + ops.dropout(self.second(mixed), 0.2)
        return ops.reshape(ops.exp(y * 0.1), (4, 8))


class Net(nn.Cell):
    """Blocks in a row; gives a loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Block() for _ in range(3)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class HalfLinear(nn.Cell):
    """Casts and turns its weight, which takes no tensors but it."""

    def __init__(self, width, outputs):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((outputs, width), np.float32)), name="weight")

    def construct(self, x):
        half = self.weight.astype(ms.float16)
        return ops.matmul(x, ops.transpose(half, (1, 0)))


class Half(nn.Cell):
    """Layers that compute in float16, a norm that casts to the dtype that there is, a table and it turned; a loss."""

    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(np.zeros((16, 8), np.float32)), name="table")
        self.layers = nn.CellList([nn.SequentialCell(HalfLinear(8, 24), nn.Tanh(), HalfLinear(24, 8)) for _ in "abc"])
        self.norm = nn.LayerNorm((8,))

    def construct(self, ids):
        x = self.table[ids].astype(ms.float16)
        for layer in self.layers:
            x = x + layer(x)
        return ops.matmul(self.norm(x.astype(ms.float32)), self.table.T).square().mean()


class Views(nn.Cell):
    """Views that several operators copy, each for itself, whose gradients are added in that order; gives a loss."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(8, 8)
        self.scale = Parameter(Tensor(np.zeros((2, 6, 2, 4), np.float32)), name="scale")

    def construct(self, x):
        heads = ops.transpose(ops.reshape(self.dense(x), (2, 2, 2, 4)), (0, 2, 1, 3))
        repeated = ops.concat((heads, heads, heads), 1)
        part = ops.chunk(repeated, 2, -1)[0]
        return (ops.tanh(part) * ops.exp(part) * ops.sin(part)).sum() + ops.exp(repeated * self.scale * 9).sum()


class Cast(nn.Cell):
    """Layers that cast to the dtype that there is, as norms do, which gives the same tensor back; a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(8, 8) for _ in "ab"])

    def construct(self, x):
        for layer in self.layers:
            hidden = ops.tanh(layer(x)).astype(ms.float32)
            x = x + ops.exp(ops.sin(hidden))
        return x.square().mean()


def drawn(net):
    random = np.random.default_rng(0)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.3))
    return net


def sharded(make):
    return shard(drawn(make()).set_train(), init_device_mesh((1, 1), ("dp", "tp")))


def llama():
    return LlamaForCausalLM(CONFIG)


INPUTS = {
    llama: lambda: tuple(map(Tensor, IDS)),
    Net: lambda: (Tensor(np.eye(4, 8, dtype=np.float32)),),
    Half: lambda: (Tensor(IDS[0] % 16),),
    Cast: lambda: (Tensor(np.eye(4, 8, dtype=np.float32)),),
    Views: lambda: (Tensor(np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)),),
}


def steps_of(net, make, compiled=False):
    """Loss and gradients of two steps under `hsdp()`, as bits, and how many calls ran again."""
    gradient_of = value_and_grad(hsdp(net), compiled)
    ms.manual_seed(3)
    found = []
    with count_recomputations() as counted:
        for _ in range(2):
            loss, gradients = gradient_of(*INPUTS[make]())
            found += [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    return found, sum(counted.values())


def step(make, compiled=False, **settings):
    return steps_of(recompute(sharded(make), **settings), make, compiled)


@cache
def without(make, compiled=False):
    """Loss and gradients of two steps in which nothing runs again."""
    found, again = step(make, compiled)
    assert again == 0
    return found


def equal(found, expected):
    return all(map(np.array_equal, found, expected))
