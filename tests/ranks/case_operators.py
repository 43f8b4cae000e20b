"""Every operator rule against one card: forward and gradient, for the placements of its inputs on a 2x2 mesh."""

from itertools import permutations, product

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from launch import on_ranks
from mindformers_core.communication import world
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, distribute_tensor
from mindspore_calls import CALLS, F

MOST = 24  # combinations tried for one call
AXES = ("dp", "tp")


def layouts_of(kind, shape, mesh):
    """All layouts that an input of this shape can have: each axis replicated, on any dim (in both orders), or partial."""
    choices = [None, *range(len(shape)), *(["sum"] if kind == F else [])]
    found = []
    for picks in product(choices, repeat=len(AXES)):
        partial = {axis: "sum" for axis, pick in zip(AXES, picks) if pick == "sum"}
        for order in permutations(AXES):
            dims = [[axis for axis in order if picks[AXES.index(axis)] == dim] for dim in range(len(shape))]
            if all(size % mesh.axis_size(*axes) == 0 for size, axes in zip(shape, dims)):
                found.append(Layout.on(mesh, dims, partial))
    return list(dict.fromkeys(found))


def draw(kind, shape, random):
    if kind == F:
        return Tensor(random.normal(size=shape).astype(np.float32))
    return Tensor(random.integers(0, 4, shape).astype(np.int32)) if kind == "int" else Tensor(random.random(shape) < 0.5)


def combinations(inputs, mesh, random):
    """Layouts for all inputs: all combinations, or a random sample of `MOST`, the all-replicated one left out."""
    every = [layouts_of(kind, shape, mesh) for kind, shape in inputs]
    count = int(np.prod([len(layouts) for layouts in every]))
    if count <= MOST:
        return list(product(*every))
    return [tuple(layouts[random.integers(len(layouts))] for layouts in every) for _ in range(MOST)]


def single_card(function, values, floats):
    """Result, the cotangent that its sum is weighted with, and the gradients of all float inputs."""
    result = function(*values)
    weights = Tensor(np.random.default_rng(1).normal(size=result.shape).astype(np.float32))
    if "Float" not in str(result.dtype) or not floats:
        return result, None, ()
    gradients = ms.grad(lambda *args: (function(*args) * weights).sum(), tuple(floats))(*values)
    return result, weights, gradients if isinstance(gradients, tuple) else (gradients,)


def check(name, function, values, floats, layouts, truth):
    """Compare one combination of layouts with one card."""
    result, weights, gradients = truth
    parts = [distribute_tensor(value, layout).to_local() for value, layout in zip(values, layouts)]

    def loss(*local):
        output = function(*[DTensor.from_local(part, layout) for part, layout in zip(local, layouts)])
        assert isinstance(output, DTensor), f"{name} returned {type(output).__name__}"
        assert output.shape == result.shape
        full = output.redistribute(Layout.on(output.mesh, ((),) * output.ndim))
        total = (full * weights).sum() if weights is not None else ops.cast(full, ms.float32).sum()
        return total.to_local(), full.to_local()

    if weights is None:
        np.testing.assert_array_equal(loss(*parts)[1].asnumpy(), result.asnumpy(), err_msg=f"{name} {layouts}")
        return
    (_, full), found = ms.value_and_grad(loss, tuple(floats), has_aux=True)(*parts)
    np.testing.assert_allclose(full.asnumpy(), result.asnumpy(), 1e-5, 2e-6, err_msg=f"{name} {layouts}")
    found = found if isinstance(found, tuple) else (found,)
    for place, gradient, expected in zip(floats, found, gradients):
        mine = expected.asnumpy()[layouts[place].local_slices(expected.shape, world().rank)]
        np.testing.assert_allclose(gradient.asnumpy(), mine, 1e-5, 1e-5, err_msg=f"gradient {place} of {name} {layouts}")


@on_ranks(4)
def case_operators_equal_one_card():
    """See the module's docstring. All failures are collected, so that one run shows all of them."""
    mesh = init_device_mesh((2, 2), AXES)
    failures = []
    for name, (function, inputs) in CALLS.items():
        random = np.random.default_rng(7)
        values = [draw(kind, shape, random) for kind, shape in inputs]
        floats = [place for place, (kind, _) in enumerate(inputs) if kind == F]
        layouts = None
        try:
            truth = single_card(function, values, floats)
            for layouts in combinations(inputs, mesh, random):
                check(name, function, values, floats, layouts, truth)
        except Exception as error:  # collected: the ranks run on in step, since they fail alike
            where = [str(layout) for layout in layouts or ()]
            failures.append(f"{name} {where}: {type(error).__name__}: {error}"[:700])
            print(failures[-1], flush=True)
    assert not failures, f"{len(failures)} of {len(CALLS)} operators fail:\n" + "\n".join(failures)
