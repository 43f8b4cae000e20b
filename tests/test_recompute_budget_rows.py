"""The table of a budget: its rows add up, and bytes stand where what is computed again frees them."""

import pytest
from mindspore import nn, ops
from test_recompute_gradients import INPUTS, Net, llama, sharded

from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.recompute import recompute
from mindformers_core.recompute.budget import rows_of
from mindformers_core.recompute.operator_names import operator_texts
from mindformers_core.tensor_parallel import prepare, shard

one_rank = pytest.mark.usefixtures("one_rank")
BESIDES = "kept in their place, to compute from"


class Block(nn.Cell):
    """Attention in four heads: transposes and products that take views, and keep copies of them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Dense(16, 16) for _ in range(4))

    def construct(self, x):
        b, s, _ = x.shape
        q, k, v = (ops.reshape(linear(x), (b, s, 4, 4)) for linear in (self.q, self.k, self.v))
        weights = ops.softmax(ops.matmul(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1)), -1)
        return x + self.o(ops.matmul(weights, v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3).reshape(b, s, 16))


class Mixer(nn.Cell):
    """Two blocks; gives a loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([Block() for _ in range(2)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def chosen(net, inputs):
    """`(Choice, rows, key -> Mark)` of a Cell under a budget."""
    frame = prepare(net, *inputs).frame
    activations, names = net.__dict__["_sharding"][0].activations, operator_texts(frame)
    choice = activations.choices[frame]
    rows = rows_of(choice, lambda key: names.get(key, "a redistribution"))
    return choice, rows, activations.explained(frame).marks


def check_sums(choice, rows, marks):
    """Rows add up to the sums of the choice; bytes are those of the marks that `explain` shows, and what is kept in
    their place has a row of its own."""
    assert sum(nbytes for _, nbytes, _ in rows) == choice.all_bytes - choice.saved_bytes > 0
    assert sum(flops for _, _, flops in rows) == choice.flops
    assert all(nbytes or flops for _, nbytes, flops in rows)
    assert {part.key: part.saved_bytes for part in choice.parts} == {
        key: mark.nbytes for key, mark in marks.items() if mark.kind == "recomputed"
    }
    instead = sum(mark.nbytes for mark in marks.values() if mark.kind == "kept for others")
    assert [-nbytes for name, nbytes, _ in rows if name == BESIDES] == [instead] * bool(instead)


@one_rank
@pytest.mark.parametrize("budget", [0.95, 0.9, 0.7, 0.5, 0.4])
@pytest.mark.parametrize("make", [Mixer, Net, llama])
def test_rows_add_up(make, budget):
    inputs = (tensor_meta((4, 8, 16), "float32"),) if make is Mixer else INPUTS[make]()
    check_sums(*chosen(recompute(sharded(make), budget=budget), inputs))


@one_rank
def test_copies_of_views_stand_where_they_are_freed():
    """What costs nothing, and frees a copy of 2 KiB that a product keeps of it, is a row with these bytes."""
    _, rows, _ = chosen(recompute(sharded(Mixer), budget=0.9), (tensor_meta((4, 8, 16), "float32"),))
    assert rows == [(f"layers.0.{name}.Reshape[0]", 2048, 0) for name in "qkv"]


@pytest.mark.parametrize("budget", [0.6, 0.3])
def test_rows_add_up_on_two_ranks(budget):
    """Where redistributions are computed again, and something is kept in the place of what is computed from it."""
    shutdown()
    init_distributed("fake", world_size=2)
    try:
        net = shard(llama().set_train(), init_device_mesh((1, 2), ("dp", "tp")))
        choice, rows, marks = chosen(recompute(net, budget=budget), INPUTS[llama]())
    finally:
        shutdown()
    check_sums(choice, rows, marks)
