"""Parameters that Cells write, as batch norm's running statistics, over several steps in every engine."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from one_card import part_of
from support.launch import on_ranks
from support.written_models import MODELS, batches, built
from truth import once

from mindformers_core.communication import world
from mindformers_core.layout import bind_layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, jit, shard

RATE = 0.1


def steps(cell, inputs, compiled=False):
    """Result, gradients, and what all parameters hold, after each step of gradient descent."""

    def forward(x):
        result = cell(x)
        return ops.square(result).mean(), result

    weights, found = cell.trainable_params(), []
    step = ms.value_and_grad(forward, None, weights, has_aux=True)
    step = jit(step) if compiled else step
    for x in inputs:
        (_, result), gradients = step(Tensor(x))
        for weight, gradient in zip(weights, gradients):
            ops.assign(weight, weight - RATE * gradient)
        result = result.full_tensor() if isinstance(result, DTensor) else result
        held = {parameter.name: parameter.asnumpy().copy() for parameter in cell.get_parameters()}
        found.append((result.asnumpy(), [gradient.asnumpy() for gradient in gradients], held))
    return found


@once
def truth(name):
    """What one card does."""
    return steps(built(MODELS[name][0]), batches())


def check(name, mesh, mode, compiled=False):
    """Compare a model with one card, step by step."""
    kind, plan = MODELS[name]
    cell = shard(built(kind), mesh, plan=plan, mode=mode)
    given = bind_layout(plan[""]["input"]["x"], mesh, 4)
    layouts = {parameter.name: parameter.layout for parameter in cell.get_parameters()}
    trained = [parameter.layout for parameter in cell.trainable_params()]
    found = steps(cell, [part_of(x, given) for x in batches()], compiled)
    for number, (one, other) in enumerate(zip(found, truth(name), strict=True)):
        what = f"{name}, {'jit' if compiled else mode}, step {number}"
        np.testing.assert_allclose(one[0], other[0], 1e-4, 1e-5, err_msg=what)
        for layout, gradient, whole in zip(trained, one[1], other[1], strict=True):
            np.testing.assert_allclose(gradient, part_of(whole, layout), 1e-4, 1e-5, err_msg=f"a gradient of {what}")
        for parameter, value in one[2].items():
            part = part_of(other[2][parameter], layouts[parameter])
            np.testing.assert_allclose(value, part, 1e-4, 1e-5, err_msg=f"{parameter} of {what}")


@on_ranks(2, nightly=(4,))
def case_written_state_equals_one_card():
    """Statistics, counters and sums after three steps; all models, of simulated ranks, are in `test_written_state`."""
    mesh = init_device_mesh((world().size // 2, 2), ("dp", "tp"))
    check("sums cut", mesh, "eager")
    check("statistics cut", mesh, "generated", compiled=True)
