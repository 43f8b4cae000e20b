"""Whether a function of distributed tensors gives what it gives on one card: values, and gradients of all float inputs.

Every rank gives its share of the cotangent to its local results, and all sums that the comparison needs are taken at
once, so that little is communicated save what the function itself communicates.
"""

from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_core.communication import world
from mindformers_core.tensor_parallel import DTensor, distribute_tensor
from mindformers_core.tensor_parallel.clipping import sum_cell


@dataclass(frozen=True)
class Claim:
    """That `local`, summed over `axes`, is this rank's part of what one card gives."""

    name: str
    local: np.ndarray
    axes: tuple
    expected: np.ndarray


def is_float(tensor):
    """Whether gradients flow through it."""
    return "Float" in str(tensor.dtype)


def part_of(array, layout):
    """This rank's part of a global array."""
    return array[layout.local_slices(array.shape, world().rank)]


def draw(random, shape, kind="float32"):
    """A random tensor: `int32` below 4, `bool`, or a normal float."""
    if kind == "int32":
        return Tensor(random.integers(0, 4, shape).astype(np.int32))
    return Tensor(random.random(shape) < 0.5) if kind == "bool" else Tensor(random.normal(size=shape).astype(kind))


def same(found, expected, tolerance=1e-5, what=""):
    """Assert that two results have the same structure, dtypes and values."""
    if isinstance(expected, (Tensor, np.ndarray)):
        assert found.shape == expected.shape and found.dtype == expected.dtype, f"{what}: {found}, {expected}"
        found, expected = (each.asnumpy() if isinstance(each, Tensor) else each for each in (found, expected))
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=what)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for name in expected:
            same(found[name], expected[name], tolerance, what)
    elif isinstance(expected, (tuple, list)):
        assert type(found) is type(expected) and len(found) == len(expected), what
        for one, other in zip(found, expected):
            same(one, other, tolerance, what)
    else:
        assert found == expected, f"{what}: {found}, on one card {expected}"


def check(name, function, values, choices, rtol=1e-5, atol=1e-5, differentiable=True):
    """Compare `function` of distributed tensors with `function` of whole ones.

    Args:
        name: what to call the function in failures.
        function: takes tensors and gives one tensor, or a tuple of them.
        values: the whole tensors.
        choices: lists of layouts, one for each tensor; all choices run in one forward and backward pass.
        rtol: relative tolerance of values and gradients.
        atol: absolute tolerance of values and gradients.
        differentiable: whether to compare gradients too.
    """
    results = _several(function(*values))
    flowing = [place for place, result in enumerate(results) if differentiable and is_float(result)]
    floats = tuple(place for place, value in enumerate(values) if is_float(value)) if flowing else ()
    weights = _weights([results[place] for place in flowing])
    parts = [[_own_part(value, layout) for value, layout in zip(values, layouts)] for layouts in choices]
    names = [f"{name} of {', '.join(map(str, layouts))}" for layouts in choices]
    outputs = []

    def loss(*moving):
        moving, total = iter(moving), 0.0
        for label, layouts, locals_ in zip(names, choices, parts):
            local = [next(moving) if place in floats else part for place, part in enumerate(locals_)]
            outputs.append(_several(function(*map(DTensor.from_local, local, layouts))))
            for output, result in zip(outputs[-1], results, strict=True):
                assert isinstance(output, DTensor) and output.shape == result.shape, f"{label} gave {output!r}"
            for place, weight in zip(flowing if floats else (), weights):
                output = outputs[-1][place]
                total = total + (output.to_local() * Tensor(_cotangent(weight, output.layout))).sum()
        return total

    differentiated = [locals_[place] for locals_ in parts for place in floats]
    gradients = ms.grad(loss, tuple(range(len(differentiated))))(*differentiated) if floats else loss()
    expected = [result.asnumpy() for result in results]
    claims = [
        _claim_of_value(label, output, whole)
        for label, given in zip(names, outputs)
        for output, whole in zip(given, expected)
    ]
    if floats:
        whole = _whole_gradients(function, values, floats, flowing, weights)
        found = iter(gradients if isinstance(gradients, tuple) else (gradients,))
        for label, layouts in zip(names, choices):
            claims += [
                _claim_of_gradient(f"gradient {p} of {label}", next(found), whole[p].asnumpy(), layouts[p])
                for p in floats
            ]
    verify(claims, choices[0][0].mesh, rtol, atol)


def _several(result):
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _weights(results):
    """A random cotangent for each result."""
    random = np.random.default_rng(1)
    return [random.normal(size=result.shape).astype(result.asnumpy().dtype) for result in results]


def _whole_gradients(function, values, floats, flowing, weights):
    """Place of an input -> its gradient on one card."""

    def loss(*args):
        results = _several(function(*args))
        return sum((results[place] * Tensor(weight)).sum() for place, weight in zip(flowing, weights))

    found = ms.grad(loss, floats)(*values)
    return dict(zip(floats, found if isinstance(found, tuple) else (found,)))


def verify(claims, mesh, rtol=1e-5, atol=1e-5):
    """Check all claims, with one sum for each set of axes."""
    for axes in sorted({claim.axes for claim in claims}):
        mine = [claim for claim in claims if claim.axes == axes]
        flat = np.concatenate([claim.local.astype(np.float32).ravel() for claim in mine])
        summed = sum_cell(mesh, axes)(Tensor(flat)).asnumpy() if axes else flat
        start = 0
        for claim in mine:
            found = summed[start : start + claim.local.size].reshape(claim.local.shape)
            start += claim.local.size
            np.testing.assert_allclose(found, claim.expected.astype(np.float32), rtol, atol, err_msg=claim.name)


def _own_part(value, layout):
    """This rank's part, an object of its own: gradients are told apart by it."""
    return Tensor(distribute_tensor(value, layout).to_local().asnumpy())


def _claim_of_value(name, output, whole):
    local, layout = output.to_local().asnumpy(), output.layout
    expected = part_of(whole, layout)
    assert local.dtype == expected.dtype, f"{name}: {local.dtype}, on one card {expected.dtype}"
    assert all(op in ("sum", "avg") for _, op in layout.partial), f"{name}: {layout}"
    return Claim(name, _share(local, layout), tuple(axis for axis, _ in layout.partial), expected)


def _claim_of_gradient(name, gradient, whole, layout):
    """Of a partial term that of the whole, of an average a share; of a varying tensor a term of the whole."""
    return Claim(name, gradient.asnumpy(), layout.varying, _share(part_of(whole, layout), layout))


def _share(array, layout):
    """Divided by the number of terms of an average."""
    return array / layout.mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])


def _cotangent(weights, layout):
    """This rank's share of the whole result's cotangent: a varying result's is a term of it."""
    mine = _share(part_of(weights, layout), layout)
    first = layout.mesh.group_index(world().rank, layout.varying) == 0
    return (mine if first else np.zeros_like(mine)).astype(weights.dtype)
