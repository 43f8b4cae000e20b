"""Calls that share their plan are followed once; what is foretold is what it is where each is followed by itself."""

import random

import pytest

from mindformers_core.analysis.prediction import Prediction
from mindformers_core.layout import bind_layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.graph import CallNode, CellGraph, OperatorNode, ParameterUse
from mindformers_core.program.partition import unshared
from mindformers_core.program.plan import CallPlan, CellPlan, OperatorPlan, called_cells, operators_in_order
from mindformers_core.program.structure import Value

MESH = init_device_mesh((1,), ("tp",))
SHAPE = (4, 4)
WHOLE = bind_layout(layout(), MESH, 2)
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
    return CellPlan(graph, MESH, dict.fromkeys(range(len(values)), WHOLE), tuple(plans), (WHOLE,) * len(results))


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


@pytest.mark.parametrize("seed", range(40))
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
