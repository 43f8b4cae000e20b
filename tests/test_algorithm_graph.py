"""Distributed algorithms written down: run for all ranks of a mesh in one process, they give what one card gives."""

import sys
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from support.algorithm_calls import (
    CASES as ON_CPU,
    IMAGES,
    INDICES,
    KERNELS,
    LOOKUPS,
    NUMBERS,
    SOFTMAX,
    TABLE,
    WINDOWS,
    Several,
)
from support.algorithm_prices import eager_price, program_price
from support.nightly import daily
from support.simulated_ranks import collect, distribute, run_forward

from mindformers_core.algorithms.distributed_operators import ALGORITHMS
from mindformers_core.capture.algorithm_graph import algorithm_graph, redistribution_steps
from mindformers_core.capture.capture import capture
from mindformers_core.layout import Layout, layout
from mindformers_core.lowering.corrected import padded
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.program.structure import Value, tree_leaves, tree_map
from mindformers_core.propagation.propagate import propagate

sys.path.append(str(Path(__file__).parent / "ranks"))
from direct_calls import Operator  # noqa: E402, its folder is on the path only now

MESH = init_device_mesh((2, 2), ("dp", "tp"))
ENTRIES = [(None, "tp"), ("dp", "tp"), (None, ("dp", "tp")), (None, ("tp", "dp")), ("tp", "dp"), ("tp", None)]
CUTS = [layout(*entries) for entries in (*ENTRIES, (("tp", "dp"), None))]
WITHOUT_KERNEL = {  # on CPU
    "embedding": lambda x, i: mint.nn.functional.embedding(i, x),
    "index_select": lambda x, i: mint.index_select(x, 0, i[:, 1]),
    "shift": lambda x, i: mint.nn.functional.pad(x, (3, -3)),
}
SPREADS = {
    "norm": lambda x: mint.linalg.vector_norm(x, float("inf"), 1) + mint.linalg.vector_norm(x, -float("inf"), 1),
    "spread": lambda x: mint.var_mean(x, 1)[0] + mint.std_mean(x, 1)[1] + mint.var(x, 1) + mint.std(x, 1),
}
SPARSE = {"EmbeddingLookup": lambda x, i: ops.EmbeddingLookup()(x, i, 1)}  # its gradient
CASES = ON_CPU | {
    "softmax": (SOFTMAX | {"mint": lambda x: mint.logsumexp(x, 1)}, [NUMBERS]),
    "lookups in rows": (LOOKUPS | WITHOUT_KERNEL | SPARSE, [TABLE, INDICES]),
}
IMAGE_CUTS = [layout(None, None, *entries) for entries in (("tp", "dp"), (("tp", "dp"),))]
DRAWS = {
    "fractions": lambda x: x + mint.rand_like(x) + mint.randn(x.shape),
    "integers": lambda x: x + mint.randint_like(x, 0, 5) + mint.randperm(x.shape[1]),
}
DROPOUTS = {
    "primitive": lambda x: ops.dropout(x, 0.25),
    "mint": lambda x: mint.nn.functional.dropout(x, 0.25, True),
}


@cache
def plans_of_case(case, name, given):
    """`plans_of` one of the functions of `CASES`."""
    functions, arrays = CASES[case]
    return plans_of(functions[name], arrays, given)


def plans_of(function, arrays, given):
    """The captured graph of a function, and the plans of those operators in it that need an algorithm."""
    tensors = [Tensor(array) for array in arrays]
    graph = capture(Several({"": function}), *tensors)
    arguments = tree_leaves(list(graph.arguments.values()))
    layouts = [given.bind(MESH, arrays[0].ndim), *(Layout.on(MESH, ((),) * array.ndim) for array in arrays[1:])]
    plan = propagate(graph, MESH, {value.id: each for value, each in zip(arguments, layouts)}, {}, {})
    plans = [entry for entry in plan.instructions if isinstance(entry, OperatorPlan) and entry.algorithm]
    return graph, plans


def known_values(graph, arrays):
    """Number of a Value -> tensor, of all Values of a graph, on one card."""
    known = dict(zip([value.id for value in tree_leaves(list(graph.arguments.values()))], map(Tensor, arrays)))
    known |= {constant.value.id: Tensor(constant.array) for constant in graph.constants}
    for node in graph.nodes:
        run(node, known)
    return known


def run(node, known):
    """Run one operator, and enter its results."""
    args, kwargs = tree_map(lambda leaf: known[leaf.id] if isinstance(leaf, Value) else leaf, (node.args, node.kwargs))
    if node.operator == "Embedding":  # without a kernel on CPU
        results = ops.gather(args[1], args[0], 0)
    elif node.operator == "ConstantPadND":
        results = padded(*args)
    elif facts_of(node.operator).attributes and node.primitive is not None:
        kind = getattr(import_module(node.primitive.module), node.operator)
        numbers = facts_of(node.operator).numbers  # which the primitive takes as tensors
        given = [Tensor(each) if place in numbers else each for place, each in enumerate(args)]
        results = kind(**node.primitive.attributes)(*given[: node.primitive.inputs])
    else:
        results = Operator(node.operator)(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    known.update((value.id, result) for value, result in zip(tree_leaves(node.outputs), results, strict=True))


def run_ranks(plan, inputs, state=None):
    """What the graphs of a plan's algorithm give on all ranks, in step; `inputs` are the whole tensors.

    Returns:
        For every output a dict from rank to array.
    """
    graphs = {rank: algorithm_graph(plan, rank) for rank in MESH.rank_list}
    random = np.random.default_rng(2)
    known = {rank: {} for rank in graphs}
    arguments = tree_leaves(list(graphs[0].arguments.values()))
    for value, given, whole in zip(arguments, plan.inputs, inputs, strict=True):
        for rank, part in distribute(np.asarray(whole.asnumpy()), given, random).items():
            known[rank][value.id] = Tensor(np.asarray(part, whole.asnumpy().dtype))
    for rank, graph in graphs.items():
        known[rank].update((constant.value.id, Tensor(constant.array)) for constant in graph.constants)
    for nodes in zip(*(graph.nodes for graph in graphs.values()), strict=True):
        if nodes[0].operator in ("Redistribute", "Step"):
            redistribute(plan, nodes[0], known)
        elif nodes[0].operator == "RandomState":
            for values in known.values():
                values.update((value.id, number) for value, number in zip(tree_leaves(nodes[0].outputs), state))
        else:
            for node, values in zip(nodes, known.values()):
                run(node, values)
    made = tree_leaves(graphs[0].result)
    return [{rank: values[value.id].asnumpy() for rank, values in known.items()} for value in made]


def check_parts(local, given, expected, wrong):
    """Assert that every rank's part, with those that it is a term with, is that of the whole result."""
    axes, reductions = tuple(axis for axis, _ in given.partial), {op for _, op in given.partial}
    assert len(reductions) < 2, given
    reduce = {"sum": np.sum, "max": np.max, "min": np.min, "avg": np.mean}[reductions.pop() if axes else "sum"]
    for rank in local:
        part = reduce([local[other] for other in MESH.group(rank, axes)], axis=0)
        np.testing.assert_allclose(part, expected[given.local_slices(expected.shape, rank)], 1e-5, 1e-5, err_msg=wrong)


def redistribute(plan, node, known):
    """Run a redistribution, or a shift, for all ranks."""
    value = node.args[0]
    local = {rank: values[value.id].asnumpy() for rank, values in known.items()}
    for step in redistribution_steps(plan, node):
        local = run_forward(step, local)
    for rank, values in known.items():
        values[node.outputs.id] = Tensor(local[rank].astype(values[value.id].asnumpy().dtype))


@pytest.mark.parametrize("case", daily(("means", "lookups in columns"), CASES))  # two ranks run all
def test_ranks_together_give_what_one_card_gives(case):
    functions, arrays = CASES[case]
    for name, given in product(functions, CUTS):
        graph, plans = plans_of_case(case, name, given)
        known = known_values(graph, arrays)
        for plan in plans:
            inputs = [known[value.id] for value in tree_leaves((plan.node.args, plan.node.kwargs))]
            wrong = f"{plan.node} as {[str(each) for each in plan.inputs]}"
            results = zip(tree_leaves(plan.node.outputs), plan.outputs, run_ranks(plan, inputs), strict=True)
            for value, layout_of_result, local in results:
                check_parts(local, layout_of_result, known[value.id].asnumpy(), wrong)


@pytest.mark.usefixtures("rank_0_of_4")
def test_graphs_of_all_ranks_are_alike():
    """Ranks that compile different graphs wait for each other forever. And every algorithm is among these cases. An
    eager call tells the price of each without a graph."""
    found = {"attention_dropout", "dropout", "func_dropout"}
    cases = [(*case, CUTS[:1]) for case in (*CASES.values(), (SPREADS, [NUMBERS]), (DRAWS, [NUMBERS]))]
    cases += [(*CASES[name], CUTS[4:5]) for name in ("lookups in rows", "scatters")]
    for functions, arrays, cuts in [*cases, (WINDOWS, [IMAGES, KERNELS], IMAGE_CUTS[:1])]:
        for function, given in product(functions.values(), cuts):
            for plan in plans_of(function, arrays, given)[1]:
                found.add(plan.algorithm)
                first, other = (algorithm_graph(plan, rank) for rank in (0, 3))
                assert list(map(str, other.nodes)) == list(map(str, first.nodes))
                assert [c.value for c in other.constants] == [c.value for c in first.constants]
                assert str(other.result) == str(first.result)
                assert eager_price(plan) == program_price(plan, first)
    assert found == set(ALGORITHMS)


def test_positions_differ_between_ranks_in_constants_only():
    plan = plans_of(LOOKUPS["gather"], [TABLE, INDICES], layout(("dp", "tp")))[1][0]
    starts = [algorithm_graph(plan, rank).constants for rank in MESH.rank_list]
    assert [int(start.array) for (start,) in starts] == [0, 16, 32, 48]
    assert {start.array.shape for (start,) in starts} == {()}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_the_same_on_any_mesh(name):
    array = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    state = [Tensor(7), Tensor(12)]
    found = []
    for given in (*CUTS, layout(None, None)):
        _, (plan,) = plans_of(DROPOUTS[name], [array], given)
        inputs = [Tensor(array), *(state if name == "mint" else ())]
        found.append(collect(run_ranks(plan, inputs, state)[0], plan.outputs[0], array.shape))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    kept = found[0] != 0
    assert 0.6 < kept.mean() < 0.9
    np.testing.assert_allclose(found[0][kept], array[kept] / 0.75, 1e-5)
