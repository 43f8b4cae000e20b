"""Functions of tensors, verified on simulated ranks with every dim of every input cut, one at a time, and as terms."""

from dataclasses import dataclass, field

import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_core import verify
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

__all__ = ["MESH", "MESH_OF_4", "Sample", "complex_of", "numbers", "verified"]

RANDOM = np.random.default_rng(5)
MESH = DeviceMesh((2,), ("a",))
MESH_OF_4 = DeviceMesh((2, 2), ("a", "b"))


@dataclass
class Sample:
    """One call.

    Attributes:
        name: for pytest.
        function: of tensors, as an author writes it.
        inputs: arrays.
        gathered: the variants that are gathered, by the tensor that is: "cut_0_1" where dim 1 of input 0 is cut.
        terms: whether the function is also called with sums over a cut dim, which arrive as partial sums.
    """

    name: str
    function: object
    inputs: tuple
    gathered: list = field(default_factory=list)
    terms: bool = True

    def __str__(self):
        return self.name


def numbers(*shape, low=0.5, high=2.0):
    """Random numbers, float32."""
    return RANDOM.uniform(low, high, shape).astype(np.float32)


def complex_of(function):
    """The function of the complex tensor that two real ones make."""
    return lambda real, imaginary: function(ops.Complex()(real, imaginary))


def verified(sample, mesh=MESH):
    """Run `verify` once with all ways to cut the inputs; returns the names of the tensors that were gathered, sorted.

    Each variant has an input of its own, `cut_0_1` where dim 1 of input 0 is cut; the others are whole.
    """
    values, layouts, calls, axes = {}, {}, [], mesh.axis_names
    for number, array in enumerate(sample.inputs):
        values[f"whole_{number}"] = array
        for dim, size in enumerate(array.shape):
            if size % mesh.size == 0:
                name = f"cut_{number}_{dim}"
                values[name], places = array, [()] * array.ndim
                places[dim] = axes
                layouts[name] = Layout.on(mesh, places)
                calls.append((number, name, False))
        if sample.terms and array.dtype.kind == "f":
            name = f"terms_{number}"
            parts = RANDOM.uniform(0, 1, (mesh.size, *array.shape))
            values[name] = (array * parts / parts.sum(0)).astype(array.dtype)
            layouts[name] = Layout.on(mesh, [axes, *[()] * array.ndim])
            calls.append((number, name, True))
    cell = _cell(sample.function, len(sample.inputs), list(values), calls)
    check = verify(cell, mesh, *map(Tensor, values.values()), plan={"": {"input": layouts}})
    assert not check.faults, f"{sample}: {check.report()}"
    assert check.compared > len(calls)
    return sorted(found.value.hint for plan in plans_of(check) for found in plan.instructions if _gathers(found))


def plans_of(check):
    return [plan for _, plan in check.plans.values()]


def _gathers(instruction):
    steps = getattr(instruction, "steps", ())
    return any(step.kind in ("all_gather", "all_to_all") for step in steps)


def _cell(function, count, names, calls):
    """A Cell whose arguments have these names."""

    def variants(tensors):
        results = []
        for number, name, are_terms in calls:
            given = [tensors[f"whole_{place}"] for place in range(count)]
            given[number] = tensors[name].sum(0) if are_terms else tensors[name]
            results.append(function(*given))
        return results

    space = {"variants": variants}
    arguments = ", ".join(names)
    exec(f"def construct(self, {arguments}):\n    return variants(dict({', '.join(f'{n}={n}' for n in names)}))", space)
    return type("Variants", (nn.Cell,), {"construct": space["construct"]})()
