"""Plans that are cut into functions which are compiled each by itself: which these are, what goes in and out."""

import mindspore as ms
import pytest
from mindspore import nn, ops
from support.small_cells import cell_of

from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import OperatorPlan, called_graphs
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard

pytestmark = pytest.mark.usefixtures("one_rank")


def layer():
    """A Cell with two others, and operators between them."""

    def construct(self, x, scale):
        return x + self.mlp(ops.tanh(x + self.attention(x) * scale))

    return cell_of(construct, attention=nn.Dense(2, 2), mlp=nn.Dense(2, 2))


def model():
    """Two layers, between an embedding and a head."""

    def construct(self, ids):
        x = ops.tanh(self.embedding(ids))
        scale = ops.arange(2).astype(x.dtype)
        for layer in self.layers:
            x = layer(x, scale)
        return self.head(ops.tanh(x))

    layers = nn.CellList([layer(), layer()])
    return cell_of(construct, embedding=nn.Embedding(4, 2), head=nn.Dense(2, 4), layers=layers)


LAYERS = ["model.layers.0", "model.layers.1"]
UNITS = [*LAYERS, "model.embedding", "model.head"]
FIRST, SECOND = "model.layers.0 part1", "model.layers.1 part1"
BEFORE, AFTER, LOSS = "model part1", "model part2", " part1"


def cut_program(again=(), units=()):
    """The program of a model that is cut."""
    outer = cell_of(lambda self, ids: self.loss(self.model(ids)).mean(), model=model(), loss=nn.ReLU())
    net = shard(outer.set_train(), init_device_mesh((1,), ("dp",)))
    tree = tree_of(net)
    with tree.for_compiled((tuple(again), tuple(units))):
        return tree.program("", (tensor_meta((2, 3), "int32"),), {})


def compiled_functions(plan, graph):
    """Path and number of each function that is compiled by itself -> how, in the order of the calls."""
    if plan.compiled:
        part = plan.graph.class_name.partition("Part")[2]
        return {graph.path + (f" part{part}" if part else ""): plan.compiled}
    found = {}
    for call, inner in called_graphs(plan, graph):
        found |= compiled_functions(call.plan, inner)
    return found


@pytest.mark.parametrize(
    "units, recomputed, again, once",
    [
        ([], LAYERS, LAYERS, [BEFORE, AFTER, LOSS]),
        ([], LAYERS[:1], LAYERS[:1], [BEFORE, AFTER, LOSS]),
        ([], ["model"], ["model"], [LOSS]),
        ([], [""], ["model", "loss"], []),
        ([], [f"{LAYERS[1]}.mlp"], [f"{LAYERS[1]}.mlp"], [BEFORE, SECOND, AFTER, LOSS]),
        (UNITS, [], [], UNITS),
        (UNITS, LAYERS, LAYERS, UNITS[2:]),
        (UNITS, ["model"], UNITS, []),
        (UNITS, [f"{LAYERS[0]}.mlp"], [f"{LAYERS[0]}.mlp"], [FIRST, *UNITS[1:]]),
    ],
)
def test_which_functions_are_compiled(units, recomputed, again, once):
    """What holds a recomputed Cell isn't compiled, but in parts; weights that come and go are there for one unit."""
    program = cut_program(recomputed, units)
    found = compiled_functions(program.generated, program.graph)
    assert found == dict.fromkeys(again, "again") | dict.fromkeys(once, "once")


def test_what_goes_into_a_part_and_comes_out():
    """All that is taken from before, and all that is needed after; constants stay out."""
    layer = cut_program([f"{path}.attention" for path in LAYERS]).generated.calls[0].plan.calls[1].plan
    (_, part) = layer.calls
    assert [value.hint for value, _ in part.lifted] == ["attention", "scale", "x"]
    assert len(part.outputs) == 1 and part.plan.takes_weights
    assert [use.local for use in part.plan.graph.parameters] == []  # those of mlp are passed to its function
    assert part.plan.calls[0].node.child == "mlp"


def test_a_single_operator_is_no_part():
    """`tanh` after the recomputed layers, before the recomputed head."""
    program = cut_program([*LAYERS, "model.head"])
    model = program.generated.calls[0].plan
    assert [call.node.child for call in model.calls] == ["", "layers.0", "layers.1", "head"]
    operators = [entry.node.operator for entry in model.instructions if isinstance(entry, OperatorPlan)]
    assert operators[-1] == "Tanh"


class CutMask(nn.Cell):
    """Takes a constant cut."""

    def shard(self, config=None):
        return {"mask": layout("tp")}, layout("tp"), None

    def construct(self, mask):
        return ops.exp(mask)


def test_what_is_made_of_constants_stays_out_with_their_moves():
    """A constant that a Cell gives is cut over `tp`, and something else is made of it."""

    def masked(self, x):
        x = ops.tanh(self.dense(x)) * 2
        mask = self.mask(8)
        return self.dense(x * self.cut(mask) * 2 + mask).square().mean()

    mask = cell_of(lambda self, length: ops.cos(ops.arange(length).astype(ms.float32)))
    net = cell_of(masked, dense=nn.Dense(8, 8), mask=mask, cut=CutMask())
    shutdown()
    init_distributed("fake", world_size=2)
    tree = tree_of(shard(net.set_train(), init_device_mesh((1, 2), ("dp", "tp"))))
    with tree.for_compiled((("dense",), ())):
        plan = tree.program("", (tensor_meta((4, 8), "float32"),), {}).generated
    assert [call.node.child for call in plan.calls if call.plan.compiled] == ["dense", "", "dense", ""]
    assert not any(value.constant for call in plan.calls if call.node.child == "" for value in call.node.outputs)
