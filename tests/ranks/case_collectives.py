"""Every collective on sub-groups of a 2x2 mesh, PyNative and `@ms.jit`, forward and gradient, against NumPy.

Values are small whole numbers, so that sums are exact in every dtype, and results are compared exactly.
"""

from dataclasses import dataclass
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from launch import on_ranks

from mindformers_core import communication as comm
from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh

MESH = init_device_mesh((2, 2), ("dp", "tp"))
AXES = (("dp",), ("tp",), ("dp", "tp"), ("tp", "dp"))
SHAPE = (4, 8)


@dataclass(frozen=True)
class Pair:
    """A collective and its meaning: lists over a group's ranks of inputs to outputs; the same for gradients."""

    make: object  # axes -> Cell
    forward: object  # inputs -> outputs
    backward: object  # (inputs, outputs' gradients) -> inputs' gradients
    floats_only: bool = False


def everywhere(function):
    """The same value for all ranks."""
    return lambda xs: [function(xs)] * len(xs)


def same(values):
    return list(values)


def total(xs):
    return sum(xs[1:], xs[0])


def mean(xs):
    return total(xs) / len(xs)


def split(x, count, dim):
    return np.split(x, count, dim)


def gather(dim):
    return everywhere(lambda xs: np.concatenate(xs, dim))


def take(dim):
    return lambda xs: [split(x, len(xs), dim)[index] for index, x in enumerate(xs)]


def scatter(reduce, dim):
    return lambda xs: split(reduce(xs), len(xs), dim)


def exchange(dim, to_dim):
    return lambda xs: [np.concatenate([split(x, len(xs), to_dim)[index] for x in xs], dim) for index in range(len(xs))]


def pad(dim):
    def padded(xs):
        return [
            np.concatenate([x if place == index else np.zeros_like(x) for place in range(len(xs))], dim)
            for index, x in enumerate(xs)
        ]

    return padded


def keep(place):
    return lambda xs: [x if index == place else np.zeros_like(x) for index, x in enumerate(xs)]


def reordered(xs):
    """Axes in the other order: the one of two axes of size 2, or of one axis, which is no change. Its own inverse."""
    return [xs[place] for place in np.arange(len(xs)).reshape(2, -1).T.ravel()]


def divided(function):
    return lambda xs: [value / len(xs) for value in function(xs)]


def multiplied(xs):
    return [x * len(xs) for x in xs]


def largest(xs):
    return np.max(xs, axis=0)


def smallest(xs):
    return np.min(xs, axis=0)


def shares(extreme, xs, gradients):
    """A gradient for every rank, where it holds the extreme, divided by how many do."""
    holds = [(x == extreme(xs)).astype(x.dtype) for x in xs]
    return [hold * gradient / total(holds) for hold, gradient in zip(holds, gradients)]


def backward_of(function):
    return lambda xs, gradients: function(gradients)


def cell(name, *arguments):
    return lambda axes: getattr(comm, name)(MESH, axes, *arguments)


def permute(axes):
    """From a dim cut by `axes` to the same cut by them in the other order."""
    return comm.Permute(MESH, axes, Layout.on(MESH, (axes, ())), Layout.on(MESH, (axes[::-1], ())))


sum_everywhere, mean_everywhere = everywhere(total), everywhere(mean)
PAIRS = {
    "all_reduce sum": Pair(cell("AllReduce"), sum_everywhere, backward_of(same)),
    "all_reduce avg": Pair(cell("AllReduce", "avg"), mean_everywhere, backward_of(divided(same)), True),
    "all_reduce max": Pair(cell("AllReduce", "max"), everywhere(largest), lambda xs, gs: shares(largest, xs, gs)),
    "all_reduce min": Pair(cell("AllReduce", "min"), everywhere(smallest), lambda xs, gs: shares(smallest, xs, gs)),
    "all_reduce_varying": Pair(cell("AllReduceVarying"), sum_everywhere, backward_of(sum_everywhere)),
    "all_reduce_varying avg": Pair(
        cell("AllReduceVarying", "avg"), mean_everywhere, backward_of(mean_everywhere), True
    ),
    "all_gather": Pair(cell("AllGather", 1), gather(1), backward_of(take(1))),
    "all_gather_varying": Pair(cell("AllGatherVarying", 0), gather(0), backward_of(scatter(total, 0))),
    "reduce_scatter": Pair(cell("ReduceScatter", 1), scatter(total, 1), backward_of(gather(1))),
    "reduce_scatter avg": Pair(
        cell("ReduceScatter", 0, "avg"), scatter(mean, 0), backward_of(divided(gather(0))), True
    ),
    "reduce_scatter max": Pair(
        cell("ReduceScatter", 0, "max"), scatter(largest, 0), lambda xs, gs: shares(largest, xs, gather(0)(gs))
    ),
    "reduce_scatter min": Pair(
        cell("ReduceScatter", 1, "min"), scatter(smallest, 1), lambda xs, gs: shares(smallest, xs, gather(1)(gs))
    ),
    "permute": Pair(permute, reordered, backward_of(reordered)),
    "all_to_all": Pair(cell("AllToAll", 0, 1), exchange(0, 1), backward_of(exchange(1, 0))),
    "broadcast": Pair(cell("Broadcast", 1), everywhere(lambda xs: xs[1]), backward_of(keep(1))),
    "slice": Pair(cell("SliceToShard", 1), take(1), backward_of(gather(1))),
    "slice_varying": Pair(cell("SliceVarying", 0), take(0), backward_of(pad(0))),
    "mark_varying": Pair(cell("MarkVarying"), same, backward_of(sum_everywhere)),
    "unmark_varying": Pair(cell("UnmarkVarying"), same, backward_of(divided(same)), True),
    "to_partial": Pair(cell("ToPartial"), keep(0), backward_of(same)),
    "to_partial avg": Pair(cell("ToPartial", "avg"), same, backward_of(multiplied)),
    "to_partial max": Pair(cell("ToPartial", "max"), same, backward_of(sum_everywhere)),
    "to_partial min": Pair(cell("ToPartial", "min"), same, backward_of(sum_everywhere)),
    "to_partial_varying": Pair(cell("ToPartialVarying"), keep(0), backward_of(keep(0))),
    "pad": Pair(cell("PadToPartial", 1), pad(1), backward_of(take(1))),
}


def values(seed, rank, shape, dtype):
    """Small whole numbers, other ones on every rank."""
    return np.random.default_rng([seed, rank]).integers(-3, 4, shape).astype(dtype)


def expected(pair, axes, seed, dtype):
    """This rank's input, output, gradient of its output (as weights of a sum), and gradient of its input."""
    ranks = MESH.group(world().rank, axes)
    mine = ranks.index(world().rank)
    xs = [values(seed, rank, SHAPE, dtype) for rank in ranks]
    ys = pair.forward(xs)
    weights = [values(seed + 1000, rank, y.shape, dtype) for rank, y in zip(ranks, ys)]
    return xs[mine], ys[mine], weights[mine], pair.backward(xs, weights)[mine]


def all_of(pairs, axes):
    """A function of one tensor for every pair, to the tuple of their outputs."""
    cells = ms.nn.CellList([pair.make(axes) for pair in pairs])

    def outputs_of(*xs):
        outputs = ()
        for index in range(len(cells)):
            outputs = outputs + (cells[index](xs[index]),)
        return outputs

    return outputs_of


def check_floats(axes, dtype, jit):
    """Outputs and gradients of all pairs; under jit they are one graph, since every graph takes long to compile."""
    truths = [expected(pair, axes, seed, dtype) for seed, pair in enumerate(PAIRS.values())]
    outputs_of, count = all_of(PAIRS.values(), axes), len(PAIRS)

    def both(*xs_and_weights):
        outputs, backward = ms.vjp(outputs_of, *xs_and_weights[:count])
        return outputs, backward(xs_and_weights[count:])

    given = [ms.Tensor(truth[place]) for place in (0, 2) for truth in truths]
    outputs, gradients = (ms.jit(both) if jit else both)(*given)
    for name, truth, output, gradient in zip(PAIRS, truths, outputs, gradients, strict=True):
        where = f"{name} over {axes}, {np.dtype(dtype)}, jit {jit}"
        assert output.asnumpy().dtype == gradient.asnumpy().dtype == dtype, where
        np.testing.assert_array_equal(output.asnumpy(), truth[1], where)
        tolerance = 2e-3 if dtype == np.float16 else 1e-6  # a share of a third has no exact float
        np.testing.assert_allclose(gradient.asnumpy(), truth[3], tolerance, 0, err_msg=where)


def check_integers(axes, dtype, jit):
    """Outputs of all pairs that take integers, or, of bools, that don't sum them."""
    pairs = {name: pair for name, pair in PAIRS.items() if not pair.floats_only}
    if dtype == np.bool_:
        pairs = {name: pair for name, pair in pairs.items() if "reduce" not in name}
    truths = [expected(pair, axes, seed, dtype) for seed, pair in enumerate(pairs.values())]
    outputs_of = all_of(pairs.values(), axes)
    outputs = (ms.jit(outputs_of) if jit else outputs_of)(*[ms.Tensor(truth[0]) for truth in truths])
    for name, truth, output in zip(pairs, truths, outputs, strict=True):
        where = f"{name} over {axes}, {np.dtype(dtype)}, jit {jit}"
        assert output.asnumpy().dtype == dtype, where
        np.testing.assert_array_equal(output.asnumpy(), truth[1], where)


@on_ranks(4)
def case_floats_pynative():
    """Forward and gradient of all pairs, float32 and float16."""
    for axes, dtype in product(AXES, (np.float32, np.float16)):
        check_floats(axes, dtype, jit=False)


@on_ranks(4)
def case_float32_jit():
    """The same inside a compiled graph, for the group of all ranks."""
    check_floats(AXES[2], np.float32, jit=True)


@on_ranks(nightly=(4,))
def case_other_floats_jit():
    """And for other groups, in half precision, too."""
    for axes, dtype in ((AXES[1], np.float32), (AXES[0], np.float16), (AXES[3], np.float16)):
        check_floats(axes, dtype, jit=True)


@on_ranks(4)
def case_integers_pynative():
    """Integers and booleans, forward."""
    for axes, dtype in product(AXES, (np.int32, np.int64, np.int16, np.int8, np.uint8, np.bool_)):
        check_integers(axes, dtype, jit=False)


@on_ranks(4)
def case_integers_jit():
    """The same in graphs, where they travel as 16-bit parts in floats: int64 as four, all others like int32, as two."""
    check_integers(AXES[3], np.int64, jit=True)


@on_ranks(2)
def case_every_bit_survives():
    """-0.0, NaN, infinities, and the largest integers, in gathers and sums, in both modes."""
    mesh = init_device_mesh((2,), ("tp",))
    floats = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf, 1.2e-38, 3.4e38], np.float32)
    limits = {dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max) for dtype in (np.int32, np.int64)}
    integers = {dtype: np.array([*limits[dtype], -1, 65535], dtype) for dtype in limits}
    collective, reduce = comm.AllGather(mesh, "tp", 0), comm.AllReduce(mesh, "tp")
    for x in (floats, floats.astype(np.float16), *integers.values()):
        for gathered in (collective(ms.Tensor(x)), ms.jit(collective)(ms.Tensor(x))):
            assert gathered.asnumpy().tobytes() == np.concatenate([x, x]).tobytes(), (x, gathered)
    for x in integers.values():
        mine = x // 2 if world().rank == 0 else -(x // 2) - 1
        for summed in (reduce(ms.Tensor(mine)), ms.jit(reduce)(ms.Tensor(mine))):
            np.testing.assert_array_equal(summed.asnumpy(), -np.ones_like(x))


@on_ranks(4)
def case_permute():
    """Re-ordered axes: every rank gets the slice that the target gives it, and the gradient finds the way back."""
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    source, target = Layout.on(MESH, (("dp", "tp"), ())), Layout.on(MESH, (("tp", "dp"), ()))
    collective = comm.Permute(MESH, ("dp", "tp"), source, target)
    mine, theirs = (whole[layout.local_slices(whole.shape, world().rank)] for layout in (source, target))
    weights = ms.Tensor(theirs)

    def weighted(x):
        return (collective(x) * weights).sum()

    for run_in_mode in (lambda function: function, ms.jit):
        np.testing.assert_array_equal(run_in_mode(collective)(ms.Tensor(mine)).asnumpy(), theirs)
        gradient = run_in_mode(ms.grad(weighted))(ms.Tensor(mine))
        np.testing.assert_array_equal(gradient.asnumpy(), mine)
    assert not np.array_equal(mine, theirs) or world().rank in (0, 3)


@on_ranks(4)
def case_scalars_and_views():
    """Tensors without dims, and those that are not contiguous."""
    rank = world().rank
    assert float(comm.AllReduce(MESH, ("dp", "tp"))(ms.Tensor(np.float32(rank)))) == 6
    assert float(comm.AllReduce(MESH, ("dp", "tp"), "max")(ms.Tensor(np.float32(rank)))) == 3
    view = ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank).T
    for axes in AXES:
        truth = np.concatenate([np.arange(6).reshape(2, 3).T + 10 * other for other in MESH.group(rank, axes)], 1)
        np.testing.assert_array_equal(comm.AllGather(MESH, axes, 1)(view).asnumpy(), truth)


@on_ranks(4)
def case_counts_are_the_logical_collectives():
    """Emulated or not, each counts once by its own name, with the ring's bytes; local ones don't count."""
    x = ms.Tensor(np.ones((4, 8), np.float32))
    with count_collectives() as counts:
        names = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce max", "broadcast", "slice_varying", "pad")
        for name in names:
            PAIRS[name].make(("dp", "tp"))(x)
        ms.grad(lambda x: comm.MarkVarying(MESH, "tp")(x).sum())(x)
    whole = 4 * 8 * 4
    assert counts == {
        ("all_gather", ("dp", "tp")): (1, 3 * whole),
        ("reduce_scatter", ("dp", "tp")): (1, 3 * whole // 4),
        ("all_to_all", ("dp", "tp")): (1, 3 * whole // 4),
        ("all_reduce", ("dp", "tp")): (1, 2 * 3 * whole // 4),
        ("broadcast", ("dp", "tp")): (1, 3 * whole // 4),
        ("all_reduce", ("tp",)): (1, whole),
    }


@on_ranks(4)
def case_groups_are_shared():
    """A mesh's groups are made once; a mesh with the same ranks, or both orders of axes, share them."""
    from mindformers_core.communication.groups import make_group

    rows, columns = make_group(MESH, "tp"), make_group(MESH, ("dp",))
    assert rows.name != columns.name
    assert make_group(MESH["tp"], "tp").name == rows.name
    assert make_group(MESH, ("dp", "tp")).name == make_group(MESH, ("tp", "dp")).name == world().group
    shuffled = init_device_mesh((2, 2), ("dp", "tp"), rank_list=[3, 2, 1, 0])
    ranks = shuffled.group(world().rank, ("tp",))
    gathered = comm.AllGather(shuffled, "tp", 0)(ms.Tensor(np.int32([world().rank])))
    assert tuple(gathered.asnumpy()) == ranks
    with pytest.raises(ValueError, match="8 ranks.*but 4 run"):
        make_group(init_device_mesh((8,), ("tp",)), "tp")
    half = init_device_mesh((2,), ("tp",))
    if world().rank > 1:
        with pytest.raises(ValueError, match=f"rank {world().rank}, which is not in"):
            make_group(half, "tp")
