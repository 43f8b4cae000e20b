"""Random Cells of random operators, whose tensors lie as a random plan says, equal one card as generated programs."""

from contextlib import contextmanager

import mindspore as ms
import numpy as np
from accepted import AXES, layouts_of
from case_random_programs import random_program
from launch import on_ranks
from mindspore import Parameter, Tensor, nn
from one_card import draw, part_of

from mindformers_core.communication import count_collectives
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, jit, shard

GRAPHS, COMPILED = 20, 2  # programs; how many of them one function compiles together
TOLERANCE = 1e-4  # as for random programs: products of products
NAMES = ("x", "y", "first", "second")


class Part(nn.Cell):
    """Some operators on two values and two parameters of its own."""

    def __init__(self, program, weights):
        super().__init__()
        self.program = program
        self.first, self.second = (Parameter(weight, name=name) for weight, name in zip(weights, NAMES[2:]))

    def construct(self, x, y):
        return self.program(x, y, self.first, self.second)


class Random(nn.Cell):
    """Two parts, the second on what the first gives; a number comes out."""

    def __init__(self, parts, slopes):
        super().__init__()
        self.inner, self.outer = parts
        self.slopes = slopes

    def construct(self, x, y):
        return (self.outer(self.inner(x, y), x) * self.slopes).sum()


def random_cell(seed):
    """A function that builds the Cell anew, what it is made of, and its inputs."""
    random = np.random.default_rng(1000 + seed)
    programs = [random_program(random) for _ in range(2)]
    shape = (4, 8) if seed % 2 else (4, 4, 8)
    weights = [[draw(random, (8, 8)) for _ in range(2)] for _ in programs]
    slopes = draw(random, shape)

    def make():
        parts = [Part(program, map(_copy, own)) for (program, _), own in zip(programs, weights)]
        cell = Random(parts, _copy(slopes))
        cell.update_parameters_name(f"graph{seed}.")  # a compiled function knows its parameters by name
        return cell

    return make, " | ".join(description for _, description in programs), [draw(random, shape) for _ in range(2)]


def _copy(tensor):
    return Tensor(tensor.asnumpy())


def random_plan(seed, mesh, shape):
    """Layouts for the inputs, the parameters, and some of what goes in and out of the parts."""
    random = np.random.default_rng(2000 + seed)

    def any_of(shape, often=1.0):
        layouts = [each for each in layouts_of(shape, False, mesh)]
        return layouts[random.integers(len(layouts))] if random.random() < often else None

    part = [
        {
            "input": {"x": any_of(shape, 0.4), "y": any_of(shape, 0.4)},
            "output": (any_of(shape, 0.4),),
            "weight": {"first": any_of((8, 8)), "second": any_of((8, 8))},
        }
        for _ in range(2)
    ]
    root = {"input": {"x": any_of(shape), "y": any_of(shape)}, "output": Layout.on(mesh, ())}
    return {"": root, "inner": part[0], "outer": part[1]}


def one_card(seed):
    """Loss and gradients, of inputs and of parameters by name."""
    make, _, inputs = random_cell(seed)
    cell = make()
    loss, (slopes, gradients) = differentiated(cell)(*inputs)
    named = {p.name: gradient.asnumpy() for p, gradient in zip(cell.trainable_params(), gradients, strict=True)}
    return loss.asnumpy(), [slope.asnumpy() for slope in slopes], named


def prepared(seed, mesh, mode="generated"):
    """The sharded Cell, the layouts of its inputs, and this rank's parts of them."""
    make, _, inputs = random_cell(seed)
    plan = random_plan(seed, mesh, inputs[0].shape)
    layouts = [plan[""]["input"][name] for name in NAMES[:2]]
    locals_ = [Tensor(part_of(value.asnumpy(), given)) for value, given in zip(inputs, layouts)]
    return shard(make(), mesh, plan=plan, mode=mode), layouts, locals_


@contextmanager
def located(what):
    """Says which graph has failed."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def differentiated(cell):
    """Inputs -> loss, and gradients of inputs and parameters."""
    return ms.value_and_grad(cell, (0, 1), cell.trainable_params())


def compare(result, cell, layouts, truth):
    """All values against this rank's part of one card's."""
    loss, (slopes, gradients) = result
    whole, whole_slopes, named = truth
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    np.testing.assert_allclose(loss.asnumpy(), whole, TOLERANCE, TOLERANCE, err_msg="loss")
    for name, slope, given, expected in zip(NAMES, slopes, layouts, whole_slopes):
        np.testing.assert_allclose(slope.asnumpy(), part_of(expected, given), TOLERANCE, TOLERANCE, err_msg=name)
    for parameter, found in zip(cell.trainable_params(), gradients, strict=True):
        expected = part_of(named[parameter.name], parameter.layout)
        wrong = f"{parameter.name}, {parameter.layout}"
        np.testing.assert_allclose(found.asnumpy(), expected, TOLERANCE, TOLERANCE, err_msg=wrong)


def check_graphs(seeds):
    """By both engines in PyNative. Ends at the first failure: an error in a gradient spoils MindSpore's next ones."""
    mesh, moved = init_device_mesh((2, 2), AXES), {"eager": 0, "generated": 0}
    for seed in seeds:
        truth = one_card(seed)
        for mode in moved:
            with located(f"graph {seed}, {mode}, {random_cell(seed)[1]}"):
                cell, layouts, inputs = prepared(seed, mesh, mode)
                with count_collectives() as counts:
                    result = differentiated(cell)(*inputs)
                moved[mode] += sum(size for _, size in counts.values())
                compare(result, cell, layouts, truth)
    assert moved["generated"] <= moved["eager"], moved


@on_ranks(4)
def case_random_graphs_of_batches_equal_one_card():
    """Values of three dims."""
    check_graphs(range(0, GRAPHS, 2))


@on_ranks(4)
def case_random_graphs_of_matrices_equal_one_card():
    """Values of two dims."""
    check_graphs(range(1, GRAPHS, 2))


@on_ranks(4)
def case_random_graphs_compiled_equal_one_card():
    """Some of them in one compilation."""
    mesh = init_device_mesh((2, 2), AXES)
    made = [prepared(seed, mesh) for seed in range(COMPILED)]
    steps = [differentiated(cell) for cell, *_ in made]

    def run(*inputs):
        results = ()
        for place, step in enumerate(steps):
            results = results + (step(inputs[2 * place], inputs[2 * place + 1]),)
        return results

    results = jit(run)(*[value for _, _, inputs in made for value in inputs])
    for seed, (result, (cell, layouts, _)) in enumerate(zip(results, made, strict=True)):
        with located(f"graph {seed}, compiled, {random_cell(seed)[1]}"):
            compare(result, cell, layouts, one_card(seed))
