"""Random Cells whose tensors lie as a random plan says equal one card on every rank, by both engines.

`python tests/ranks/many_random_cells.py` runs as many others as one likes.
"""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint
from one_card import part_of
from random_cells import random_cell, random_plan
from support.launch import on_ranks

from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, jit, shard

TOLERANCE = 2e-4  # of the largest number of a tensor: products of products
MESHES = {2: [((2,), ("tp",)), ((1, 2), ("dp", "tp"))], 4: [((2, 2), ("dp", "tp")), ((4,), ("tp",))]}
CELLS = 4  # of each world size; every second one daily
COMPILED = {2: (6,), 4: (0,)}  # seeds of those that one function compiles together


@contextmanager
def located(what):
    """Says which Cell has failed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def step_of(cell, drawn):
    """Inputs -> results, and gradients of inputs and parameters."""
    return ms.value_and_grad(cell, drawn.places, cell.trainable_params() or None, has_aux=drawn.aside)


def one_card(drawn):
    """What one card gives. `mint.split` has no right gradient there (docs/mindspore.md)."""
    with mock.patch.object(mint, "split", lambda x, size, dim: x.split(size, dim)):
        cell = drawn.make()
        return list(numbered(step_of(cell, drawn)(*map(Tensor, drawn.inputs)), cell, drawn, None))


def sharded(drawn, seed, mesh, mode="generated"):
    """The sharded Cell, the layouts of its inputs, and this rank's parts of them."""
    plan = random_plan(seed, mesh, drawn.block)
    layouts = list(plan[""]["input"].values())
    parts = [Tensor(part_of(value, given)) for value, given in zip(drawn.inputs, layouts)]
    return shard(drawn.make(), mesh, plan=plan, mode=mode), layouts, parts


def numbered(found, cell, drawn, layouts):
    """`(name, array, layout)` of all results and gradients; the layout of a result is None where it is unknown."""
    value, gradients = found
    for place, result in enumerate(value if isinstance(value, tuple) else (value,)):
        yield f"result {place}", *_taken(result)
    weights = [parameter.name for parameter in cell.trainable_params()]
    slopes, gradients = gradients if drawn.places and weights else (gradients, gradients)
    if drawn.places:
        for place, slope in zip(drawn.places, slopes if isinstance(slopes, tuple) else (slopes,), strict=True):
            yield f"gradient of input {place}", slope.asnumpy(), layouts and layouts[place]
    if weights:
        for parameter, slope in zip(cell.trainable_params(), gradients, strict=True):
            yield f"gradient of {parameter.name}", slope.asnumpy(), layouts and parameter.layout


def _taken(result):
    return (result.to_local().asnumpy(), result.layout) if isinstance(result, DTensor) else (result.asnumpy(), None)


def compare(found, truth):
    """All that is this rank's against one card's."""
    for (name, local, layout), (_, whole, _) in zip(found, truth, strict=True):
        expected = whole if layout is None else part_of(whole, layout)
        if layout is None and local.shape != whole.shape:
            continue  # in a graph nobody says how a result lies
        tolerance = TOLERANCE * max(1e-2, np.abs(whole).max(initial=0))
        np.testing.assert_allclose(local, expected, TOLERANCE, tolerance, err_msg=f"{name}, {layout}")


def check_cells(seeds, world_size, collect=None):
    """By both engines in PyNative; `collect(seed, mode, error)` may take what goes wrong. Gives what happened."""
    outcomes, meshes = Counter(), [init_device_mesh(*given) for given in MESHES[world_size]]
    for seed in seeds:
        drawn, mesh = random_cell(seed), meshes[seed // 2 % len(meshes)]
        for mode in ("one card", "eager", "generated"):
            try:
                with located(f"cell {seed}, {mode}, {mesh}: {drawn.block}"):
                    if mode == "one card":
                        truth = one_card(drawn)
                        continue
                    cell, layouts, parts = sharded(drawn, seed, mesh, mode)
                    compare(numbered(step_of(cell, drawn)(*parts), cell, drawn, layouts), truth)
                outcomes["right"] += 1
            except AssertionError as error:
                if collect is None:
                    raise
                outcomes[collect(seed, mode, error)] += 1
                if mode == "one card":
                    break
    return outcomes


@on_ranks(2)
def case_random_cells_on_2_ranks():
    """On two meshes."""
    check_cells(range(0, CELLS, 2), 2)


@on_ranks(4)
def case_random_cells_on_4_ranks():
    """On two meshes."""
    check_cells(range(CELLS, 2 * CELLS, 2), 4)


@on_ranks(nightly=(2,))
def case_more_random_cells_on_2_ranks():
    """The others; and compiled."""
    check_cells(range(1, CELLS, 2), 2)
    check_compiled(2)


@on_ranks(nightly=(4,))
def case_more_random_cells_on_4_ranks():
    """The others; and compiled."""
    check_cells(range(CELLS + 1, 2 * CELLS, 2), 4)
    check_compiled(4)


def check_compiled(world_size):
    """Some in one compilation."""
    mesh, seeds = init_device_mesh(*MESHES[world_size][0]), COMPILED[world_size]
    all_drawn = [random_cell(seed) for seed in seeds]
    made = [sharded(drawn, seed, mesh) for seed, drawn in zip(seeds, all_drawn)]
    steps = [step_of(cell, drawn) for (cell, *_), drawn in zip(made, all_drawn)]

    def run(*inputs):
        results = ()
        for place, step in enumerate(steps):
            results = results + (step(inputs[2 * place], inputs[2 * place + 1]),)
        return results

    results = jit(run)(*[value for _, _, inputs in made for value in inputs])
    for seed, drawn, result, (cell, layouts, _) in zip(seeds, all_drawn, results, made, strict=True):
        with located(f"cell {seed}, compiled, {drawn.block}"):
            compare(numbered(result, cell, drawn, layouts), one_card(drawn))
