"""Propagation of random Cell trees with random layouts ($RANDOM_PROGRAMS of them), run in NumPy on simulated ranks."""

import os

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from support.nightly import daily
from support.plan_checks import check_plan, communication
from support.simulated_plans import computed, simulate
from support.simulated_ranks import collect

from mindformers_core.capture.capture import capture
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.graph import match_arguments
from mindformers_core.program.structure import tree_leaves, tree_map
from mindformers_core.propagation.boundaries import Declaration, OperatorDeclaration
from mindformers_core.propagation.decide import FLOWS
from mindformers_core.propagation.propagate import Propagation, derive_parameters, propagate
from mindformers_core.redistribution import CPU

SIZE = 8
MESHES = ((2, 2), ("dp", "tp")), ((2, 4), ("dp", "tp")), ((2, 2, 2), ("dp", "cp", "tp"))
BINARY = {"Add": ops.add, "Sub": ops.sub, "Mul": ops.mul}
UNARY = {
    "Neg": ops.neg,
    "ReLU": ops.relu,
    "Transpose": lambda x: ops.transpose(x, (1, 0)),
    # parts of a tensor, which lie in different ways: as rows and columns of products
    "halves": lambda x: _product(*ops.split(x, SIZE // 2, 1)),
    "swapped": lambda x: ops.concat(ops.chunk(x, 2, 0)[::-1], 0),
    "lengths": lambda x: ops.concat(mint.split(x, (3, 5), 1)[::-1], 1),
    "unstacked": lambda x: _outer(*ops.unstack(x, 0)[1:6:4]) + _outer(*ops.unstack(x, 1)[:2]),
    "sorted": lambda x: _product(*[ops.sort(part)[0] for part in (x, ops.neg(x))]),
    "views": lambda x: _product(x.narrow(1, 5, 3), x[:, 2:5]),
    "row": lambda x: _outer(x[3], x[:, 6]) + ops.sum(x, 0, keepdim=True),
}


def _product(a, b):
    return ops.matmul(a, ops.transpose(b, (1, 0)))


def _outer(a, b):
    return ops.expand_dims(a, 1) * ops.expand_dims(b, 0)


class Program(nn.Cell):
    """A few random operators on square tensors, calls of the same at a lower depth, and one or two results.

    Cells of one program may share parameters, and be called several times.
    """

    def __init__(self, rng, depth, shared):
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((SIZE, SIZE), np.float32)))
        self.bias = Parameter(Tensor(np.zeros(SIZE, np.float32)), requires_grad=bool(rng.integers(2)))
        if shared is not None and rng.integers(3) == 0:
            self.weight = shared
        self.matmul = ops.MatMul()
        self.children = nn.CellList([Program(rng, depth - 1, self.weight) for _ in range(2)] if depth else [])
        kinds = [*BINARY, *UNARY, "matmul", "weight", "bias"] + (["call"] * 4 if depth else [])
        self.steps = [
            (kinds[rng.integers(len(kinds))], *rng.integers(0, 1 << 30, 3)) for _ in range(rng.integers(1, 6))
        ]
        self.count = int(rng.integers(1, 3))

    def construct(self, x, y=None):
        pool = [x] if y is None else [x, y]
        for kind, first, second, third in self.steps:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            if kind in BINARY:
                made = [BINARY[kind](a, b)]
            elif kind in UNARY:
                made = [UNARY[kind](a)]
            elif kind == "call":
                child = self.children[int(third) % 2]
                made = child(a) if third % 3 else child(a, y=b)
            elif kind == "bias":
                made = [a + self.bias]
            else:
                made = [self.matmul(a, b if kind == "matmul" else self.weight)]
            pool += made
        return tuple(pool[-self.count :])


def draw_layout(rng, mesh, ndim=2):
    """A random layout without marks."""
    dims = [[] for _ in range(ndim)]
    for axis in rng.permutation(mesh.axis_names):
        place = int(rng.integers(ndim + 1))
        if place < ndim and SIZE % (mesh.axis_size(*dims[place], axis)) == 0:
            dims[place].append(str(axis))
    return Layout.on(mesh, dims)


def draw_declarations(rng, mesh, cell):
    """Random declarations for some Cells."""

    def sometimes(ndim=2):
        return draw_layout(rng, mesh, ndim) if rng.integers(3) == 0 else None

    found = {}
    for path, child in cell.cells_and_names():
        if not isinstance(child, Program):
            continue
        inputs = {name: place for name in ("x", "y") if (place := sometimes()) is not None}
        outputs = {key: place for key in range(child.count) if (place := sometimes()) is not None}
        operators = {}
        if rng.integers(3) == 0:
            cuts = [(layout("dp", None), layout(None, "tp")), (layout(None, "tp"), layout("tp", None)), (None, None)]
            operators["matmul"] = OperatorDeclaration(cuts[rng.integers(3)], (sometimes(),))
        found[path] = Declaration(inputs, outputs, {}, operators)
    return found


def evaluate(graph, given, parameters, path=""):
    """The results on one card."""
    known = dict(given)
    for use in graph.parameters:
        known[use.value.id] = parameters[use.path]
    for node in graph.nodes:
        if hasattr(node, "operator"):
            args = tree_map(lambda leaf: known[leaf.id] if tree_leaves(leaf) else leaf, (node.args, node.kwargs))
            results = computed(node, *args)
        else:
            inner = {a.id: known[b.id] for a, b in match_arguments(node).items()}
            results = evaluate(node.graph, inner, parameters)
        known.update(zip([value.id for value in tree_leaves(node.outputs)], results, strict=True))
    return [known[value.id] for value in tree_leaves(graph.result)]


@pytest.mark.parametrize("seed", daily(range(6, 10), range(int(os.environ.get("RANDOM_PROGRAMS", 120)))))
def test_random_programs(seed):
    rng = np.random.default_rng(seed)
    mesh = init_device_mesh(*MESHES[seed % len(MESHES)])
    cell = Program(rng, int(rng.integers(3)), None)
    graph = capture(cell, *[tensor_meta((SIZE, SIZE), "float32")] * 2)
    declarations = draw_declarations(rng, mesh, cell)
    values = {value.id: value for value in tree_leaves(graph.arguments)}
    arriving = {number: draw_layout(rng, mesh) for number in values}
    shapes = {path: tuple(parameter.shape) for path, parameter in cell.parameters_and_names()}
    stored = {path: draw_layout(rng, mesh, len(shape)) for path, shape in shapes.items()}
    if seed % 5 == 0:
        stored = derive_parameters(graph, mesh, arriving, stored, declarations, free=stored.keys())
    plan = propagate(graph, mesh, arriving, stored, declarations)
    check_plan(plan)
    check_costs(graph, mesh, arriving, stored, declarations, plan)
    inputs = {number: rng.normal(size=(SIZE, SIZE)) for number in values}
    parameters = {path: rng.normal(size=shape) for path, shape in shapes.items()}
    names = {id(parameter): path for path, parameter in cell.parameters_and_names()}
    aliases = {  # every name of a shared parameter
        f"{path}.{name}" if path else name: parameters[names[id(parameter)]]
        for path, child in cell.cells_and_names()
        for name, parameter in child._params.items()
    }
    locals_ = simulate(plan, inputs, aliases, rng)
    for local, place, expected in zip(locals_, plan.results, evaluate(graph, inputs, parameters), strict=True):
        assert not place.partial and not place.varying
        np.testing.assert_allclose(collect(local, place, expected.shape), expected, rtol=1e-6, atol=1e-6)


def check_costs(graph, mesh, arriving, stored, declarations, plan):
    """Assert that the plan moves what was reckoned, and no more than operator by operator."""
    run = Propagation(mesh, stored, declarations, CPU)
    arguments = {number: (layout, FLOWS, False) for number, layout in arriving.items()}
    improved, greedy = run.decide_root(graph, arriving, True), run.decide(graph, arguments, True)
    assert improved.price.communication == communication(plan)
    assert improved is greedy or not greedy.price.improves_on(improved.price)
    passed = {number: layout for number, layout in arriving.items()}
    assert greedy.price.communication == communication(run.place(greedy, passed, ()))
