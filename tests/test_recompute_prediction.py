"""What is kept for the backward pass, and what runs again, said ahead: of models, random programs and small graphs."""

import random
import sys

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from models import EXAMPLES, axes_of
from support.captured_models import MODELS
from support.launch import ROOT
from support.nightly import daily, seeds
from support.planned_models import planned
from support.saved_tensors import constants_of, measured, saved_activations, saved_bytes, tensors_in
from support.small_cells import cell_of

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.raw import RawCollective
from mindformers_core.layout import bind_layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.program.graph import CallNode, CellGraph, OperatorNode, ParameterUse
from mindformers_core.program.partition import unshared
from mindformers_core.program.plan import CallPlan, CellPlan, OperatorPlan, called_cells, operators_in_order
from mindformers_core.program.structure import Value
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard

sys.path.append(str(ROOT / "tests" / "ranks"))
from random_cells import random_cell  # noqa: E402

WITHOUT_RULE = ("batch norm",)


@pytest.fixture
def four_ranks(monkeypatch, rank_0_of_4):
    """Rank 0 of 4, where nothing is sent, but results are tensors of their own, as those of real collectives are."""
    reduce_scatter = RawCollective.reduce_scatter
    monkeypatch.setattr(RawCollective, "all_reduce", lambda self, x, op: x + 0)
    monkeypatch.setattr(RawCollective, "reduce_scatter", lambda *arguments: reduce_scatter(*arguments) + 0)


def measured_and_program(net, args, named):
    """Bytes that a sharded Cell keeps, and the program that it ran."""
    net(*args, **named)
    (program,) = tree_of(net).programs.values()
    exclude = [*nn.Cell.get_parameters(net), *constants_of(program), *tensors_in((args, named))]

    def run(*given):
        return net(*given[: len(args)], **dict(zip(named, given[len(args) :])))

    return measured(run, *args, *named.values(), exclude=exclude), program


def example(name, mesh):
    """A sharded model, and its inputs."""
    if name not in EXAMPLES:
        net, inputs = MODELS[name]()
        return shard(net.set_train(), mesh), *inputs(1)
    found, axes = EXAMPLES[name], axes_of(mesh)
    net = shard(found.make().set_train(), mesh, config=found.config(axes), plan=found.plan(axes))
    return net, *found.inputs(1)


def assert_foretold(name, mesh):
    found, program = measured_and_program(*example(name, mesh))
    assert saved_bytes(program.plan, algorithm=algorithm_of) == found


NAMES = [name for name in {**EXAMPLES, **MODELS} if name not in WITHOUT_RULE]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", daily(NAMES[1::2], NAMES))
def test_models_on_one_rank(name):
    assert_foretold(name, init_device_mesh((1, 1), ("dp", "tp")))


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("name", daily(NAMES[::2], NAMES))
def test_models_on_four_ranks(name):
    assert_foretold(name, init_device_mesh((2, 2), ("dp", "tp")))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("layers", [1, 3])
def test_llama_with_inputs_that_are_closed_over(layers):
    """Gradients don't flow back to what the differentiated function takes from around it."""
    config = LlamaConfig(hidden_size=64, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
                         vocab_size=128, max_position_embeddings=32)  # fmt: skip
    net = shard(LlamaForCausalLM(config).set_train(), init_device_mesh((1,), ("tp",)))
    draw = np.random.default_rng(1)
    ids, labels = (Tensor(draw.integers(0, 128, (2, 32)).astype(np.int32)) for _ in range(2))
    passed, program = measured_and_program(net, (ids, labels), {})
    fresh = [Tensor(one.asnumpy()) for one in (ids, labels)]
    closed = measured(lambda: net(*fresh), exclude=[*fresh, *net.trainable_params(), *constants_of(program)])
    assert saved_bytes(program.plan) == passed
    assert saved_bytes(program.plan, arguments_need=False) == closed < passed


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", seeds(12, 40))
def test_random_programs(seed):
    drawn = random_cell(seed)
    net = shard(drawn.make().set_train(), init_device_mesh((1,), ("tp",)))
    found, program = measured_and_program(net, list(map(Tensor, drawn.inputs)), {})
    assert saved_bytes(program.plan) == found


MESH = init_device_mesh((2,), ("tp",))
ONE = 4 * 8 * 4  # bytes of a local float32 tensor of shape (4, 8)


def chain(function, arriving=None):
    """The plan of `function` of a product for (8, 8), cut in two parts, and each instruction's key by its operator."""
    arriving = {"x": layout("tp") if arriving is None else arriving}
    cell = cell_of(lambda self, x: function(ops.mul(x, self.weight)), weight=Parameter(Tensor([2.0])))
    _, plan = planned(cell, MESH, (tensor_meta((8, 8), "float32"),), arriving=arriving)
    keys = {}
    for place in operators_in_order(plan):
        if hasattr(place.entry, "node"):
            keys.setdefault(place.entry.node.operator, place.key)
    return plan, keys


def kept_operators(plan, dropped=frozenset()):
    names = {place.key: place.entry.node.operator for place in operators_in_order(plan) if hasattr(place.entry, "node")}
    return [names[saved.key] for saved in saved_activations(plan, dropped, arguments_need=False)]


def exp_sin_cos(x):
    return ops.cos(ops.sin(ops.exp(x)))


@pytest.mark.parametrize(
    "dropped, kept, again",
    [
        ([], ["Exp", "Sin"], []),
        (["Sin"], ["Exp"], ["Sin"]),  # from Exp's result, which is kept anyhow
        (["Exp"], ["Mul", "Sin"], ["Exp"]),  # from Mul's, which is not
        (["Exp", "Sin"], ["Mul"], ["Exp", "Sin"]),
        (["Mul"], ["Exp", "Sin"], []),  # nobody asks
        (["Mul", "Exp"], ["Sin"], ["Mul", "Exp"]),  # all the way from what the caller has
        (["Mul", "Exp", "Sin", "Cos"], [], ["Mul", "Exp", "Sin"]),
        (["Cos"], ["Exp", "Sin"], []),
    ],
)
def test_dropped_results(dropped, kept, again):
    """Mul keeps x, which the caller has; Exp its result; Sin and Cos what they take, of which Sin's is Exp's."""
    plan, keys = chain(exp_sin_cos)
    chosen = frozenset(keys[name] for name in dropped)
    assert sorted(kept_operators(plan, chosen)) == kept
    assert saved_bytes(plan, chosen, arguments_need=False) == len(kept) * ONE
    assert Prediction(plan, arguments_need=False).recomputed(frozenset(chosen)) == {keys[name] for name in again}


def test_dropped_views():
    """Exp of x, transposed, squared: Exp's result, and Square's copy of the view, which goes with the view."""
    plan, keys = chain(lambda x: ops.square(ops.transpose(ops.exp(x), (1, 0))))
    saved = saved_activations(plan, arguments_need=False)
    assert [one.key for one in saved] == [keys["Exp"], keys["Square"]]
    assert [one.nbytes for one in saved] == [ONE, ONE]
    dropped = {keys["Transpose"]}
    assert [one.key for one in saved_activations(plan, dropped, arguments_need=False)] == [keys["Exp"]]
    assert Prediction(plan, arguments_need=False).recomputed(frozenset(dropped)) == dropped
    kept = saved_activations(plan, {keys["Exp"]}, arguments_need=False)
    assert [one.key for one in kept] == [keys["Mul"], keys["Square"]]


def test_several_results_and_indices():
    """Dropping one of several results drops all; the places of the largest are kept in int32."""
    plan, keys = chain(lambda x: ops.topk(ops.exp(x), 2, -1)[0])
    assert sorted(one.nbytes for one in saved_activations(plan, arguments_need=False)) == [4 * 2 * 4, ONE]
    assert kept_operators(plan, {keys["TopK"]}) == ["Exp"]


def test_moves_are_kept_and_dropped():
    """A sum over ranks is kept without its terms; to be made again by adding them once more, with them instead."""
    plan, keys = chain(lambda x: ops.sin(ops.sum(ops.exp(x), 0)))
    steps = {place.key: getattr(place.entry, "steps", ()) for place in operators_in_order(plan)}
    (key,) = [key for key, some in steps.items() if [step.kind for step in some] == ["all_reduce"]]
    saved = saved_activations(plan, arguments_need=False)
    assert [one.nbytes for one in saved] == [ONE, 8 * 4]  # Exp's result, and the sum
    dropped = saved_activations(plan, {key}, arguments_need=False)
    assert [one.nbytes for one in dropped] == [ONE, 8 * 4]  # Exp's result, and the partial sum
    assert dropped[1].key != key == saved[1].key
    assert Prediction(plan, arguments_need=False).recomputed(frozenset({key})) == {key}


def layer(last):
    """Two operators, and another one, a view if asked for."""
    return cell_of(lambda self, x: last(ops.sin(ops.exp(x))))


def outer(last):
    """A layer in a layer."""
    return cell_of(lambda self, x: ops.reshape(self.inner(ops.cos(x)), (8, 8)), inner=layer(last))


def net(last):
    """The plan of layers behind a weight."""
    layers = {"first": outer(last), "second": outer(last), "weight": Parameter(Tensor([2.0]))}
    cell = cell_of(lambda self, x: ops.tanh(self.second(self.first(ops.mul(x, self.weight)))), **layers)
    return planned(cell, MESH, (tensor_meta((8, 8), "float32"),), arriving={"x": layout("tp")})[1]


def names_of(plan, keys):
    found = [place.entry for place in operators_in_order(plan) if place.key in keys]
    return [entry.node.operator for entry in found if hasattr(entry, "node")]


def test_a_selected_cell_keeps_its_results():
    """Also what they are views of, through the calls of other Cells."""
    plan, viewing = net(ops.abs), net(lambda x: ops.reshape(x, (8, 8)))
    paths = {path: key for key, path in called_cells(plan)}
    assert names_of(plan, Prediction(plan).cell_keys(paths["first"])) == ["Cos", "Exp", "Sin"]
    assert names_of(plan, Prediction(plan).cell_keys(paths["first.inner"])) == ["Exp", "Sin"]
    assert names_of(viewing, Prediction(viewing).cell_keys(paths["first"])) == ["Cos", "Exp"]
    assert Prediction(viewing).cell_keys(paths["first.inner"]) < Prediction(viewing).cell_keys(paths["first"])
    assert "Tanh" not in names_of(plan, Prediction(plan).cell_keys(()))
    assert len(Prediction(plan).cell_keys(())) == len(operators_in_order(plan)) - 1


def test_one_of_two_calls():
    """Of one layer: they have a plan in common, and keys of their own."""
    parts = {"weight": Parameter(Tensor([2.0])), "layer": layer(ops.sin)}
    cell = cell_of(lambda self, x: self.layer(self.layer(ops.mul(x, self.weight))), **parts)
    _, plan = planned(cell, MESH, (tensor_meta((8, 8), "float32"),), arriving={"x": layout("tp")})
    first, second = (key for key, path in called_cells(plan) if path == "layer")
    whole = saved_bytes(plan, arguments_need=False)
    dropped = saved_bytes(plan, Prediction(plan).cell_keys(second), arguments_need=False)
    assert (whole, dropped) == (4 * ONE, 3 * ONE)  # of the second: Exp's and Sin's results, or the first's result
    assert first != second


def test_errors():
    plan, _ = chain(exp_sin_cos)
    with pytest.raises(ValueError, match=r"no instruction at \(7,\), which is to be dropped"):
        saved_bytes(plan, {(7,)})
    with pytest.raises(ValueError, match=r"no call of a Cell at \(1,\)"):
        Prediction(plan).cell_keys((1,))
    cut, _ = chain(lambda x: ops.softmax(x, -1), layout(None, "tp"))
    with pytest.raises(ValueError, match="Softmax .* runs the distributed algorithm 'softmax'.*algorithm_of"):
        saved_bytes(cut)


@pytest.mark.usefixtures("rank_0_of_4")
def test_dropout_keeps_what_it_draws_by():
    """Its mask is made again from a seed and an offset, two int64 numbers."""
    plan, keys = chain(lambda x: ops.dropout(ops.exp(x), 0.5))
    (name,) = keys.keys() - {"Mul", "Exp"}
    whole = saved_activations(plan, frozenset(), algorithm_of, arguments_need=False)
    dropped = saved_activations(plan, {keys[name]}, algorithm_of, arguments_need=False)
    assert [one.nbytes for one in whole] == [ONE, ONE]  # Exp's result, and the mask as floats
    assert sorted(one.nbytes for one in dropped) == [8, 8, ONE]


ONE_RANK = init_device_mesh((1,), ("tp",))
SHAPE = (4, 4)
WHOLE = bind_layout(layout(), ONE_RANK, 2)


# Operators of square tensors, with the arguments that follow those.
UNARY = {"Exp": (), "Sin": (), "Square": (), "Softmax": (-1,), "StopGradient": (), "ToOther": (), "Neg": ()}
UNARY |= {"Reshape": (SHAPE,), "Transpose": ((1, 0),), "Std": (), "DeprecatedMax": ()}
BINARY = ("Add", "Mul", "MatMulExt", "Div")


def plan_of(arguments, steps, results):
    """A `CellPlan` with a weight.

    Args:
        arguments: how many; the weight comes behind them.
        steps: what is done: the name of an operator, or the `CellPlan` of a called Cell, and places of tensors.
        results: places of tensors.
    """
    values = [Value(number, SHAPE, "float32", "") for number in range(arguments + 1)]
    plans = []
    for done, places in steps:
        taken, whole = tuple(values[place] for place in places), (WHOLE,) * len(places)
        count = 1 if isinstance(done, str) else len(done.results)
        made = tuple(Value(len(values) + number, SHAPE, "float32", "") for number in range(count))
        if isinstance(done, str):
            node = OperatorNode(done, "function", (*taken, *UNARY.get(done, ())), {}, made, None, None, "here:1")
            plans.append(OperatorPlan(node, None, whole, (WHOLE,), {}))
        else:
            node = CallNode(f"cell_{len(plans)}", taken, {}, made, done.graph, "here:1")
            plans.append(CallPlan(node, whole, (WHOLE,) * count, done))
        values += made
    given = {f"x{number}": values[number] for number in range(arguments)}
    weight = ParameterUse(values[arguments], "weight", "weight", True)
    returned = tuple(values[place] for place in results)
    graph = CellGraph("", "Any", 0, True, False, given, tuple(plan.node for plan in plans), returned, (weight,))
    return CellPlan(graph, ONE_RANK, dict.fromkeys(range(len(values)), WHOLE), tuple(plans), (WHOLE,) * len(results))


def random_plan(chance, depth, arguments=2):
    """A `CellPlan` of random operators that calls others: some of them again and again."""
    inner = [random_plan(chance, depth - 1, chance.randint(1, 3)) for _ in range(chance.randint(1, 2) * bool(depth))]
    steps, count = [], arguments + 1
    for _ in range(chance.randint(2, 7)):
        if inner and chance.random() < 0.6:
            called = chance.choice(inner)
            steps.append((called, chance.choices(range(count), k=len(called.graph.arguments))))
            count += len(called.results)
        else:
            name = chance.choice([*UNARY, *BINARY])
            steps.append((name, chance.choices(range(count)[-4:], k=2 if name in BINARY else 1)))
            count += 1
    return plan_of(arguments, steps, chance.choices(range(count)[-3:], k=chance.randint(1, 2)))


def random_choices(chance, plan, count):
    """Sets of dropped keys: of all instructions, or alike in whole calls."""
    keys = [place.key for place in operators_in_order(plan)]
    calls = [key for key, _ in called_cells(plan)]
    for _ in range(count):
        often = chance.choice((0.05, 0.3, 0.6, 1))
        roots = chance.sample(calls, min(len(calls), 3)) if chance.random() < 0.5 else [()]
        yield frozenset(
            key for key in keys if chance.random() < often and any(key[: len(root)] == root for root in roots)
        )


@pytest.mark.parametrize("seed", seeds(18, 40))
def test_as_if_nothing_were_shared(seed):
    chance = random.Random(seed)
    plan = random_plan(chance, depth=1 + seed % 3)
    needed = chance.random() < 0.7
    shared, alone = (Prediction(one, arguments_need=needed) for one in (plan, unshared(plan)))
    for dropped in (frozenset(), *random_choices(chance, plan, 5)):
        found, wanted = ({(one.key, one.nbytes) for one in some.saved(dropped)} for some in (shared, alone))
        assert found == wanted
        assert len(shared.saved(dropped)) == len(alone.saved(dropped))
        assert shared.saved_bytes(dropped) == alone.saved_bytes(dropped)
        assert shared.recomputed(dropped) == alone.recomputed(dropped)
    for key, _ in called_cells(plan):
        assert shared.cell_keys(key) == alone.cell_keys(key)


def test_calls_that_look_alike_but_for_strides():
    """`ToOther` gives a contiguous tensor as it is, and copies another one; both are views."""
    inner = plan_of(1, [("ToOther", [0]), ("Square", [2])], [3])
    steps = [("Exp", [1]), ("Reshape", [2]), ("Transpose", [2]), (inner, [3]), (inner, [4])]
    plan = plan_of(1, steps, [5, 6])
    saved = {one.key for one in Prediction(plan).saved()}
    assert saved == {one.key for one in Prediction(unshared(plan)).saved()} == {(0,), (3, 1), (4, 0)}
