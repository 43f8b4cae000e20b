"""Propagation over several Cells: which moves are shared, what is handed down, what is remembered, and errors."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from support.captured_models import small_llama
from support.plan_checks import CONFIGS, MESH, check_plan, move_bytes, plan_of, stored, whole
from support.simulated_plans import simulate
from support.simulated_ranks import collect
from support.small_cells import cell_of

from mindformers_core.capture.capture import capture
from mindformers_core.layout import Layout, layout
from mindformers_core.operators import tensor_meta
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.boundaries import Declaration, OperatorDeclaration
from mindformers_core.propagation.propagate import propagate
from mindformers_core.sharding.declare import collect_declarations
from mindformers_core.tensor_parallel import custom_operator

PAIR = [tensor_meta((8, 8), "float32")] * 2


def passing():
    """Two Cells that pass a tensor on by an object without anyone's knowing, which is used above them, too."""
    box = SimpleNamespace(kept=None)

    def keep(self, x, write):
        if write:
            box.kept = ops.relu(x)
            return ops.add(x, x)
        return ops.add(ops.relu(box.kept), x)

    def around(self, x, write):
        y = self.inner(x, write)
        return ops.add(y, box.kept) if write else y

    def root(self, x):
        y = self.b(self.a(x, True), False)
        return ops.add(y, box.kept)

    a, b = (cell_of(around, inner=cell_of(keep)) for _ in range(2))
    return cell_of(root, a=a, b=b)


@pytest.mark.parametrize("arriving", [layout("dp", "tp"), layout(None, "dp"), layout("tp")])
def test_tensors_that_cells_pass_on_by_an_object(arriving):
    declarations = {
        "b.inner": Declaration(inputs={"x": layout(None, "dp")}),
        "": Declaration(outputs={0: layout("tp")}),
    }
    graph = capture(passing(), PAIR[0])
    (value,) = tree_leaves(graph.arguments)
    plan = propagate(graph, MESH, {value.id: arriving.bind(MESH, 2)}, {}, declarations)
    check_plan(plan)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 8))
    (local,) = simulate(plan, {value.id: x}, {}, rng)
    kept = np.maximum(x, 0)
    np.testing.assert_allclose(collect(local, plan.results[0], x.shape), 2 * x + 3 * kept)
    reader = plan.calls[1].plan
    assert len(reader.lifted) == 1 and len(reader.calls[0].lifted) == 1 and not plan.calls[0].lifted


class Level(nn.Cell):
    """Calls the Cells that it is made of with its argument, and adds what they give."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.CellList(list(parts))

    def construct(self, x):
        total = self.parts[0](x)
        for part in self.parts[1:]:
            total = ops.add(total, part(x))
        return total


class Columns(nn.Cell):
    """A product with a weight whose columns are cut."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((8, 8), np.float32)))
        self.matmul = ops.MatMul()

    def construct(self, x):
        return self.matmul(x, self.weight)


def test_projections_of_one_input_share_its_mark_through_all_levels():
    cell = Level(Level(Columns(), Columns()), Level(Level(Columns()), Columns()))
    graph = capture(cell, PAIR[0])
    weights = {path: layout(None, "tp").bind(MESH) for path, _ in cell.parameters_and_names()}
    plan = propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, weights)
    check_plan(plan)
    marks = [
        (path, str(move.reason))
        for path, inner in plan.walk()
        for move in inner.redistributions
        if move.value.hint == "x"
    ]
    assert marks == [("", "MatMul")], "in the root, once"
    assert plan.layouts[0] == layout("dp").bind(MESH, 2)
    assert all(str(inner.layouts[0]) == "[dp, -] (varying: tp)" for path, inner in plan.walk() if path)


def readers(make):
    """Three layers that read one tensor, and one that reads what they give, between residual sums and norms."""

    def construct(self, x):
        x = self.embed(x)
        h = self.norm(x)
        return x + self.o(ops.relu(self.q(h) * self.k(h) + self.v(h)))

    return cell_of(construct, norm=nn.LayerNorm((32,)), **{name: make() for name in ("embed", *"qkvo")})


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_readers_that_reshape_their_input_share_its_moves(sequence_parallel):
    """`nn.Dense` reshapes before its product: mark, gather and reduce-scatter belong above that, as `mint`'s do."""
    column, row = {"weight": {"weight": layout("tp", None)}}, {"weight": {"weight": layout(None, "tp")}}
    plan = {"q": column, "k": column, "v": column, "o": row}
    if sequence_parallel:
        plan["norm"], plan["o"] = {"input": layout(None, "tp", None)}, {**row, "output": layout(None, "tp", None)}
    found = []
    for make in (lambda: nn.Dense(32, 32), lambda: mint.nn.Linear(32, 32, bias=False)):
        made = plan_of(readers(make), [tensor_meta((2, 8, 32), "float32")], {}, plan=plan)
        check_plan(made)
        moves = [move for _, inner in made.walk() for move in inner.redistributions if len(move.value.shape) > 1]
        kinds = Counter(step.kind for move in moves for step in move.steps if step.nbytes or step.backward[1])
        found.append((move_bytes(made)[0], kinds))
    dense, linear = found
    assert dense == linear
    assert dense[1] == (
        {"slice": 1, "all_gather_varying": 1, "reduce_scatter": 1}
        if sequence_parallel
        else {"mark_varying": 1, "all_reduce": 1}
    )


def test_an_argument_that_is_used_as_it_arrives_and_moved_is_moved_where_it_is():
    class Both(Columns):
        def construct(self, x):
            return ops.add(ops.matmul(x, self.weight), ops.relu(x))

    graph = capture(Level(Level(Both())), PAIR[0])
    weights = {call.path + ".weight": layout(None, "tp").bind(MESH) for call in graph.calls() if call.parameters}
    plan = propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, weights, {"parts.0": Declaration()})
    check_plan(plan)
    moved = [path for path, inner in plan.walk() for move in inner.redistributions if move.value.hint == "x"]
    assert set(moved) == {"parts.0.parts.0"}


def test_a_form_that_two_cells_need_besides_is_made_above_them():
    class Both(Columns):
        def construct(self, x):
            return ops.matmul(x, self.weight), ops.exp(x)

    graph = capture(cell_of(lambda self, x: (self.a(x), self.b(x)), a=Both(), b=Both()), PAIR[0])
    weights = {path: layout(None, "tp").bind(MESH) for path in ("a.weight", "b.weight")}
    plan = propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, weights)
    check_plan(plan)
    assert [move.value.hint for move in plan.redistributions] == ["x"] and plan.calls[0].plan is plan.calls[1].plan
    assert [[str(place) for _, place in call.lifted] for call in plan.calls] == [["[dp, -] (varying: tp)"]] * 2


def test_who_shares_a_weight_with_whom_tells_calls_apart():
    first, second = Level(Columns(), Columns(), Columns()), Level(Columns(), Columns(), Columns())
    first.parts[1].weight = first.parts[0].weight
    second.parts[2].weight = second.parts[1].weight
    graph = capture(Level(first, second), PAIR[0])
    weights = {use.path: layout(None, "tp").bind(MESH) for call in graph.calls() for use in call.parameters}
    plan = propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, weights)
    check_plan(plan)
    lifted = [[len(call.lifted) for call in part.plan.calls] for part in plan.calls]
    assert lifted == [[1, 1, 0], [0, 1, 1]]


def test_a_tensor_goes_to_one_layout_by_way_of_another():
    def construct(self, x, y):
        z = ops.matmul(x, y)
        return self.a(z), self.b(z)

    graph = capture(cell_of(construct, a=nn.ReLU(), b=nn.Tanh()), *PAIR)
    declarations = {"a": Declaration(inputs={"input": layout("dp")}), "b": Declaration(inputs={"x": layout()})}
    arriving = {0: layout(None, "dp").bind(MESH), 1: layout("dp", None).bind(MESH)}
    plan = propagate(graph, MESH, arriving, {}, declarations)
    check_plan(plan)
    assert sorted(step.kind for move in plan.redistributions for step in move.steps) == ["all_reduce", "slice"]


def test_a_tied_weight_is_marked_once_and_handed_down():
    model, make = small_llama(tie_word_embeddings=True)
    plan = plan_of(model, *make(1), CONFIGS["dp"])
    marks = [
        path
        for path, inner in plan.walk()
        for move in inner.redistributions
        if inner.graph.parameters and move.value.id in {use.value.id for use in inner.graph.parameters}
        if move.value.shape == (32, 24)
    ]
    assert marks == [""]
    model_plan = plan.calls[0].plan
    assert [str(place) for _, place in model_plan.lifted] == ["[tp, -] (varying: dp)"]
    (use,) = [use for use in model_plan.graph.parameters if "embed" in use.path]
    assert use.local == "embed_tokens.weight" and model_plan.lifted[0][0] == use.value


def test_identical_layers_share_one_plan():
    model, make = small_llama(num_hidden_layers=6)
    plan = plan_of(model, *make(1), CONFIGS["sequence parallel"])
    layers = [inner for path, inner in plan.walk() if path.startswith("model.layers.") and path.count(".") == 2]
    assert len(layers) == 6 and len({id(plan) for plan in layers}) == 1
    other = {"model.layers.3.mlp": Declaration(outputs={0: layout(None)})}
    graph = capture(model, *make(1)[0], **make(1)[1])
    declarations = collect_declarations(model, CONFIGS["sequence parallel"]) | other
    arriving = {value.id: whole(value) for value in tree_leaves(graph.arguments)}
    plan = propagate(graph, MESH, arriving, stored(graph, declarations), declarations)
    layers = [inner for path, inner in plan.walk() if path.startswith("model.layers.") and path.count(".") == 2]
    assert layers[3] is not layers[0] and layers[5] is layers[0]


class Whole(nn.Cell):
    """A Cell with a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((8, 8), np.float32)))

    def construct(self, x):
        return ops.matmul(x, self.weight)

    def bprop(self, x, out, dout):
        return dout


def test_a_cell_with_a_bprop_runs_on_whole_tensors():
    cell = Level(Whole())
    graph = capture(cell, PAIR[0])
    stored_whole = {"parts.0.weight": Layout.on(MESH, ((), ()))}
    plan = propagate(graph, MESH, {0: layout("dp", "tp").bind(MESH)}, stored_whole)
    check_plan(plan)
    assert plan.calls[0].plan is None and plan.redistributions[0].target.is_replicated
    with pytest.raises(ValueError, match=r"Cell 'parts.0' \(Whole\).*'parts.0.weight' is sharded as \[-, tp\]"):
        propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, {"parts.0.weight": layout(None, "tp").bind(MESH)})


def test_errors_say_where():
    graph = capture(Level(Columns()), PAIR[0])
    weights = {"parts.0.weight": Layout.on(MESH, ((), ()))}

    def declared(path, **parts):
        propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, weights, {path: Declaration(**parts)})

    with pytest.raises(ValueError, match=r"Cell 'parts.0' \(Columns\) declares a layout for output 1.*outputs are 0"):
        declared("parts.0", outputs={1: layout("dp")})
    with pytest.raises(ValueError, match=r"input 'x' of Cell 'parts.0' \(Columns\).*3 entries"):
        declared("parts.0", inputs={"x": layout(None, None, "dp")})
    graph = capture(Level(Columns()), tensor_meta((3, 8), "float32"))
    operator = OperatorDeclaration(((2, 1), (1, 2)))
    place = r"sharing.py:\d+: Cell 'parts.0' \(Columns\), operator 'matmul'.*size 3 can't be cut into 2"
    with pytest.raises(ValueError, match=place):
        propagate(
            graph,
            MESH,
            {0: Layout.on(MESH, ((), ()))},
            weights,
            {"parts.0": Declaration(operators={"matmul": operator})},
        )


def test_an_operator_without_a_rule_is_named_with_its_place():
    def unknown(self, x):
        return custom_operator("Unruled", ops.neg)(x)

    graph = capture(Level(cell_of(unknown)), PAIR[0])
    with pytest.raises(
        ValueError, match=r"in Cell 'parts.0' \(unknown\), .*test_propagation_sharing.py:\d+: operator 'Unruled'"
    ):
        propagate(graph, MESH, {0: layout("dp").bind(MESH, 2)}, {})


class Adds(nn.Cell):
    """Adds a tensor of the calling Cell, found in `box`."""

    def __init__(self):
        super().__init__()
        self.box = {}

    def construct(self, x):
        return x + self.box["t"]


class Lends(nn.Cell):
    """Lends one of two tensors to the Cell that it calls."""

    def __init__(self, lent):
        super().__init__()
        self.adds, self.lent = Adds(), lent

    def construct(self, x):
        made = ops.tanh(x), ops.exp(x)
        self.adds.box["t"] = made[self.lent]
        return self.adds(x) + made[0] * made[1]


def test_calls_that_lend_other_tensors_share_no_plan():
    model = nn.SequentialCell(Lends(0), Lends(1), Lends(0))
    plan = plan_of(model, (tensor_meta((8, 4), "float32"),), {})
    first, second, third = (call.plan for call in plan.calls)
    assert first is third is not second
    assert [str(each.calls[0].lifted[0][0]) for each in (first, second)] == ["%1", "%2"]
