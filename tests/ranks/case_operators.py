"""Every operator rule against one card: forward and gradient, for the placements of its inputs on a 2x2 mesh."""

from itertools import permutations, product

import numpy as np
from launch import on_ranks
from mindspore_calls import CALLS, F
from one_card import check, draw

from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh

MOST = 24  # combinations tried for one call
AXES = ("dp", "tp")
DTYPES = {F: "float32", "int": "int32", "bool": "bool"}


def layouts_of(kind, shape, mesh):
    """All layouts of an input of this shape: each axis replicated, on any dim (in both orders), partial or varying."""
    choices = [None, *range(len(shape)), *(["sum", "varying"] if kind == F else [])]
    found = []
    for picks in product(choices, repeat=len(AXES)):
        partial = {axis: "sum" for axis, pick in zip(AXES, picks) if pick == "sum"}
        varying = [axis for axis, pick in zip(AXES, picks) if pick == "varying"]
        for order in permutations(AXES):
            dims = [[axis for axis in order if picks[AXES.index(axis)] == dim] for dim in range(len(shape))]
            if all(size % mesh.axis_size(*axes) == 0 for size, axes in zip(shape, dims)):
                found.append(Layout.on(mesh, dims, partial, varying))
    return list(dict.fromkeys(found))


def combinations(inputs, mesh, random):
    """Layouts for all inputs: all combinations, or a random sample of `MOST`, the all-replicated one left out."""
    every = [layouts_of(kind, shape, mesh) for kind, shape in inputs]
    count = int(np.prod([len(layouts) for layouts in every]))
    if count <= MOST:
        return list(product(*every))
    return [tuple(layouts[random.integers(len(layouts))] for layouts in every) for _ in range(MOST)]


@on_ranks(4)
def case_operators_equal_one_card():
    """See the module's docstring. All failures are collected, so that one run shows all of them."""
    mesh = init_device_mesh((2, 2), AXES)
    failures = []
    for name, (function, inputs) in CALLS.items():
        random = np.random.default_rng(7)
        values = [draw(random, shape, DTYPES[kind]) for kind, shape in inputs]
        try:
            check(name, function, values, combinations(inputs, mesh, random))
        except Exception as error:  # collected: the ranks run on in step, since they fail alike
            failures.append(f"{name}: {type(error).__name__}: {error}"[:900])
            print(failures[-1], flush=True)
    assert not failures, f"{len(failures)} of {len(CALLS)} operators fail:\n" + "\n".join(failures)
