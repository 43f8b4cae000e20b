"""Names of operators: of real programs and of Cells with loops and tuples; every text selects what it names."""

from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.captured_models import MODELS, small_llama
from support.nightly import daily
from support.pattern_programs import select
from support.planned_models import planned
from support.small_cells import Doubled, cell_of

from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.program.operator_names import friendly_name, operator_names, operator_texts, plain_name
from mindformers_core.program.plan import CellPlan, OperatorPlan, Redistribution, called_cells, operators_in_order
from mindformers_core.redistribution.steps import STEP_KINDS
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def check_texts(plan, path=""):
    """Every text selects its operator, and besides at most one of every other call of the same Cell."""
    names = operator_names(plan, path)
    cells = [(key, f"{path}.{inner}".strip(".")) for key, inner in called_cells(plan)]
    by_key = {name.place.key: name for name in names}
    for name in names:
        found = select([name.text], names, cells)
        assert found.cells == () and name.place.key in found.operators, name.text
        assert {by_key[key].path for key in found.operators} == {name.path}, name.text
        assert len({key[:-1] for key in found.operators}) == len(found.operators), name.text
    return names


def names_in(construct, *children, **others):
    """The names in a Cell with this `construct(self, x)`, and with children `a`, `b`, …"""
    cell = cell_of(construct, **dict(zip("abc", children)))
    _, plan = planned(cell, MESH, [Tensor(np.ones((4, 4), np.float32))], **others)
    return check_texts(plan)


def texts_in(construct, *children, **others):
    return [name.text for name in names_in(construct, *children, **others)]


def test_operators_and_variables():
    def construct(self, x):
        weights = ops.softmax(x, -1)
        return ops.matmul(ops.matmul(weights, x), ops.exp(x))

    names = names_in(construct)
    assert [name.text for name in names] == ["weights", "MatMul[0]", "Exp", "MatMul[1]"]
    assert [name.variables for name in names] == [("weights",), (), (), ()]
    assert [(name.labels[0].number, name.labels[0].count) for name in names] == [(0, 1), (0, 2), (0, 1), (1, 2)]
    assert [name.operator for name in names] == [name.place.entry.node.operator for name in names]
    assert [name.place.key for name in names] == [(0,), (1,), (2,), (3,)]


def test_the_variable_may_be_given_more_than_once():
    def construct(self, x):
        x = ops.exp(x)
        x = ops.matmul(x, x)
        x = ops.exp(x)
        y = ops.neg(x)
        return y

    names = names_in(construct)
    assert [name.text for name in names] == ["Exp[0]", "MatMul", "Exp[1]", "y"]
    numbers = [[(label.number, label.count) for label in name.labels if label.variable] for name in names]
    assert numbers == [[(0, 3)], [(1, 3)], [(2, 3)], [(0, 1)]]


def test_loops():
    def construct(self, x):
        total = x
        for _ in range(3):
            part = ops.exp(total)
            total = total + part
        return total

    names = names_in(construct)
    assert [name.text for name in names] == [
        f"{operator}[{number}]" for number in range(3) for operator in ("Exp", "Add")
    ]
    found = select(["part[1-2]", "total[0]"], names, [((), "")])
    assert found.operators == (names[1].place.key, names[2].place.key, names[4].place.key)


def test_results_in_tuples():
    def construct(self, x):
        first, second = ops.split(x, 2)
        _, third = ops.split(second, 1)
        first = ops.neg(first)
        return first, second, third

    names = names_in(construct)
    assert [name.text for name in names] == ["second", "third", "Neg"]
    assert [name.variables for name in names] == [("first", "second"), ("third",), ("first",)]
    found = select(["first", "second"], names, [((), "")])
    split, _, negated = (name.place.key for name in names)
    assert found.by_pattern == {"first": ((), (split, negated)), "second": ((), (split,))}


def test_a_variable_that_is_called_like_a_cell():
    def construct(self, x):
        a = ops.exp(self.a(x))
        b = ops.exp(ops.neg(self.b(a)))
        return b

    # `a` and `b` are the Cells; what a MindSpore Cell computes is not what the line that calls it assigns
    assert texts_in(construct, nn.ReLU(), nn.Tanh()) == ["a.ReLU", "Exp[0]", "b.Tanh", "Neg", "Exp[1]"]


def test_a_variable_that_is_called_like_an_operator():
    def construct(self, x):
        Exp = ops.neg(x)  # noqa: N806
        exp = ops.exp(Exp)
        return ops.exp(exp)

    # `Exp[0]` is the first variable and the first operator of that name, `exp[0]` that operator alone
    assert texts_in(construct) == ["Neg", "exp[0]", "Exp[1]"]


def test_names_that_are_also_found_further_inside():
    def construct(self, x):
        y = ops.relu(self.a(x))
        return ops.exp(y)

    def inner(self, x):
        y = ops.exp(x)
        return y

    names = names_in(construct, cell_of(inner))
    assert [name.text for name in names] == ["a.y", ".y", ".Exp"]
    cells = [((), ""), ((0,), "a")]
    assert select(["y"], names, cells).operators == (names[0].place.key, names[1].place.key)


def test_a_cell_with_a_bprop_is_a_cell():
    def construct(self, x):
        return ops.exp(self.a(x))

    assert texts_in(construct, Doubled()) == ["Exp"]


def test_redistributions():
    def construct(self, x):
        y = ops.matmul(x, x)
        return y

    names = names_in(construct, arriving={"x": layout(None, "tp")})
    moves = [name for name in names if isinstance(name.place.entry, Redistribution)]
    assert moves and all(name.operator in ("all_gather", "all_reduce", "all_to_all", "slice") for name in moves)
    assert not any(name.variables for name in moves)


def move(*steps):
    kinds = tuple(SimpleNamespace(forward=(STEP_KINDS[kind].runs(op)[0], 0)) for kind, op in steps)
    return Redistribution(None, None, None, kinds, "", True)


def test_redistributions_of_several_steps_and_of_none():
    instructions = (
        move(),
        move(("mark_varying", None)),
        move(("to_partial", "avg")),
        move(("all_gather_varying", None)),
        move(("slice", None), ("mark_varying", None), ("all_gather", None)),
        move(("to_partial", "sum")),
        move(("all_gather", None), ("all_gather", None)),
    )
    plan = CellPlan(SimpleNamespace(nodes=()), MESH, {}, instructions, ())
    names = check_texts(plan)
    assert [name.operator for name in names] == ["all_gather", "slice+all_gather", "mask", "all_gather+all_gather"]
    assert [name.text for name in names] == ["all_gather[0]", "slice+all_gather", "mask", "all_gather+all_gather"]
    found = select(["all_gather"], names, [((), "")])
    assert found.operators == ((3,), (4,), (6,))
    assert select(["all_gather[1]"], names, [((), "")]).operators == ((4,),)


NAMES = [name for name in MODELS if name != "batch norm"]  # which has no plan


@pytest.mark.parametrize("name", daily(NAMES[::3], NAMES))
def test_texts_of_whole_models(name):
    cell, batch = MODELS[name]()
    args, named = batch(0)
    _, plan = planned(cell, MESH, args, named)
    names = check_texts(plan)
    assert names
    keys = [place.key for place in operators_in_order(plan)]
    assert [name.place.key for name in names] == [key for key in keys if key in {name.place.key for name in names}]
    unnamed = [place.entry for place in operators_in_order(plan) if place.key not in {n.place.key for n in names}]
    assert not any(isinstance(entry, OperatorPlan) for entry in unnamed)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_llama():
    cell, batch = small_llama()
    args, named = batch(0)
    net = shard(cell, init_device_mesh((1, 1), ("dp", "tp")))
    net.set_train()
    net(*args, **named)
    tree = tree_of(net)
    names = check_texts(next(iter(tree.programs.values())).plan)
    texts = [name.text for name in names]
    assert len(set(texts)) == len(texts)
    assert "model.layers.1.self_attn.core_attention.Attention" in texts
    assert "model.layers.1.mlp.SiLU" in texts
    assert not any(isinstance(name.place.entry, Redistribution) for name in names)
    plan = next(iter(tree.programs.values())).plan
    assert list(operator_texts(plan).values()) == texts
    assert set(operator_texts(plan, "student").values()) == {f"student.{text}".replace("..", ".") for text in texts}
    cells = called_cells(plan)
    found = select(["layers.*.mlp.gate_proj.MatMul"], names, cells).operators
    assert found and found == select(["gate_proj.Dense"], names, cells).operators


def test_a_product_with_the_weight_of_a_linear_layer_is_one_too():
    """Where nothing else in that call is called so."""

    def plain(self, x, weight):
        y = ops.dense(x, weight)
        return ops.dense(ops.exp(y), weight)

    def both(self, x, weight):
        return ops.matmul(ops.dense(x, weight), weight)

    def variable(self, x, weight):
        mat_mul = ops.exp(x)
        return ops.dense(mat_mul, weight)

    def construct(self, x):
        return self.c(self.b(self.a(x, x), x), x)

    names = names_in(construct, *map(cell_of, (plain, both, variable)))
    found = [name.text for name in names]
    assert found == ["a.y", "a.Exp", "a.Dense[1]", "b.Dense", "b.MatMul", "c.mat_mul", "c.Dense"]
    cells = [((), ""), ((0,), "a"), ((1,), "b"), ((2,), "c")]
    texts = {name.place.key: name.text for name in names}

    def selected(pattern):
        return [texts[key] for key in select([pattern], names, cells).operators]

    assert selected("a.MatMul") == ["a.y", "a.Dense[1]"] and selected("a.matmul[1]") == ["a.Dense[1]"]
    assert selected("*.matmul") == ["a.y", "a.Dense[1]", "b.MatMul"]
    assert selected("*.dense") == ["a.y", "a.Dense[1]", "b.Dense", "c.Dense"]
    assert selected("c.mat_mul") == ["c.mat_mul"]
    with pytest.raises(ValueError, match="matches no"):
        selected("c.matmul")


def test_operators_are_called_without_suffix():
    operators = ("MatMulExt", "SplitView", "TransposeExtView", "View", "Ext", "Next", "ToDtype")
    assert [friendly_name(name) for name in operators] == [
        "MatMul", "Split", "Transpose", "View", "Ext", "Next", "Cast",
    ]  # fmt: skip
    assert {plain_name(name) for name in ("MatMul", "mat_mul", "MATMUL", "Mat_Mul_")} == {"matmul"}
    assert plain_name("_MatMul") == "_matmul"
