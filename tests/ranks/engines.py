"""Runs one of `MODELS` by every engine and compares with one card: results, gradients of all parameters."""

import inspect
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from graph_collectives import count_in_graph
from mindspore import Tensor
from models import EXAMPLES, axes_of
from models.authors import AUTHORS
from models.language import SHARED
from one_card import part_of, same
from truth import once

from mindformers_core.communication import count_collectives
from mindformers_core.dtensor.interception import draws_by_position
from mindformers_core.layout import bind_layout
from mindformers_core.program.structure import tree_map
from mindformers_core.tensor_parallel import DTensor, jit, shard

__all__ = ["check_engines", "check_in_graph", "check_in_pynative"]

SEED, TOLERANCE = 7, 1e-5
MODELS = {**EXAMPLES, **AUTHORS, **SHARED}


@dataclass(frozen=True)
class Truth:
    """What one card computes: the result with arrays in it, the loss, gradients by parameter name, and by that name the
    values of what isn't trained, as running statistics, after a step and a call."""

    result: object
    loss: np.ndarray
    gradients: dict
    state: dict


@once
def truth(name):
    """The `Truth` of a model, with the values of `built` and the inputs of `SEED`."""
    example, cell = MODELS[name], built(name)
    args, kwargs = example.inputs(SEED)
    with draws_by_position():
        loss, gradients = seeded(step_of(cell, example))(*args, **kwargs)
        result = seeded(cell)(*args, **kwargs)
    named = {p.name: gradient.asnumpy() for p, gradient in zip(cell.trainable_params(), gradients, strict=True)}
    state = {p.name: p.asnumpy() for p in cell.untrainable_params()}
    return Truth(tree_map(_array, result), loss.asnumpy(), named, state)


def seeded(function):
    """The function, with the same random numbers at every call."""

    def call(*args, **kwargs):
        ms.manual_seed(SEED)
        return function(*args, **kwargs)

    return call


def built(name):
    """The plain model; every parameter has values that differ from each other, the same at every call."""
    cell, random = MODELS[name].make(), np.random.default_rng(SEED)
    for parameter in cell.get_parameters():
        values = random.normal(size=parameter.shape).astype(np.float32) * 0.3
        parameter.set_data(Tensor(values + 1 if parameter.ndim == 1 else values))
    return cell


def step_of(cell, example):
    """Inputs -> loss and gradients of all trainable parameters."""

    def forward(*args, **kwargs):
        return example.loss(cell(*args, **kwargs))

    return ms.value_and_grad(forward, None, cell.trainable_params())


def sharded(name, mesh, mode):
    """The model, sharded as its plan says, and its inputs: this rank's parts."""
    example, cell, axes = MODELS[name], built(name), axes_of(mesh)
    plan = example.plan(axes)
    bound = inspect.signature(cell.construct).bind(*example.inputs(SEED)[0], **example.inputs(SEED)[1])

    def part(argument):
        given = plan[""]["input"][argument]
        return lambda leaf: Tensor(part_of(leaf.asnumpy(), bind_layout(given, mesh, leaf.ndim)))

    bound.arguments.update({key: tree_map(part(key), value) for key, value in bound.arguments.items()})
    shard(cell, mesh, example.config(axes), plan=plan, mode=mode)
    return cell, bound.args, bound.kwargs


def check_engines(name, mesh, in_graph=False):
    """Compare a model with one card, by the eager engine and as a generated program.

    Args:
        name: of the model.
        mesh: the mesh.
        in_graph: whether to compile the generated program, too.
    """
    check_in_pynative(name, mesh, "eager")
    generated, made = check_in_pynative(name, mesh, "generated")
    if in_graph:
        compiled = check_in_graph(name, mesh, *made)
        for kind, (calls, size) in compiled.items():  # a compiler leaves out what only unused results need
            most = generated.get(kind, (0, 0))
            assert calls <= most[0] and size <= most[1], f"{name} on {mesh}: jit {compiled}, PyNative {generated}"


def check_in_pynative(name, mesh, mode):
    """Compare a model's results and gradients with one card's.

    Returns:
        What a forward and backward pass communicates, as counted; and the Cell with its inputs.
    """
    cell, args, kwargs = sharded(name, mesh, mode)
    what = f"{name} on {mesh}, {mode}"
    same(tree_map(_whole, seeded(cell)(*args, **kwargs)), truth(name).result, TOLERANCE, what)
    with count_collectives() as counts:
        loss, gradients = seeded(step_of(cell, MODELS[name]))(*args, **kwargs)
    _compare(what, truth(name), cell, _whole(loss), gradients)
    for parameter in cell.untrainable_params():
        part = part_of(truth(name).state[parameter.name], parameter.layout)
        np.testing.assert_allclose(parameter.asnumpy(), part, TOLERANCE, TOLERANCE, err_msg=f"{parameter.name}, {what}")
    return counts, (cell, args, kwargs)


def check_in_graph(name, mesh, cell, args, kwargs):
    """Compare the loss and gradients of a compiled step with one card's; gives what it communicates."""
    with count_in_graph(mesh) as counts:
        loss, gradients = seeded(jit(step_of(cell, MODELS[name])))(*args, **kwargs)
    _compare(f"{name} on {mesh}, jit", truth(name), cell, loss.asnumpy(), gradients)
    return counts


def _compare(what, expected, cell, loss, gradients):
    np.testing.assert_allclose(loss, expected.loss, TOLERANCE, TOLERANCE, err_msg=f"loss of {what}")
    parameters = cell.trainable_params()
    assert [p.name for p in parameters] == list(expected.gradients), what
    for parameter, found in zip(parameters, gradients, strict=True):
        part = part_of(expected.gradients[parameter.name], parameter.layout)
        wrong = f"gradient of {parameter.name}, {parameter.layout}, of {what}"
        np.testing.assert_allclose(found.asnumpy(), part, TOLERANCE, TOLERANCE, err_msg=wrong)


def _array(leaf):
    return leaf.asnumpy() if isinstance(leaf, Tensor) else leaf


def _whole(leaf):
    return _array(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf)
