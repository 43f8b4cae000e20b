"""Which Cells of a model are its layers, and errors for those that there aren't."""

import re

import pytest
from mindspore import mint, nn
from support.small_cells import cell_of

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute, swap
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard

pytestmark = pytest.mark.usefixtures("one_rank")


class Block(nn.Cell):
    """A user's own Cell, without Cells in it."""

    def construct(self, x):
        return x.exp().tanh()


def mlp():
    return nn.SequentialCell(nn.Dense(8, 8), nn.Tanh(), mint.nn.Linear(8, 8))


def layers_of(asked=True, **cells):
    return tree_of(sharded(**cells, settings={"full": asked})).activations.recomputed_cells


def sharded(settings=None, swapped=None, **cells):
    net = shard(cell_of(lambda self, x: x, **cells), init_device_mesh((1,), ("tp",)))
    return swap(recompute(net, **(settings or {})), **(swapped or {}))


def test_layers_are_in_lists_and_sequences_of_more_than_single_cells():
    two = nn.CellList([mlp(), mlp()])
    assert layers_of(stem=mlp(), layers=two, head=mlp()) == ["layers.0", "layers.1"]
    assert layers_of(layers=nn.CellList([nn.Dense(8, 8)])) == ["layers.0"]
    assert layers_of(layers=nn.SequentialCell(Block(), Block()), head=mlp()) == ["layers.0", "layers.1"]
    assert layers_of([1], blocks=nn.SequentialCell(mlp(), mlp(), nn.GELU())) == ["blocks.1"]
    assert layers_of(named=nn.CellDict([("first", Block()), ("second", Block())])) == ["named.first", "named.second"]
    assert layers_of([0], one=nn.CellList([mlp()]), other=nn.CellList([mlp(), mlp()])) == ["one.0", "other.0"]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"settings": {"full": [1, 4]}}, "recompute.full"),
        ({"swapped": {"layer_swap": [{"layers": [4]}]}}, "swap.layer_swap[0].layers"),
        ({"swapped": {"op_swap": {"*.dense": {"layers": [4]}}}}, "swap.op_swap['*.dense'].layers"),
    ],
)
def test_a_number_of_no_layer(given, where):
    head = nn.SequentialCell(nn.Dense(8, 8), nn.GELU(), nn.Dense(8, 8), nn.GELU(), nn.Dense(8, 1))
    with pytest.raises(ValueError, match=f"^{re.escape(where)}: there is no layer 4: .* 0 to 1, 'layers.0-1'$"):
        sharded(layers=nn.CellList([mlp(), mlp()]), head=head, **given)
    lists = {f"list{number}": nn.CellList([mlp() for _ in range(number % 2 + 1)]) for number in range(6)}
    expected = "the layers are 0 to 1, 'list0.0', 'list1.0-1', 'list2.0', 'list3.0-1', 'list4.0', …"
    with pytest.raises(ValueError, match=f"there is no layer 4: {expected}$"):
        sharded(**lists, **given)


@pytest.mark.parametrize(
    "given", [{"settings": {"full": True}}, {"swapped": {"layer_swap": [{"layers": True}]}}], ids=["full", "layer_swap"]
)
def test_a_model_without_layers(given):
    what = r"in a SequentialCell with more in it than single Cells of MindSpore, such as Dense and GELU"
    with pytest.raises(ValueError, match=f": the model has no layers, .*{what}; its Cells are 'stem', 'head', which s"):
        sharded(stem=nn.Dense(8, 8), head=mlp(), **given)
