"""What hooks and plans declare: their forms, which one wins, and errors."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from small_cells import Linear, Net

from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import shard
from mindformers_core.tensor_parallel.declare import collect_declarations

pytestmark = pytest.mark.usefixtures("rank_0_of_4")
MESH = init_device_mesh((2, 2), ("dp", "tp"))
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
            "names 'wieght', but the Cell's own parameters are weight, bias.*did you mean 'weight'",
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
        (
            {"layers.0": {"wieght": COLUMNS}},
            "plan entry 'layers.0': unknown key 'wieght'; allowed: input, output, weight.*did you mean 'weight'",
        ),
        ({"layers.0": COLUMNS}, "should be a dict with the keys"),
        (
            {"layers.*": {"input": {"z": COLUMNS}}},
            r"Cell 'layers.0' \(Linear\), plan entry 'layers.\*': input layout names 'z'",
        ),
        ({"rest": {"weight": COLUMNS}}, "the Cell's own parameters are none"),
    ],
)
def test_plans_that_are_wrong(plan, message):
    with pytest.raises((TypeError, ValueError), match=message):
        shard(Net(), MESH, plan=plan)


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
