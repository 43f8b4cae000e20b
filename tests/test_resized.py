"""Plans carried over to other sizes: random programs, run in NumPy on simulated ranks, and plans of models."""

import numpy as np
import pytest
import test_propagation_random as programs
from mindspore import nn
from support.captured_models import MODELS, small_llama
from support.nightly import daily, seeds
from support.plan_checks import check_plan
from support.plan_differences import first_difference
from support.planned_models import captured
from support.simulated_plans import simulate
from support.simulated_ranks import collect
from test_saved_plan import CONFIG, MESH, OneWeight, model_of, same_plan

from mindformers_core.capture.capture import capture
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.propagate import propagate
from mindformers_core.propagation.resized import resized


def random_program(seed, size, monkeypatch):
    """`(graph, what propagate takes besides)` of a program on square tensors of this size."""
    monkeypatch.setattr(programs, "SIZE", size)
    for kind in ("lengths", "unstacked"):  # cut 8 rows into parts
        monkeypatch.delitem(programs.UNARY, kind, raising=False)
    rng = np.random.default_rng(seed)
    mesh = init_device_mesh(*programs.MESHES[seed % len(programs.MESHES)])
    cell = programs.Program(rng, int(rng.integers(3)), None)
    graph = capture(cell, *[tensor_meta((size, size), "float32")] * 2)
    declarations = programs.draw_declarations(rng, mesh, cell)
    shapes = {path: tuple(parameter.shape) for path, parameter in cell.parameters_and_names()}
    names = {id(parameter): path for path, parameter in cell.parameters_and_names()}
    aliases = {  # every name of a shared parameter
        f"{path}.{name}" if path else name: names[id(parameter)]
        for path, child in cell.cells_and_names()
        for name, parameter in child._params.items()
    }
    parameters = {path: programs.draw_layout(rng, mesh, len(shape)) for path, shape in shapes.items()}
    arriving = {value.id: programs.draw_layout(rng, mesh) for value in tree_leaves(graph.arguments)}
    return graph, (mesh, arriving, parameters, declarations), shapes, aliases


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_random_programs_of_other_sizes(seed, monkeypatch):
    large, given, *_ = random_program(seed, 64, monkeypatch)
    plan = propagate(large, *given)
    graph, _, shapes, aliases = random_program(seed, 16, monkeypatch)
    small = resized(plan, graph)
    check_plan(small, final=True)
    assert first_difference(plan, small) is None
    rng = np.random.default_rng(seed)
    inputs = {value.id: rng.standard_normal(value.shape) for value in tree_leaves(graph.arguments)}
    parameters = {path: rng.standard_normal(shape) for path, shape in shapes.items()}
    locals_ = simulate(small, inputs, {alias: parameters[path] for alias, path in aliases.items()}, rng)
    for local, place, expected in zip(
        locals_, small.results, programs.evaluate(graph, inputs, parameters), strict=True
    ):
        np.testing.assert_allclose(collect(local, place, expected.shape), expected, rtol=1e-6, atol=1e-6)


NAMES = [name for name in MODELS if name != "batch norm"]


@pytest.mark.parametrize("name", daily(NAMES[::6], NAMES))
def test_a_plan_on_its_own_graph_stays_as_it_is(name):
    given = model_of(name)
    plan = propagate(*given)
    same_plan(plan, resized(plan, given[0]), {})


def test_parameters_that_are_lifted_above_their_cells():
    plans = []
    for rows in (64, 8):
        graph, *given = captured(OneWeight(), MESH, (tensor_meta((rows, 4), "float32"),), arriving={"x": layout("dp")})
        plans.append(propagate(graph, *given))
    same_plan(plans[1], resized(plans[0], graph), {})


def llama(**sizes):
    """What `propagate` takes of a small Llama."""
    model, make = small_llama(**sizes)
    args, named = make(1)
    return captured(model, MESH, args, named, CONFIG)


def test_layers_can_be_left_out():
    plan, small = propagate(*llama(num_hidden_layers=6)), llama(num_hidden_layers=2)
    found = resized(plan, small[0], {f"model.layers.{number}" for number in (1, 2, 4, 5)})
    same_plan(propagate(*small), found, {})
    assert first_difference(plan, found) is None
    with pytest.raises(
        ValueError, match=r"the root Cell .* has '21 parameters .*' at the new sizes, where '57 .*' was planned"
    ):
        resized(plan, small[0])


def test_redistributions_between_layers_that_are_left_out():
    plan = {"*": {"input": layout("dp", None), "output": layout("dp", "tp")}}
    plans = []
    for layers in (5, 2):
        model = nn.SequentialCell(*(nn.Dense(8, 8) for _ in range(layers)))
        given = captured(model, MESH, (tensor_meta((8, 8), "float32"),), plan=plan)
        plans.append((propagate(*given), given[0]))
    (plan, _), (expected, graph) = plans
    assert len(plan.redistributions) > len(expected.redistributions) > 0
    found = resized(plan, graph, {"1", "2", "3"})
    check_plan(found, final=True)
    same_plan(expected, found, {})
    assert first_difference(plan, found) is None


def test_another_structure_is_refused():
    plan = propagate(*llama())
    with pytest.raises(ValueError, match="at the new sizes, where"):
        resized(plan, llama(tie_word_embeddings=True)[0])


def test_a_dim_that_does_not_divide_is_refused():
    plan = propagate(*captured(OneWeight(), MESH, (tensor_meta((8, 4), "float32"),), arriving={"x": layout("dp")}))
    graph, *_ = captured(OneWeight(), MESH, (tensor_meta((7, 4), "float32"),), arriving={"x": layout()})
    with pytest.raises((ValueError, RuntimeError), match="7"):
        check_plan(resized(plan, graph))
