"""Plans are right, forward and backward, when run on simulated ranks, and no dearer than an exhaustive search finds."""

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.exhaustive_search import FAMILIES, all_layouts, exhaustive_costs, moving
from support.nightly import daily, seeds
from support.simulated_ranks import check_gradient, collect, distribute, distribute_gradient, run_backward, run_forward
from support.work import calls_in

from mindformers_core.layout import PARTIAL_OPS, Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.placement import parts_of
from mindformers_core.redistribution import ASCEND, CPU, GPU, STEP_KINDS, DeviceModel, Link, plan_redistribution
from mindformers_core.redistribution.price import redistribution_price

MODELS = (
    CPU,
    GPU,
    ASCEND,
    DeviceModel("slow start", 1e9, 1.0, Link(0.01, 1e3)),
    DeviceModel("far", 1e9, 0.0, Link(1.0, 1e12)),
    DeviceModel("narrow", 1e9, 0.0, Link(0.0, 1.0)),
    GPU.with_links(a=Link(1e-3, 1e6)),
)
SEARCHED = {kind for kind, row in STEP_KINDS.items() if row.source}
MESHES = (
    ((2,), "a"), ((4,), "a"), ((3,), "a"), ((1, 2), "ab"), ((2, 2), "ab"), ((2, 3), "ab"), ((4, 2), "ab"),
    ((2, 2, 2), "abc"), ((2, 1, 3), "abc"), ((2, 4, 2), "abc"),
)  # fmt: skip


def random_mesh(rng):
    shape, names = rng.choice(MESHES)
    size = int(np.prod(shape))
    ranks = rng.sample(range(100), size) if rng.random() < 0.5 else None
    return DeviceMesh(shape, tuple(names), ranks)


def random_layout(mesh, ndim, rng, blocks=False):
    ops = rng.choice(FAMILIES)
    dims, partial, varying = [[] for _ in range(ndim)], {}, []
    for axis in rng.sample(mesh.axis_names, len(mesh.axis_names)):
        kind = rng.choice(("shard", "shard", "shard", "partial", "varying", "replicate"))
        if kind == "shard" and ndim:
            rng.choice(dims).append(axis)
        elif kind == "partial":
            partial[axis] = rng.choice(ops)
        elif kind == "varying":
            varying.append(axis)
    for entry in dims if blocks else ():
        entry[:] = [each for axis in entry for each in (rng.choice((1, 1, 2, 3)), axis)]
    return Layout.on(mesh, dims, partial, varying)


def random_shape(layouts, rng):
    shape = []
    for dim in range(layouts[0].ndim):
        sizes = [parts_of(layout.mesh, layout.dims[dim]) for layout in layouts]
        shape.append(int(np.lcm.reduce(sizes)) * rng.choice((1, 1, 2, 3)))
    return tuple(shape)


def random_case(rng, blocks=False):
    mesh, ndim = random_mesh(rng), rng.choice((0, 1, 2, 2, 3, 3))
    source, target = random_layout(mesh, ndim, rng, blocks), random_layout(mesh, ndim, rng, blocks)
    return source, target, random_shape((source, target), rng), rng.choice(MODELS)


@pytest.mark.parametrize("seed", seeds(1, 6))
def test_plans_run_on_simulated_ranks_equal_slicing(seed):
    rng, values = random.Random(seed), np.random.default_rng(seed)
    kinds = set()
    for number in range(450):
        source, target, shape, model = random_case(rng, blocks=number >= 350)
        plan = plan_redistribution(source, target, shape, 8, model)
        kinds |= {step.kind for step in plan.steps}
        check_plan(plan, shape, values)
    assert kinds == {*SEARCHED, "view"}, "a kind of step was never run"


def check_plan(plan, shape, values):
    """Run a plan forward and backward, and compare with the definitions of its two layouts."""
    value, weights = values.integers(-9, 9, shape).astype(float), values.standard_normal(shape)
    held = [distribute(value, plan.source, values)]
    for step in plan.steps:
        assert all(tensor.shape == step.local_shape for tensor in held[-1].values())
        held.append(run_forward(step, held[-1]))
        assert all(tensor.shape == step.output_shape for tensor in held[-1].values())
        seen = step.to_shape or step.shape
        np.testing.assert_allclose(collect(held[-1], step.target, seen), value.reshape(seen), rtol=1e-9, atol=1e-9)
    grads = distribute_gradient(weights, held[-1], plan.target, values)
    for index in reversed(range(len(plan.steps))):
        grads = run_backward(plan.steps[index], grads, held[index])
        check_gradient(grads, weights.reshape(plan.steps[index].shape), held[index], plan.steps[index].source)


def test_steps_chain():
    rng = random.Random(99)
    for _ in range(300):
        source, target, shape, model = random_case(rng)
        plan = plan_redistribution(source, target, shape, "float32", model)
        ends = [source, *[step.target for step in plan.steps]]
        assert ends[-1] == target and [step.source for step in plan.steps] == ends[:-1]
        assert all(step.source != step.target for step in plan.steps)
        whole = np.prod(shape) * 4
        for layout in ends:
            layout.local_shape(shape)
        for step in plan.steps:
            assert (step.nbytes == 0) == (step.forward[0] in ("slice", "identity", "pad", "mask"))
            assert step.nbytes <= 2 * whole and step.forward[1] == step.nbytes


SMALL = (
    ((2,), (4, 6)), ((3,), (3,)), ((2, 2), (8, 4)), ((2, 3), (6, 12)), ((4, 2), (8, 4)), ((2, 2), (2, 2, 4)),
    ((2, 2), (4, 4, 4)), ((2, 2, 2), (8,)),
)  # fmt: skip


@pytest.mark.parametrize("sizes, shape", daily([*SMALL[:2], SMALL[3], SMALL[6]], SMALL))
def test_no_exhaustive_search_finds_a_cheaper_plan(sizes, shape):
    rng = random.Random(str((sizes, shape)))
    mesh = DeviceMesh(sizes, tuple("abc"[: len(sizes)]))
    layouts = all_layouts(mesh, shape)
    for _ in range(8):
        source, model, itemsize = rng.choice(layouts), rng.choice(MODELS), rng.choice((1, 4, 4096))
        compare_with_exhaustive(source, rng.sample(layouts, min(60, len(layouts))), shape, itemsize, model)


@pytest.mark.parametrize("size", (2, 3, 8))
def test_the_short_cut_for_one_axis_is_the_cheapest_plan(size):
    mesh, shape = DeviceMesh((size,), ("a",)), (24, 48)
    for source, model in itertools.product(all_layouts(mesh, shape), MODELS):
        compare_with_exhaustive(source, all_layouts(mesh, shape), shape, 4, model)


def compare_with_exhaustive(source, targets, shape, itemsize, model):
    by_axes = {}
    for target in targets:
        axes = frozenset(moving(source, target))
        if axes not in by_axes:
            by_axes[axes] = exhaustive_costs(source, source.mesh, shape, itemsize, model, axes)
        plan = plan_redistribution(source, target, shape, itemsize, model)
        expected = pytest.approx(by_axes[axes][target], rel=1e-6, abs=1e-10)
        price = redistribution_price(source, target, shape, itemsize, True, model)
        assert price.seconds == expected, f"{source!r} -> {target}, {shape}, {model}:\n{plan}"


# Examples.

MESH = DeviceMesh((2, 4), ("dp", "tp"))


def on(*entries, mesh=MESH, **marks):
    return Layout.on(mesh, [(entry,) if isinstance(entry, str) else entry for entry in entries], **marks)


ONE_STEP = [
    (on("dp", "tp"), on("dp", ()), "all_gather", ("all_gather", 96), ("slice", 0)),
    (on("dp", "tp"), on("dp", (), varying=["tp"]), "all_gather_varying", ("all_gather", 96), ("reduce_scatter", 96)),
    (on("dp", "tp"), on("dp", (), partial={"tp": "sum"}), "pad", ("pad", 0), ("slice", 0)),
    (on("dp", ()), on("dp", "tp"), "slice", ("slice", 0), ("all_gather", 96)),
    (on("dp", (), varying=["tp"]), on("dp", "tp"), "slice_varying", ("slice", 0), ("pad", 0)),
    (on((), "tp"), on("tp", ()), "all_to_all", ("all_to_all", 48), ("all_to_all", 48)),
    (on(("dp", "tp"), ()), on(("tp", "dp"), ()), "permute", ("permute", 32), ("permute", 32)),
    (on("dp", (), partial={"tp": "sum"}), on("dp", ()), "all_reduce", ("all_reduce", 192), ("identity", 0)),
    (on((), partial={"tp": "sum"}), on((), varying=["tp"]), "all_reduce_varying", *[("all_reduce", 48)] * 2),
    (on("dp", (), partial={"tp": "avg"}), on("dp", "tp"), "reduce_scatter", ("reduce_scatter", 96), ("all_gather", 96)),
    (on("dp", ()), on("dp", (), varying=["tp"]), "mark_varying", ("identity", 0), ("all_reduce", 192)),
    (on("dp", (), varying=["tp"]), on("dp", ()), "unmark_varying", ("identity", 0), ("scale", 0)),
    (on("dp", ()), on("dp", (), partial={"tp": "sum"}), "to_partial", ("mask", 0), ("identity", 0)),
    (on("dp", ()), on("dp", (), partial={"tp": "max"}), "to_partial", ("identity", 0), ("all_reduce", 192)),
    (on("dp", ()), on("dp", (), partial={"tp": "avg"}), "to_partial", ("identity", 0), ("scale", 0)),
    (on((), (), varying=["tp"]), on((), (), partial={"tp": "sum"}), "to_partial_varying", ("mask", 0), ("mask", 0)),
]


@pytest.mark.parametrize("source, target, kind, forward, backward", ONE_STEP, ids=lambda entry: str(entry)[:30])
def test_one_step_plans_and_their_bytes(source, target, kind, forward, backward):
    (step,) = plan_redistribution(source, target, (8, 8)[: source.ndim], "float32").steps
    assert (step.kind, step.forward, step.backward) == (kind, forward, backward)


def test_every_row_of_the_table_has_an_example():
    assert {row[2] for row in ONE_STEP} == SEARCHED


def both_partial(op):
    return on((), (), partial={"dp": op, "tp": op})


# A start so dear that one collective on the joint group beats two.
EAGER_TO_FUSE = DeviceModel("dear start", 1e9, 1.0, Link(1e-6, 1e9))
FUSED = [
    (on(("dp", "tp"), ()), on((), ()), ("all_gather", ("dp", "tp"))),
    (on(("tp", "dp"), ()), on((), ()), ("all_gather", ("tp", "dp"))),
    (on(("dp", "tp"), ()), on((), (), varying=["dp", "tp"]), ("all_gather_varying", ("dp", "tp"))),
    (on((), ()), on((), ("tp", "dp")), ("slice", ("tp", "dp"))),
    (on((), (), varying=["dp", "tp"]), on(("tp", "dp"), ()), ("slice_varying", ("tp", "dp"))),
    (on(("dp", "tp"), ()), on((), ("dp", "tp")), ("all_to_all", ("dp", "tp"))),
    (on((), (), varying=["dp", "tp"]), on((), ()), ("unmark_varying", ("dp", "tp"))),
    (on((), ()), on((), (), varying=["dp", "tp"]), ("mark_varying", ("dp", "tp"))),
    *[(both_partial(op), on((), ("tp", "dp")), ("reduce_scatter", ("tp", "dp"))) for op in PARTIAL_OPS],
    *[(both_partial(op), on((), ()), ("all_reduce", ("dp", "tp"))) for op in PARTIAL_OPS],
]


@pytest.mark.parametrize("source, target, expected", FUSED, ids=lambda entry: str(entry)[:40])
def test_steps_on_several_axes_fuse_where_one_collective_is_cheaper(source, target, expected):
    plan = plan_redistribution(source, target, (8, 8), 8, EAGER_TO_FUSE)
    assert [(step.kind, step.axes) for step in plan.steps] == [expected]
    check_plan(plan, (8, 8), np.random.default_rng(0))


def test_gathers_do_not_fuse_where_hops_cost_more_than_starts():
    plan = plan_redistribution(on(("dp", "tp"), ()), on((), ()), (8, 8), "float32", MODELS[4])
    assert [(step.kind, step.axes) for step in plan.steps] == [("all_gather", ("tp",)), ("all_gather", ("dp",))]


def test_a_slow_axis_is_crossed_by_the_smaller_tensor():
    slow_dp = GPU.with_links(dp=Link(1e-3, 1e6))
    partial = on((), (), partial={"dp": "sum", "tp": "sum"})
    plan = plan_redistribution(partial, on((), ()), (1024, 1024), "float32", slow_dp)
    assert [(step.kind, step.axes) for step in plan.steps] == [
        ("reduce_scatter", ("tp",)),
        ("all_reduce", ("dp",)),
        ("all_gather", ("tp",)),
    ]


def test_equal_layouts_need_nothing():
    rng = random.Random(5)
    for _ in range(200):
        source, _, shape, model = random_case(rng)
        plan = plan_redistribution(source, source, shape, "float32", model)
        assert plan.steps == () and redistribution_price(source, source, shape, "float32", True, model).seconds == 0
        assert str(plan) == f"nothing to do: {source}"


def test_other_axes_stay_out_of_it():
    rng = random.Random(6)
    for _ in range(500):
        source, target, shape, model = random_case(rng)
        used = {axis for step in plan_redistribution(source, target, shape, 4, model).steps for axis in step.axes}
        assert used <= moving(source, target)


def test_plans_are_readable_and_remembered():
    source, target = on((), "tp"), on((), ())
    plan = plan_redistribution(source, target, (16, 32), "float32")
    assert str(plan) == "all_gather dim 1 over tp: [-, tp] -> [-, -], 1536 bytes"
    assert str(plan_redistribution(on("tp", ()), on((), "tp"), [16, 32], "float16").steps[0]) == (
        "all_to_all dim 0 to dim 1 over tp: [tp, -] -> [-, tp], 192 bytes"
    )
    partial = on((), (), partial={"tp": "avg"})
    text = str(plan_redistribution(partial, target, (2, 2), "int64"))
    assert text == "all_reduce avg over tp: [-, -] (partial avg: tp) -> [-, -], 48 bytes"
    assert plan_redistribution(source, target, (16, 32), "float32") is plan
    assert plan_redistribution(source, target, (16, 32), 4) is plan
    assert plan_redistribution(source, target, (16, 32), "BFloat16") is not plan


def test_plans_are_little_work():
    """One step is found in hundreds of calls, a search over three axes in some ten thousand."""
    source, target = on("dp", "tp"), on("dp", ())
    for size in range(1, 101):
        assert calls_in(plan_redistribution, source, target, (8 * size, 16), "float32") < 400
    mesh, rng = DeviceMesh((2, 4, 8), ("dp", "cp", "tp")), random.Random(0)
    pairs = [(random_layout(mesh, 4, rng), random_layout(mesh, 4, rng)) for _ in range(40)]
    assert np.median([calls_in(plan_redistribution, *pair, (64, 64, 64, 64), "float32") for pair in pairs]) < 20_000


def test_ten_thousand_ranks_plan_like_a_few():
    def work(*mesh_shape):
        mesh = DeviceMesh(mesh_shape, ("dp", "tp"))
        ends = on("dp", "tp", mesh=mesh), on("tp", (), mesh=mesh)
        return calls_in(plan_redistribution, *ends, (12800, 12800), "bfloat16", ASCEND)

    assert work(100, 128) < 1.5 * work(2, 4)


SCRIPT = """
import sys
sys.path[:0] = ["tests", "."]
import random
from test_redistribution import plan_redistribution, random_case
rng = random.Random(11)
for _ in range(150):
    source, target, shape, model = random_case(rng)
    print(plan_redistribution(source, target, shape, 4, model))
"""


def test_all_ranks_make_the_same_plan():
    outputs = set()
    for seed in ("1", "2"):
        settings = {"cwd": Path(__file__).parent.parent, "env": os.environ | {"PYTHONHASHSEED": seed}}
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, **settings)
        outputs.add(done.stdout)
    assert len(outputs) == 1 and len(outputs.pop()) > 10_000


OTHER = DeviceMesh((4, 2), ("dp", "tp"))
WRONG = [
    ((on("dp"), on("dp", mesh=OTHER), (8,), 4), ValueError, "one mesh"),
    ((on("dp"), on("dp", ()), (8, 8), 4), ValueError, "1 dims.*2"),
    ((on("dp"), on(()), (8, 8), 4), ValueError, "source of shape .8, 8. has 2 dims"),
    ((on(()), on("tp"), (6,), 4), ValueError, "target of shape .6,.: dim 0 has size 6.*tp.*4 parts"),
    ((on("dp"), on(()), (8,), "float23"), ValueError, "float23.*did you mean 'float32'"),
    ((on("dp"), on(()), (8,), 0), ValueError, "unknown dtype 0"),
    ((on((), partial={"dp": "sum", "tp": "max"}), on(()), (8,), 4), ValueError, "source.*commute.*reduce"),
    ((on(()), on((), partial={"dp": "min", "tp": "max"}), (8,), 4), ValueError, "target.*commute"),
    (("dp", on(()), (8,), 4), TypeError, "source layout 'dp'"),
    ((on("dp"), on(()), (8,), 4, "GPU"), TypeError, "device_model 'GPU'"),
]


@pytest.mark.parametrize("arguments, error, words", WRONG, ids=[row[2] for row in WRONG])
def test_what_cannot_be_planned_says_why(arguments, error, words):
    with pytest.raises(error, match=words):
        plan_redistribution(*arguments)


def test_cost_models_are_values():
    slow = GPU.with_links(dp=Link(1e-3, 1e6), pp=Link(1e-3, 1e7))
    assert slow == GPU.with_links(pp=Link(1e-3, 1e7)).with_links(dp=Link(1e-3, 1e6)) and hash(slow) != hash(GPU)
    assert slow.link_over(("dp", "tp")) == Link(1e-3, 1e6) and slow.link_over(("tp",)) == GPU.link
    model = DeviceModel("by hand", 1e9, 10.0, Link(1.0, 100.0))
    assert model.seconds("all_gather", ("tp",), 4, 400) == pytest.approx(10 + 3 + 3)
    assert model.seconds("reduce_scatter", ("tp",), 4, 400) == pytest.approx(10 + 3 + 3)
    assert model.seconds("all_to_all", ("tp",), 4, 400) == pytest.approx(10 + 3 + 3)
    assert model.seconds("all_reduce", ("tp",), 4, 400) == pytest.approx(10 + 6 + 6)
    assert model.seconds("permute", ("tp",), 4, 400) == pytest.approx(10 + 1 + 4)
    assert model.seconds("slice", ("tp",), 4, 400) == 0
    with pytest.raises(ValueError, match="bandwidth more than 0"):
        Link(1e-6, 0)
    with pytest.raises(TypeError, match="axis 'tp' of device model 'GPU': 5 is no Link"):
        GPU.with_links(tp=5)
