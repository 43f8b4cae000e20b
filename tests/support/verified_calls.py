"""Functions of tensors, verified on simulated ranks with every dim of every input cut, one at a time, and as terms."""

from dataclasses import dataclass, field

import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_core import shard, verify
from mindformers_core.capture.capture import capture
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.structure import tree_leaves
from mindformers_core.sharding.inspecting import prepare
from mindformers_core.tensor_parallel import distribute_tensor

__all__ = [
    "MESH", "MESH_OF_4", "Sample", "check_of", "complex_of", "eager", "numbers", "operators_of",
    "planned", "stopped", "verified",
]  # fmt: skip

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
        known: what NumPy gives, of arrays, where MindSpore has no kernel.
        cuts: in place of each dim of each input in turn, what is cut: lists of a `layout()` for every input.
    """

    name: str
    function: object
    inputs: tuple
    gathered: list = field(default_factory=list)
    terms: bool = True
    known: object = None
    cuts: tuple = ()

    def __str__(self):
        return self.name


def numbers(*shape, low=0.5, high=2.0):
    """Random numbers, float32."""
    return RANDOM.uniform(low, high, shape).astype(np.float32)


def stopped(function):
    """The function without its gradient, which MindSpore lacks or has wrong."""
    return lambda *tensors: function(*map(ops.stop_gradient, tensors))


def complex_of(function):
    """The function of the complex tensor that two real ones make."""
    return lambda real, imaginary: function(ops.Complex()(real, imaginary))


def variants_of(sample, mesh):
    """The variants of a call: for each the names of its tensors, and for every name the array and its layout.

    Each has a tensor of its own, `cut_0_1` where dim 1 of input 0 is cut, and `terms_0` for terms of input 0; the
    others are whole.
    """
    values, layouts, calls = {f"whole_{number}": array for number, array in enumerate(sample.inputs)}, {}, []
    whole = list(values)
    for number, array in enumerate(sample.inputs if not sample.cuts else ()):
        for dim, size in enumerate(array.shape):
            if size % mesh.size == 0 and size:
                name = f"cut_{number}_{dim}"
                values[name], layouts[name] = array, Layout.on(mesh, _cut(mesh, array.ndim, dim))
                calls.append([*whole[:number], name, *whole[number + 1 :]])
        if sample.terms and array.dtype.kind == "f":
            name, parts = f"terms_{number}", RANDOM.uniform(0, 1, (mesh.size, *array.shape))
            values[name] = (array * parts / parts.sum(0)).astype(array.dtype)
            layouts[name] = Layout.on(mesh, _cut(mesh, array.ndim + 1, 0))
            calls.append([*whole[:number], name, *whole[number + 1 :]])
    for place, given in enumerate(sample.cuts):
        names = [f"given_{place}_{number}" for number in range(len(given))]
        values |= zip(names, sample.inputs)
        layouts |= {name: each.bind(mesh, values[name].ndim) for name, each in zip(names, given, strict=True)}
        calls.append(names)
    return calls, values, layouts


def _cut(mesh, ndim, dim):
    return [mesh.axis_names if place == dim else () for place in range(ndim)]


def check_of(sample, mesh=MESH):
    """The `Check` of all variants of a call, in which nothing was found."""
    calls, values, layouts = variants_of(sample, mesh)
    check = verify(_cell(sample, list(values), calls), mesh, *map(Tensor, values.values()), plan=_plan(layouts))
    assert not check.faults, f"{sample}: {check.report()}"
    assert check.compared > len(calls)
    return check


def verified(sample, mesh=MESH):
    """Run `verify` once with all variants of a call; returns the names of the tensors that were gathered, sorted."""
    return sorted(_gathered([plan for _, plan in check_of(sample, mesh).plans.values()]))


def planned(sample, mesh=MESH):
    """As `verified`, but nothing is computed: for operators without a kernel on CPU."""
    calls, values, layouts = variants_of(sample, mesh)
    with rank_of(mesh.size, 0):
        net = shard(_cell(sample, list(values), calls), mesh, plan=_plan(layouts))
        parts = [
            layouts[name].local_shape(value.shape) if name in layouts else value.shape for name, value in values.items()
        ]
        dtypes = [str(value.dtype) for value in values.values()]
        program = prepare(net, *map(tensor_meta, parts, dtypes))
    return sorted(_gathered([plan for _, plan in program.plan.walk()]))


def eager(sample, mesh=MESH, rtol=1e-4, atol=1e-5):
    """All variants of a call on DTensors of simulated ranks, compared with one card."""
    calls, values, layouts = variants_of(sample, mesh)
    function = _variants(sample.function, calls)
    if sample.known:
        expected = _variants(sample.known, calls)(values)
    else:
        expected = tree_leaves(function({name: Tensor(value) for name, value in values.items()}), Tensor)
        expected = [each.asnumpy() for each in expected]

    def work(rank):
        whole = {name: Layout.on(mesh, ((),) * value.ndim) for name, value in values.items()} | layouts
        given = {name: distribute_tensor(Tensor(value), whole[name], mesh) for name, value in values.items()}
        return [result.full_tensor().asnumpy() for result in tree_leaves(function(given), Tensor)]

    for results in SimulatedRanks(mesh.size).run(work):
        for found, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol, atol, err_msg=str(sample))


def operators_of(samples):
    """The names of all operators that the samples call."""
    found = set()
    for sample in samples:
        values = {f"whole_{number}": array for number, array in enumerate(sample.inputs)}
        calls = [list(values)]
        graph = capture(
            _cell(sample, list(values), calls), *[tensor_meta(v.shape, str(v.dtype)) for v in values.values()]
        )
        found |= {node.operator for call in graph.calls() for node in call.nodes}
    return found


def _plan(layouts):
    return {"": {"input": layouts}}


def _gathered(plans):
    return [found.value.hint for plan in plans for found in plan.instructions if _gathers(found)]


def _gathers(instruction):
    """Whether it sends whole parts; `pad` makes terms of a sum of them, which are all as large as the whole."""
    steps = getattr(instruction, "steps", ())
    return any(step.kind in ("all_gather", "all_to_all", "pad") for step in steps)


def _variants(function, calls):
    """A function of the tensors by name, that gives the results of all variants."""

    def variants(tensors):
        return [
            function(*(tensors[name].sum(0) if name.startswith("terms") else tensors[name] for name in names))
            for names in calls
        ]

    return variants


def _cell(sample, names, calls):
    """A Cell whose arguments have these names."""
    space = {"variants": _variants(sample.function, calls)}
    given = ", ".join(f"{name}={name}" for name in names)
    exec(f"def construct(self, {', '.join(names)}):\n    return variants(dict({given}))", space)
    return type("Variants", (nn.Cell,), {"construct": space["construct"]})()
