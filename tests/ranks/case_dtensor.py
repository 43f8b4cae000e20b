"""`DTensor` by hand, without `shard()`: moves between all placements, what is kept between consumers, `local_map`."""

from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from one_card import Claim, check, draw, part_of, verify
from support.launch import on_ranks

from mindformers_core.communication import AllReduce, count_collectives, world
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import DTensor, distribute_tensor, local_map

MARKS = ("whole", "varying", "sum", "avg", "max", "min", 0, 1)  # what an axis may do to a tensor of two dims


def layout_of(mesh, marks):
    """The layout in which each axis has its mark."""
    by_axis = dict(zip(mesh.axis_names, marks))
    dims = [[axis for axis, mark in by_axis.items() if mark == dim] for dim in (0, 1)]
    partial = {axis: mark for axis, mark in by_axis.items() if mark in ("sum", "avg", "max", "min")}
    return Layout.on(mesh, dims, partial, [axis for axis, mark in by_axis.items() if mark == "varying"])


def drawn(mesh, *shape, seed=0):
    """A global array, and it as a replicated DTensor."""
    array = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return array, distribute_tensor(Tensor(array), Layout.on(mesh, ((),) * len(shape)))


def commuting(marks):
    """Whether the partials among the marks may stand in one layout."""
    ops_ = {mark for mark in marks if mark in ("sum", "avg", "max", "min")}
    return ops_ <= {"sum", "avg"} or len(ops_) == 1


@on_ranks(4, nightly=(2,))
def case_any_layout_to_any_other():
    """Whole, to a layout, to another one, whole again: the same tensor, and the gradient of an identity."""
    mesh = init_device_mesh((2,), ("tp",)) if world().size == 2 else init_device_mesh((2, 2), ("dp", "tp"))
    layouts = [layout_of(mesh, marks) for marks in product(MARKS, repeat=mesh.ndim) if commuting(marks)]
    pairs = list(product(layouts, repeat=2))
    random = np.random.default_rng(5)
    if len(pairs) > 64:
        pairs = [pairs[index] for index in random.choice(len(pairs), 40, replace=False)]
    values = [draw(random, (4, 8)) for _ in pairs]
    weights = [random.normal(size=(4, 8)).astype(np.float32) for _ in pairs]
    results = []

    def loss(*arrays):
        total = 0.0
        for array, weight, (first, second) in zip(arrays, weights, pairs):
            placed = distribute_tensor(array, first)
            assert placed.layout == first and placed.shape == (4, 8)
            moved = placed.redistribute(second)
            assert moved.layout == second and moved.to_local().shape == second.local_shape((4, 8))
            results.append(moved.full_tensor())
            total = total + (results[-1] * Tensor(weight)).sum()
        return total

    gradients = ms.grad(loss, tuple(range(len(pairs))))(*values)
    claims = []
    for value, weight, result, gradient, (first, second) in zip(values, weights, results, gradients, pairs):
        claims.append(Claim(f"{first} to {second}", result.asnumpy(), (), value.asnumpy()))
        claims.append(Claim(f"gradient from {second} to {first}", gradient.asnumpy(), (), weight))
    verify(claims, mesh)


@on_ranks(2)
def case_partial_extremes_of_different_terms():
    """A maximum and a minimum of terms that differ: the gradient goes to the rank that holds it, ties share it."""
    mesh = init_device_mesh((2,), ("tp",))
    terms = np.float32([[[1, 5], [3, 3], [0, 9]], [[2, 4], [3, 3], [0, 8]]])
    for op, reduce in (("max", np.max), ("min", np.min)):
        for target in (layout(None, None), layout(None, "tp")):

            def total(local, op=op, target=target):
                whole = DTensor.from_local(local, Layout.on(mesh, ((), ()), {"tp": op})).redistribute(target)
                return (whole * whole).sum().full_tensor(), whole.full_tensor()

            (_, found), gradient = ms.value_and_grad(total, has_aux=True)(Tensor(terms[world().rank]))
            extreme = reduce(terms, 0)
            np.testing.assert_array_equal(found.asnumpy(), extreme)
            holds = terms == extreme
            np.testing.assert_array_equal(gradient.asnumpy(), (2 * extreme * holds / holds.sum(0))[world().rank])


@on_ranks(2)
def case_other_dtypes_move():
    """Integers, truth values, half precision."""
    mesh = init_device_mesh((2,), ("tp",))
    for dtype in (np.int32, np.int64, np.bool_, np.float16):
        array = (np.arange(32).reshape(4, 8) % 5).astype(dtype)
        for first, second in product((layout("tp"), layout(None, "tp"), layout()), repeat=2):
            moved = distribute_tensor(Tensor(array), first, mesh).redistribute(second)
            assert moved.to_local().asnumpy().dtype == dtype
            np.testing.assert_array_equal(moved.to_local().asnumpy(), part_of(array, moved.layout))
            np.testing.assert_array_equal(moved.full_tensor().asnumpy(), array)


def three_projections(x, weights):
    """As queries, keys and values are made of one input."""
    return sum((ops.matmul(x, weight) * (number + 1)).sum() for number, weight in enumerate(weights)).full_tensor()


@on_ranks(2)
def case_a_shared_input_costs_one_all_reduce():
    """In a plain function, at every step anew, whether the DTensors are made inside or outlive the steps."""
    mesh = init_device_mesh((2,), ("tp",))
    random = np.random.default_rng(1)
    array = random.normal(size=(4, 8)).astype(np.float32)
    whole = [Parameter(Tensor(random.normal(size=(8, 6)).astype(np.float32)), name=f"w{n}") for n in range(3)]
    views = [
        distribute_tensor(Parameter(weight.value(), name=weight.name), layout(None, "tp"), mesh) for weight in whole
    ]
    mine = [view.to_local() for view in views]
    outer = distribute_tensor(Tensor(array), layout(None, None), mesh)
    sums = ops.add(outer, 0.0)  # made by an operator, outside of any gradient function
    one, two = nn.SGD(whole, 0.1), nn.SGD(mine, 0.1)

    def plain(x):
        return sum((ops.matmul(x, weight) * (number + 1)).sum() for number, weight in enumerate(whole))

    def inside(x):
        return three_projections(DTensor.from_local(x, layout(None, None), mesh), views)

    for step in range(3):
        loss, (x_gradient, gradients) = ms.value_and_grad(plain, 0, whole)(Tensor(array))
        with count_collectives() as counts:
            my_loss, (my_x_gradient, my_gradients) = ms.value_and_grad(inside, 0, mine)(Tensor(array))
        assert counts == {("all_reduce", ("tp",)): (2, 4 + 4 * 8 * 4)}, counts  # the loss; the input's gradient
        np.testing.assert_allclose(float(my_loss), float(loss), 1e-5)
        np.testing.assert_allclose(my_x_gradient.asnumpy(), x_gradient.asnumpy(), 1e-5, 1e-6)
        for kept in (outer, sums):
            kept_loss, kept_gradients = ms.value_and_grad(
                lambda kept=kept: three_projections(kept, views), None, mine
            )()
            np.testing.assert_allclose(float(kept_loss), float(loss), 1e-5)
            for found, same in zip(kept_gradients, my_gradients):
                np.testing.assert_allclose(found.asnumpy(), same.asnumpy(), 1e-6, err_msg=f"step {step}")
        for view, found, expected in zip(views, my_gradients, gradients):
            np.testing.assert_allclose(
                found.asnumpy(), part_of(expected.asnumpy(), view.layout), 1e-5, err_msg=f"step {step}"
            )
        np.testing.assert_allclose(float(inside(Tensor(array))), float(loss), 1e-5)  # evaluation, before the update
        one(gradients)
        two(my_gradients)


@on_ranks(2)
def case_what_is_kept_without_a_gradient_gives_none():
    """A tensor moved while no gradient is recorded, and then again while one is."""
    from mindspore.common.api import _no_grad

    mesh = init_device_mesh((2,), ("tp",))
    array, _ = drawn(mesh, 4, 8)

    def loss(local):
        x = DTensor.from_local(local, layout("tp"), mesh)
        with _no_grad():
            looked_at = x.full_tensor()
        return (x.redistribute(layout()) * x.redistribute(layout())).sum().full_tensor() + looked_at.sum()

    part = Tensor(part_of(array, layout("tp").bind(mesh, 2)))
    np.testing.assert_allclose(ms.grad(loss)(part).asnumpy(), 2 * part.asnumpy(), 1e-6)


@on_ranks(2)
def case_the_gradient_of_a_dtensor_argument():
    """`ms.grad` by a DTensor itself gives this rank's part, a plain tensor; a hook sees the same."""
    mesh = init_device_mesh((2,), ("tp",))
    array, _ = drawn(mesh, 4, 8)
    seen = []

    def loss(x):
        y = x * 3
        y.register_hook(lambda gradient: seen.append(gradient.asnumpy()))
        return (y * y).sum().full_tensor()

    x = distribute_tensor(Tensor(array), layout(None, "tp"), mesh)
    gradient = ms.grad(loss)(x)
    np.testing.assert_allclose(gradient.asnumpy(), 18 * part_of(array, x.layout), 1e-5)
    np.testing.assert_allclose(seen[0], 6 * part_of(array, x.layout), 1e-5)
    plain = ms.grad(lambda scale: (x * scale).sum().full_tensor())(Tensor(array[:, :1]))  # whole: a sum over all ranks
    np.testing.assert_allclose(plain.asnumpy(), array.sum(1, keepdims=True), 1e-5, 1e-5)


@on_ranks(2)
def case_gradient_in_a_gradient_function():
    """An inner gradient is a constant of the outer one, as on one card; what was moved inside is not used outside."""
    mesh = init_device_mesh((2,), ("tp",))
    array, _ = drawn(mesh, 4, 8)
    matrix = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32)

    def outer(x, weight, make):
        inner = ms.grad(lambda w: (make(ops.matmul(x, w)) * 2.0).sum())(weight)
        return make((ops.matmul(x, weight) * ops.matmul(x, ops.stop_gradient(inner))).sum())

    truth = ms.grad(lambda x, w: outer(x, w, lambda t: t), (0, 1))(Tensor(array), Tensor(matrix))

    def distributed(local, weight):
        x = DTensor.from_local(local, layout(), mesh)
        w = DTensor.from_local(weight, layout(None, "tp"), mesh)

        def loss_of(part):
            return (ops.matmul(x, DTensor.from_local(part, layout(None, "tp"), mesh)) * 2.0).sum().full_tensor()

        inner = DTensor.from_local(ops.stop_gradient(ms.grad(loss_of)(weight)), layout(None, "tp"), mesh)
        return (ops.matmul(x, w) * ops.matmul(x, inner)).sum().full_tensor()

    columns = layout(None, "tp").bind(mesh, 2)
    found = ms.grad(distributed, (0, 1))(Tensor(array), Tensor(part_of(matrix, columns)))
    np.testing.assert_allclose(found[0].asnumpy(), truth[0].asnumpy(), 1e-5, 1e-5)
    np.testing.assert_allclose(found[1].asnumpy(), part_of(truth[1].asnumpy(), columns), 1e-5, 1e-5)


@on_ranks(4)
def case_local_map():
    """A hand-written row-parallel matmul: gradients of sharded and of whole inputs, and of a scale."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    reduce = AllReduce(mesh, ("tp",))

    def local_matmul(x, weight, scale):
        return reduce(ops.matmul(x, weight)) * scale

    layouts = layout("dp", "tp"), layout("tp", None), layout()
    rows = local_map(local_matmul, layouts, layout("dp", None), mesh, varying=("dp",))

    def function(x, weight, scale):
        mapped = isinstance(x, DTensor)
        return rows(x, weight, scale) if mapped else ops.matmul(x, weight) * scale

    random = np.random.default_rng(0)
    values = [draw(random, (4, 8)), draw(random, (8, 6)), draw(random, ())]
    whole = [Layout.on(mesh, ((),) * value.ndim) for value in values]
    cut = [layout("dp", "tp").bind(mesh), layout("tp", None).bind(mesh), whole[2]]
    check("local_map", function, values, [whole, cut, [whole[0], cut[1], whole[2]], [cut[0], whole[1], whole[2]]])
    by_plain = rows(distribute_tensor(values[0], cut[0]), values[1], values[2])
    np.testing.assert_allclose(by_plain.full_tensor().asnumpy(), function(*values).asnumpy(), 1e-5, 1e-5)
    assert by_plain.layout == layout("dp", None).bind(mesh)


@on_ranks(4)
def case_local_map_partial_result():
    """Partial results; several results; a whole input whose gradient is summed; errors before anything is computed."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    partial = Layout.on(mesh, ((), ()), {"tp": "sum"})
    terms = local_map(
        lambda x, w: (ops.matmul(x, w), x), (layout(None, "tp"), layout("tp", None)), (partial, layout(None, "tp"))
    )
    random = np.random.default_rng(0)
    values = [draw(random, (4, 8)), draw(random, (8, 6))]
    whole = [Layout.on(mesh, ((), ()))] * 2
    check("partial", lambda x, w: terms(x, w)[0] if isinstance(x, DTensor) else ops.matmul(x, w), values, [whole])
    scaled = local_map(lambda x, s: x * s, (layout("dp", None), None), layout("dp", None))
    check(
        "scale",
        lambda x, s: scaled(x, s) if isinstance(x, DTensor) else x * s,
        [values[0], draw(random, (8,))],
        [[whole[0], Layout.on(mesh, ((),))]],
    )
    x, w = (distribute_tensor(value, whole[0]) for value in values)
    with pytest.raises(TypeError, match="without any DTensor"):
        terms(*values)
    with pytest.raises(ValueError, match="2 tensor arguments, but in_layouts has 1"):
        local_map(ops.matmul, (layout(),), layout())(x, w)
    with pytest.raises(ValueError, match="1 results, but out_layouts has 2"):
        local_map(ops.matmul, (None, None), (layout(), layout()))(x, w)
    wrong = local_map(ops.matmul, (layout("dp", "tp"), layout("tp", None)), layout("dp", None))
    rank = world().rank
    text = r"result 0 of local_map\(matmul\), .* \(2, 6\), is declared as \[dp, -\], the same along tp, but rank "
    with pytest.raises(ValueError, match=text + f"{rank} has other values than rank {rank ^ 1}: .*declare it partial"):
        wrong(x, w)
