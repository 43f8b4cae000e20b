"""Recomputed: losses and gradients are bit by bit what they are without, and what was chosen runs twice, once."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.recompute import recompute
from mindformers_core.recompute.keeping import count_recomputations
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
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


def drawn(net):
    random = np.random.default_rng(0)
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32) * 0.3))
    return net


def sharded(make):
    return shard(drawn(make()).set_train(), init_device_mesh((1, 1), ("dp", "tp")))


def llama():
    return LlamaForCausalLM(CONFIG)


INPUTS = {llama: lambda: tuple(map(Tensor, IDS)), Net: lambda: (Tensor(np.eye(4, 8, dtype=np.float32)),)}


def step(make, compiled=False, **settings):
    """Loss and gradients of two steps, as bits, and how many calls ran again."""
    net = hsdp(recompute(sharded(make), **settings))
    gradient_of = value_and_grad(net, compiled)
    ms.manual_seed(3)
    found = []
    with count_recomputations() as counted:
        for _ in range(2):
            loss, gradients = gradient_of(*INPUTS[make]())
            found += [loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    return found, sum(counted.values()), net


def equal(found, expected):
    return all(map(np.array_equal, found, expected))


CELLS = [
    (llama, {"full": True}),
    (llama, {"full": "1-2"}),
    (llama, {"select": ["layers.*.self_attn", "layers.0.mlp"]}),
    (llama, {"full": True, "exclude": ["layers.1"]}),
    (Net, {"full": [0, 2]}),
    (Net, {"select": "blocks.1"}),
]
OPERATORS = [
    (llama, {"select": ["*.softmax", "*.mlp.silu", "layers.0-1.*.*.Dense"]}),
    (llama, {"select": "**.*"}),
    (llama, {"full": True, "exclude": ["*.softmax", "layers.*.mlp.mul"]}),
    (Net, {"select": ["*.tanh", "*.split", "blocks.0-1.h", "*.mixed[0]"]}),
    (Net, {"full": True, "exclude": ["*.dropout"]}),
    (llama, {"budget": 0.5}),
    (Net, {"budget": 0.4, "exclude": "*.softmax"}),
]


@pytest.mark.parametrize(
    "make, settings, compiled", [(*case, False) for case in CELLS] + [(*CELLS[number], True) for number in (0, 3, 4)]
)
def test_whole_cells_give_the_same_bits(make, settings, compiled):
    expected, none, _ = step(make, compiled)
    found, count, _ = step(make, compiled, **settings)
    assert equal(found, expected)
    assert none == 0 and (compiled or count > 0)


@pytest.mark.parametrize("make, settings", OPERATORS)
def test_operators_give_the_same_bits(make, settings):
    expected, _, _ = step(make)
    found, count, _ = step(make, **settings)
    assert equal(found, expected)
    assert count > 0


@pytest.mark.parametrize("make, settings", [OPERATORS[0], *OPERATORS[2:]])
def test_operators_in_a_graph_are_an_error(make, settings):
    with pytest.raises(ValueError, match="a graph recomputes whole Cells"):
        step(make, compiled=True, **settings)
