"""What hooks and plans declare: their forms, which one wins, and errors."""

import numpy as np
import pytest
from mindspore import Layout, Parameter, Tensor, nn, ops
from support.small_cells import FeedForward, Linear, Net

from mindformers_core.layout import Layout as OurLayout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.propagation.boundaries import Declaration, OperatorDeclaration
from mindformers_core.sharding.declare import collect_declarations
from mindformers_core.tensor_parallel import shard

pytestmark = pytest.mark.usefixtures("rank_0_of_4")
MESH = init_device_mesh((2, 2), ("dp", "tp"))
MESH_LAYOUT = OurLayout.on(MESH)
COLUMNS, ROWS = layout(None, "tp"), layout("tp", None)


def weights_of(hook):
    """What a hook declares, normalised."""
    return collect_declarations(Linear(hook))[""]


def test_single_tuple_and_dict_forms():
    assert weights_of((COLUMNS, ROWS, COLUMNS)) == weights_of(((COLUMNS,), (ROWS,), (COLUMNS,)))
    declared = weights_of(({"x": COLUMNS, "scale": None}, {"logits": ROWS}, {"bias": layout("tp")}))
    assert (declared.inputs, declared.outputs, declared.weights) == (
        {"x": COLUMNS},
        {"logits": ROWS},
        {"bias": layout("tp")},
    )
    assert weights_of(((None, ROWS), None, (COLUMNS, layout("tp")))).inputs == {"scale": ROWS}
    assert weights_of((None, None, (COLUMNS, layout("tp")))).weights == {"weight": COLUMNS, "bias": layout("tp")}
    assert weights_of(lambda config: (None, None, config)).weights == {}
    assert collect_declarations(Linear(lambda config: (None, None, config)), COLUMNS)[""].weights == {"weight": COLUMNS}


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (None, r"root Cell \(Linear\).*should return \(input_layout, output_layout, weight_layout\).*not None"),
        ((COLUMNS, ROWS), "should return.*not"),
        ([None, None, None], "should return.*not"),
        (("tp", None, None), "input layout of 'x' is 'tp': write layout"),
        ((None, None, {"weight": ("tp", None)}), r"weight layout of 'weight' is \('tp', None\): write layout"),
        (({"y": COLUMNS}, None, None), r"input layout names 'y', but construct\(\) takes x, scale"),
        (
            (None, None, {"wieght": COLUMNS}),
            "names 'wieght', but the Cell's parameters are weight, bias.*did you mean 'weight'",
        ),
        (((COLUMNS,) * 3, None, None), r"has 3 entries, but construct\(\) takes x, scale"),
        ((None, None, layout("tp", "tp")), "'tp' is used twice"),
        ((None, None, layout("tq")), "unknown mesh axis 'tq'.*did you mean 'tp'"),
        ((None, None, layout("tp", "dp", None)), r"parameter 'weight' of the root Cell \(Linear\).*3 entries.*2 dims"),
    ],
)
def test_hooks_that_return_nonsense(hook, message):
    with pytest.raises((TypeError, ValueError), match=message):
        shard(Linear(hook), MESH)


def test_a_weight_that_does_not_divide():
    cell = Linear((None, None, {"bias": layout("tp")}))
    cell.bias = Parameter(Tensor(np.zeros(7, np.float32)))
    net = nn.SequentialCell([cell])
    with pytest.raises(
        ValueError, match=r"parameter 'bias' of Cell '0' \(Linear\) of shape \(7,\): dim 0 has size 7.*tp"
    ):
        shard(net, MESH)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layer.0": {}}, "plan pattern 'layer.0' matches no Cell of Net.*did you mean 'layers"),
        ({"layers.0": {"wieght": COLUMNS}},
            "plan entry 'layers.0': unknown key 'wieght'; allowed: input, output, weight.*did you mean 'weight'"),
        ({"layers.0": COLUMNS}, "should be a dict with the keys"),
        ({"layers.*": {"input": {"z": COLUMNS}}},
            r"Cell 'layers.0' \(Linear\), plan entry 'layers.\*': input layout names 'z'"),
        ({"rest": {"weight": COLUMNS}}, "the Cell's own parameters are none"),
    ],
)  # fmt: skip
def test_plans_that_are_wrong(plan, message):
    with pytest.raises((TypeError, ValueError), match=message):
        shard(Net(), MESH, plan=plan)


@pytest.mark.parametrize("weight", [COLUMNS, None])
def test_an_optimizer_that_was_built_before_shard(weight):
    """Of parameters that become parts; those that stay whole it may go on with."""
    cell = Linear((None, None, weight))
    optimizer = nn.Adam(cell.trainable_params())
    if weight is None:
        assert shard(cell, MESH).trainable_params()[0] is optimizer.parameters[0]
        return
    with pytest.raises(ValueError, match="^Adam was built with parameters of .*'weight' .* before shard"):
        shard(cell, MESH)
    del optimizer
    shard(cell, MESH)


class Above(nn.Cell):
    """Speaks of the parameter of a Cell below, whose own hook says something else."""

    def __init__(self, **weights):
        super().__init__()
        self.fc, self.weights = Linear((None, None, ROWS)), weights

    def shard(self, config):
        return None, None, self.weights

    def construct(self, x):
        return self.fc(x)


def test_a_hook_names_parameters_of_cells_below():
    declared = collect_declarations(Above(**{"fc.weight": COLUMNS}))
    assert declared["fc"].weights == {"weight": COLUMNS} and not declared[""].weights
    with pytest.raises(ValueError, match="names 'fc.wieght', but the Cell's .* fc.bias .did you mean 'fc.weight'"):
        collect_declarations(Above(**{"fc.wieght": COLUMNS}))


def test_patterns():
    def matched(pattern):
        return sorted(
            collect_declarations(Net(), plan={pattern: {"input": None}}).keys() - {"layers.0", "rest.0"}
        ) or sorted(
            path
            for path, entry in collect_declarations(Net(), plan={pattern: {"input": COLUMNS}}).items()
            if entry.inputs
        )

    assert matched("layers.*") == ["layers.0"]
    assert matched("**.0") == ["layers.0", "rest.0"]
    assert matched("rest.1") == ["rest.1"] and matched("") == [""]
    assert collect_declarations(Net(), plan={"*.0": {"weight": ROWS}})["rest.0"].weights == {"weight": ROWS}


def test_a_plan_wins_over_a_hook_part_by_part():
    net = Net((COLUMNS, None, {"weight": COLUMNS, "bias": layout("tp")}), (None, None, ROWS))
    found = collect_declarations(net, plan={"layers.0": {"weight": ROWS}, "rest.*": {"input": COLUMNS}})
    assert found["layers.0"].inputs == {"x": COLUMNS}
    assert found["layers.0"].weights == {"weight": ROWS, "bias": layout("tp")}
    assert found["rest.0"].weights == {"weight": ROWS} and found["rest.0"].inputs == {"x": COLUMNS}


def declared_operators(cell, plan=None):
    """`{operator path: OperatorDeclaration}`."""
    found = collect_declarations(cell, plan=plan)
    assert all(not (entry.inputs or entry.outputs or entry.weights) for entry in found.values())
    return {f"{path}.{name}".lstrip("."): one for path, entry in found.items() for name, one in entry.operators.items()}


def test_sharded_primitives():
    net = FeedForward()
    assert collect_declarations(net) == {}
    net.dense1.matmul.shard(((2, 1), (1, 4)), ((2, 4),))
    net.relu.shard(((2, 1),))
    found = collect_declarations(net)
    expected = OperatorDeclaration(((2, 1), (1, 4)), ((2, 4),))
    assert found == {
        "dense1": Declaration(operators={"matmul": expected}),
        "": Declaration(operators={"relu": OperatorDeclaration(((2, 1),))}),
    }


def test_primitives_sharded_by_layouts():
    net, made = FeedForward(), Layout((2, 2), ("dp", "tp"))
    net.dense1.matmul.shard((made("dp", "None"), made("None", ("tp", "dp"))), (made("dp", "tp"),))
    inputs = (MESH_LAYOUT("dp", None), MESH_LAYOUT(None, ("tp", "dp")))
    assert declared_operators(net) == {"dense1.matmul": OperatorDeclaration(inputs, (MESH_LAYOUT("dp", "tp"),))}


def test_operators_in_plans():
    whole = {"input": (ROWS, COLUMNS), "output": layout("dp", "tp")}
    declared = OperatorDeclaration((ROWS, COLUMNS), (layout("dp", "tp"),))
    assert declared_operators(FeedForward(), {"dense1.matmul": whole}) == {"dense1.matmul": declared}
    assert declared_operators(FeedForward(), {"dense*.mat*": whole}) == dict.fromkeys(
        ("dense1.matmul", "dense2.matmul"), declared
    )
    assert declared_operators(FeedForward(), {"**.add": {"input": [None, [2, 1]]}}) == dict.fromkeys(
        ("dense1.add", "dense2.add"), OperatorDeclaration((None, (2, 1)))
    )
    assert declared_operators(FeedForward(), {"relu": {"input": (4, 1)}}) == {"relu": OperatorDeclaration(((4, 1),))}


def test_a_plan_wins_over_a_sharded_primitive_part_by_part():
    net = FeedForward()
    net.dense1.matmul.shard(((2, 1), (1, 2)), ((2, 2),))
    net.dense1.add.shard(((2, 1), (1,)))
    plan = {"dense1.matmul": {"input": (ROWS, None)}, "dense1": {"weight": {}}}
    assert declared_operators(net, plan) == {
        "dense1.matmul": OperatorDeclaration((ROWS, None), ((2, 2),)),
        "dense1.add": OperatorDeclaration(((2, 1), (1,))),
    }


def test_a_primitive_of_a_cell_with_a_hook():
    cell = Linear((COLUMNS, None, None))
    cell.matmul = ops.MatMul().shard(((1, 2), (2, 1)))
    found = collect_declarations(cell)[""]
    assert found.inputs == {"x": COLUMNS} and found.operators == {"matmul": OperatorDeclaration(((1, 2), (2, 1)))}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"dense1.mutmal": {}},
            "plan pattern 'dense1.mutmal' matches no Cell of FeedForward, and no prim.*did you mean 'dense1.matmul'"),
        ({"relu": {"weight": ROWS}},
            "plan entry 'relu': unknown key 'weight'; allowed: input, output .an operator has no weights"),
        ({"relu": {"inputs": ROWS}}, r"unknown key 'inputs'; allowed: input, output \(did you mean 'input'"),
        ({"relu": ROWS}, "plan entry 'relu' should be a dict with the keys input, output, not"),
        ({"dense1.matmul": {"input": (ROWS, ("tp", None))}},
            r"Cell 'dense1' \(Dense\), operator 'matmul' \(MatMul\), plan entry 'dense1.matmul': input 1 is "
            r"\('tp', None\): write layout"),
        ({"dense1.matmul": {"input": (ROWS, (2, 0))}}, r"input 1 is \(2, 0\): write layout"),
        ({"dense1.matmul": {"input": (ROWS, (2, True))}}, r"input 1 is \(2, True\): write layout"),
        ({"dense1.matmul": {"output": "tp"}}, "output is 'tp': write a tuple"),
    ],
)  # fmt: skip
def test_operator_entries_that_are_wrong(plan, message):
    with pytest.raises((TypeError, ValueError), match=message):
        collect_declarations(FeedForward(), plan=plan)


def test_primitives_that_are_sharded_wrongly():
    net = FeedForward()
    net.dense2.matmul.shard(((2, -1), (1, 4)))
    with pytest.raises(
        TypeError, match=r"'dense2' \(Dense\), operator 'matmul' \(MatMul\), MatMul.shard\(\): in_strat"
    ):
        collect_declarations(net)
    net.dense2.matmul.shard(((2, 1), (1, 4)))
    made = Layout((2, 2), ("dp", "tp"))
    net.dense2.matmul.shard((made("dp", "None"), made("None", "tp")))
    with pytest.raises(ValueError, match=r"operator 'matmul'.*with strategies and again with layouts; call it once"):
        collect_declarations(net)
