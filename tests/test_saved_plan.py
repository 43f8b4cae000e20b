"""Plans as JSON: a plan that is saved and loaded is the same plan, and a file that doesn't fit is refused."""

import json
import os
from types import SimpleNamespace

import pytest
from mindspore import nn
from models import EXAMPLES, axes_of
from support.captured_models import MODELS, Reader, Writer, small_llama
from support.nightly import daily
from support.plan_checks import check_plan
from support.planned_models import captured, planned

from mindformers_core.capture.capture import capture
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.activation_policy import Keeper
from mindformers_core.program.partition import annotate
from mindformers_core.program.plan import OperatorPlan, Redistribution, operators_in_order
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.propagate import propagate
from mindformers_core.propagation.saved import load_plan, save_plan

MESH = init_device_mesh((2, 2), ("dp", "tp"))
CONFIG = SimpleNamespace(batch_axes="dp", sequence_parallel=True)


def model_of(name):
    """What `propagate` takes of a model, with the layouts that its example declares."""
    model, make = MODELS[name]()
    args, named = make(1)
    if name not in EXAMPLES:
        return captured(model, MESH, args, named, CONFIG)
    example, axes = EXAMPLES[name], axes_of(MESH)
    return captured(model, MESH, args, named, example.config(axes), example.plan(axes))


def same_plan(plan, other, known):
    """Assert that two plans are the same in all their parts, and share plans alike."""
    if id(plan) in known:
        assert known[id(plan)] is other
        return
    known[id(plan)] = other
    for name in ("mesh", "layouts", "results", "lifted", "gradients"):
        assert getattr(plan, name) == getattr(other, name), name
    assert plan.graph.key == other.graph.key, "of some call that is identical"
    for one, two in zip(plan.instructions, other.instructions, strict=True):
        assert type(one) is type(two)
        if isinstance(one, Redistribution):
            assert vars(one) == vars(two)
            continue
        shown = [str(each.node).partition("  # ")[0] for each in (one, two)]  # identical calls share one's lines
        assert (shown[0], one.inputs, one.outputs) == (shown[1], two.inputs, two.outputs)
        if isinstance(one, OperatorPlan):
            assert (one.axes_of, one.algorithm, one.cut_axes) == (two.axes_of, two.algorithm, two.cut_axes)
            assert vars(one.signature).keys() == vars(two.signature).keys()
            for part in ("inputs", "outputs", "sizes", "reduced", "whole", "linear", "added", "distributed", "run"):
                assert getattr(one.signature, part) == getattr(two.signature, part)
        else:
            assert one.lifted == two.lifted and (one.plan is None) == (two.plan is None)
            if one.plan is not None:
                same_plan(one.plan, two.plan, known)


NAMES = [name for name in MODELS if name != "batch norm"]


@pytest.mark.parametrize("name", daily({*NAMES[::3], "encoder"}, NAMES))
def test_a_loaded_plan_is_the_one_saved(name, tmp_path):
    given = model_of(name)
    plan = propagate(*given)
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json", *given)
    same_plan(plan, loaded, {})
    check_plan(loaded)
    save_plan(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["again.json", "plan.json"]


def test_a_plan_with_annotations_is_saved_as_the_plan_without(tmp_path):
    """As under `recompute()` or `swap()` of some layers, which makes copies of the plan that equal layers share."""
    plan = propagate(*model_of("llama"))
    operators = [each for each in operators_in_order(plan) if isinstance(each.entry, OperatorPlan)]
    annotated = annotate(plan, {each.key: Keeper("", "keep", "") for each in operators if "layers.1.mlp" in each.path})
    assert len({*map(id, plans_of(annotated))}) > len({*map(id, plans_of(plan))})
    save_plan(plan, tmp_path / "plan.json")
    save_plan(annotated, tmp_path / "annotated.json")
    assert (tmp_path / "annotated.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def plans_of(plan):
    return [found for _, found in plan.walk()]


class OneWeight(nn.Cell):
    """Two Cells with one weight, which the root itself doesn't use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dense(4, 4), nn.Dense(4, 4)
        self.second.weight = self.first.weight

    def construct(self, x):
        return self.second(self.first(x))


def test_parameters_that_are_lifted_above_their_cells(tmp_path):
    given = captured(OneWeight(), MESH, (tensor_meta((8, 4), "float32"),), arriving={"x": layout("dp")})
    plan = propagate(*given)
    (call, _) = plan.calls
    assert [use.path for use in plan.graph.parameters] == ["first.weight"] and not given[0].parameters
    assert [value for value, _ in call.lifted] == [plan.graph.parameters[0].value]
    save_plan(plan, tmp_path / "plan.json")
    same_plan(plan, load_plan(tmp_path / "plan.json", *given), {})


class Around(nn.Cell):
    """A Cell between the one that makes a tensor and the one that uses it without being passed it."""

    def __init__(self):
        super().__init__()
        self.writer, self.middle = Writer(), nn.SequentialCell(Reader())

    def construct(self, x):
        return self.middle(self.writer(x, [], self.middle[0]))


def test_tensors_that_are_handed_down_through_a_cell(tmp_path):
    given = captured(Around(), MESH, (tensor_meta((8, 4), "float32"),), arriving={"x": layout("dp")})
    plan = propagate(*given)
    (handed,) = plan.calls[1].plan.graph.free_variables
    assert handed.value not in tree_leaves([node.args for node in plan.calls[1].plan.graph.nodes])
    save_plan(plan, tmp_path / "plan.json")
    same_plan(plan, load_plan(tmp_path / "plan.json", *given), {})


def test_one_of_several_permutations(tmp_path):
    mesh = init_device_mesh((2, 2, 2), ("a", "b", "c"))
    plan = {"": {"input": layout(("c", "a", "b"))}}
    x = tensor_meta((8,), "float32")
    given = captured(nn.ReLU(), mesh, (x,), plan=plan, arriving={"input": layout(("a", "b", "c"))})
    plan = propagate(*given)
    assert [step.kind for step in plan.redistributions[0].steps] == ["permute"]
    save_plan(plan, tmp_path / "plan.json")
    same_plan(plan, load_plan(tmp_path / "plan.json", *given), {})


def test_equal_layers_are_in_the_file_once(tmp_path):
    sizes = []
    for layers in (2, 8):
        model, make = small_llama(num_hidden_layers=layers)
        args, named = make(1)
        _, plan = planned(model, MESH, args, named, CONFIG)
        save_plan(plan, tmp_path / "plan.json")
        data = json.loads((tmp_path / "plan.json").read_text())
        sizes.append(len(data["cells"]))
    assert sizes[0] == sizes[1]
    assert max(map(len, (tmp_path / "plan.json").read_text().splitlines())) < 500


def test_nothing_is_left_where_saving_fails(tmp_path):
    plan = propagate(*model_of("mlp"))
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(OSError):
        save_plan(plan, tmp_path / "plan.json")
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.fixture(scope="module")
def small_plan(tmp_path_factory):
    """A saved plan as text, and what it was made from."""
    given, path = model_of("small llama"), tmp_path_factory.mktemp("small") / "plan.json"
    save_plan(propagate(*given), path)
    return path.read_text(), given


@pytest.fixture
def saved(small_plan, tmp_path):
    """The path of a saved plan, what it was made from, and a function that changes the file."""
    (text, given), path = small_plan, tmp_path / "plan.json"
    path.write_text(text)

    def change(edit):
        data = json.loads(path.read_text())
        edit(data)
        path.write_text(json.dumps(data))

    return path, given, change


def llama_graph(**changes):
    model, make = small_llama(**changes)
    args, named = make(1)
    return capture(model, *args, **named)


def test_another_mesh_is_refused(saved):
    path, (graph, _, *given), _ = saved
    for mesh in (init_device_mesh((2, 2), ("tp", "dp")), init_device_mesh((4, 2), ("dp", "tp"))):
        with pytest.raises(ValueError, match=r"plan for the mesh \(dp=2, tp=2\), not for"):
            load_plan(path, graph, mesh, *given)


def test_other_ranks_are_as_good(saved):
    path, (graph, _, *layouts, declarations), _ = saved
    mesh = init_device_mesh((2, 2), ("dp", "tp"), (4, 5, 6, 7))
    layouts = [{key: Layout.on(mesh, at.dims) for key, at in given.items()} for given in layouts]
    plan = load_plan(path, graph, mesh, *layouts, declarations)
    assert {layout.mesh for layout in plan.layouts.values()} == {mesh}


OTHERS = {
    "layers": ({"num_hidden_layers": 3}, r"Cell 'model' .* has '.*layers\.2.*' where the plan has '.*norm.*'"),
    "epsilon": ({"rms_norm_eps": 0.5}, r"RMSNorm|Cell 'model.layers.0.input_layernorm' .* has .*0\.5"),
    "size": ({"intermediate_size": 48}, r"Cell 'model.layers.0.mlp' .* has '.*48\]"),
    "constant": ({"rope_theta": 7.0}, r"Cell 'model' .* has 'constant .*'"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_graph_is_refused_with_what_differs(saved, name):
    path, (_, *given), _ = saved
    changes, message = OTHERS[name]
    with pytest.raises(ValueError, match=message):
        load_plan(path, llama_graph(**changes), *given)


def test_other_layouts_are_refused_with_what_differs(saved):
    path, (graph, mesh, arguments, parameters, declarations), _ = saved
    split = parameters | {"lm_head.weight": Layout.on(mesh, [(), ("tp",)])}
    with pytest.raises(ValueError, match=r"Cell 'lm_head' .* has '%1: \[-, tp\]' where the plan has '%1: \[tp, -\]'"):
        load_plan(path, graph, mesh, arguments, split, declarations)


def test_files_that_are_no_plans(saved):
    path, given, change = saved
    change(lambda data: data.update(version=99))
    with pytest.raises(ValueError, match="version 99; this is for version 3"):
        load_plan(path, *given)
    for text in ("{", "[]", '{"format": "other"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no plan"):
            load_plan(path, *given)


def first_choice(data):
    """What was chosen for the first operator of a file that is partitioned."""
    choices = [choice for cell in data["cells"] for choice in cell["choices"].values()]
    return next(choice for choice in choices if isinstance(choice, dict) and choice["cuts"])


def results(data):
    """The layouts of the results of the first called Cell."""
    return data["cells"][1]["results"][0]


EDITS = {
    "unknown axis": (lambda data: results(data).update(dims=[["pp"], [], []]), "unknown mesh axis 'pp'"),
    "too many dims": (lambda data: results(data).update(dims=[[]] * 7), "has 7 entries, but the tensor has 3 dims"),
    "other results": (lambda data: results(data).update(dims=[[], [], []]), r"has '.*' where the plan has '.*'"),
    "other cell": (
        lambda data: data["cells"][0]["choices"].update({"0": 2}),
        "Cell 'model' .* has '.*' where the plan",
    ),
    "no cell": (lambda data: data["cells"][0]["choices"].update({"0": 99}), "missing or malformed"),
    "fewer cells": (lambda data: data["cells"].pop(), "missing or malformed"),
    "other cut": (lambda data: first_choice(data)["cuts"].clear(), r"has '.*' where the plan has '.*'"),
    "missing": (lambda data: first_choice(data).pop("carried"), "missing or malformed"),
    "other plan": (lambda data: data["cells"][0]["plan"].pop(), "has 'trained: .*' where the plan has 'nothing more'"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_file_that_was_changed_wrongly_is_refused(saved, name):
    path, given, change = saved
    edit, message = EDITS[name]
    change(edit)
    with pytest.raises(ValueError, match=message):
        load_plan(path, *given)
