"""Values that change in place, by every engine: what stays changed for callers, tensors made here, draws."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from one_card import part_of
from support.in_place_models import Noisy, Sharing, inputs
from support.launch import on_ranks
from truth import once

from mindformers_core.layout import bind_layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import distribute_tensor, jit, shard

MESH = init_device_mesh((2, 2), ("dp", "tp"))
PLAN = {"": {"input": {"x": layout("dp", "None"), "y": layout("None", "tp")}, "output": layout("None", "None")}}
NOISY = {"": {"input": {"x": layout("dp", "None")}, "output": layout("None", "None")}}


def step(cell, compiled=False):
    """The result and gradients."""

    def forward(x, y):
        result = cell(x, y)
        return ops.square(result).mean(), result

    function = ms.value_and_grad(forward, None, cell.trainable_params(), has_aux=True)
    return jit(function) if compiled else function


@once
def truth():
    """What one card does, written without operators in place: MindSpore's gradients of these are wrong on CPU."""
    (_, result), gradients = step(Sharing(in_place=False))(*map(Tensor, inputs()))
    return result.asnumpy(), [gradient.asnumpy() for gradient in gradients]


def parts():
    """This rank's parts of the inputs."""
    given = PLAN[""]["input"]
    return [Tensor(part_of(array, bind_layout(given[name], MESH, 2))) for name, array in zip("xy", inputs())]


@on_ranks(4)
def case_values_in_place_equal_one_card(ways=(("eager", False), ("generated", False))):
    """Results and gradients, eager and generated."""
    for mode, compiled in ways:
        cell = shard(Sharing(), MESH, plan=PLAN, mode=mode)
        (_, result), gradients = step(cell, compiled)(*parts())
        result = result.full_tensor() if hasattr(result, "full_tensor") else result
        expected, slopes = truth()
        np.testing.assert_allclose(result.asnumpy(), expected, 1e-5, 1e-5, err_msg=f"{mode}, {compiled}")
        for found, slope in zip(gradients, slopes, strict=True):
            np.testing.assert_allclose(found.asnumpy(), slope, 1e-5, 1e-5, err_msg=f"gradients, {mode}, {compiled}")


@on_ranks(nightly=(4,))
def case_values_in_place_equal_one_card_compiled():
    case_values_in_place_equal_one_card([("generated", True)])


@on_ranks(4)
def case_draws_in_place_are_the_same_on_any_mesh():
    """Eager and generated draw alike, whatever is cut."""
    found = []
    for mode, plan in (("eager", NOISY), ("generated", NOISY), ("generated", {"": {"output": PLAN[""]["output"]}})):
        ms.manual_seed(5)
        cell = shard(Noisy(), MESH, plan=plan, mode=mode)
        given = parts()[:1] if "input" in plan[""] else [Tensor(inputs()[0])]
        found.append(cell(*given).full_tensor().asnumpy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert found[0].std() > 0.1


@on_ranks(4)
def case_what_the_eager_engine_refuses_in_place():
    """Views of what was changed, arguments of the root, a tensor in another layout."""
    x = distribute_tensor(Tensor(inputs()[0]), layout("dp", "None"), MESH) * 1.0
    row = x[0]
    x.add_(1.0)
    with pytest.raises(ValueError, match="used after one of the same memory"):
        row + 1
    assert np.allclose(x.full_tensor().asnumpy(), inputs()[0] + 1)
    with pytest.raises(ValueError, match="in another layout"):
        x.redistribute(layout("None", "tp")).add_(1.0)
    with pytest.raises(ValueError, match="a plain tensor .* part of another one"):
        mint.zeros((4, 8))[0].add_(x[0])
    cell = shard(Noisy(of_argument=True), MESH, plan=NOISY, mode="eager")
    with pytest.raises(ValueError, match="an argument of the root Cell"):
        cell(*parts()[:1])
