"""Every collective on sub-groups of a 2x2 mesh, PyNative and `@ms.jit`, forward and gradient, against NumPy.

Values are small whole numbers, so that sums are exact in every dtype, and results are compared exactly.
"""

from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from graph_collectives import count_in_graph
from support.dtype_programs import foretold, loss_of, sharded
from support.launch import on_ranks
from support.simulated_ranks import backward, forward

from mindformers_core import communication as comm
from mindformers_core.analysis import traffic
from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.redistribution.steps import COLLECTIVES
from mindformers_core.tensor_parallel import jit as compiled

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


def reordered(xs):
    """Axes in the other order: the one of two axes of size 2, or of one axis, which is no change. Its own inverse."""
    return [xs[place] for place in np.arange(len(xs)).reshape(2, -1).T.ravel()]


def shifted(distance):
    return lambda xs: [xs[(place - distance) % len(xs)] for place in range(len(xs))]


def backward_of(function):
    return lambda xs, gradients: function(gradients)


def pair(cell, kind, op="sum", dim=None, to_dim=None, floats_only=False):
    """A collective with the meaning of a redistribution's step of this kind."""
    step = SimpleNamespace(kind=kind, op=op, dim=dim, to_dim=to_dim)
    given = [each for each in (dim, to_dim) if each is not None] + [op] * (op != "sum")

    def make(axes):
        return getattr(comm, cell)(MESH, axes, *given)

    return Pair(make, lambda xs: forward(step, None, xs), lambda xs, gs: backward(step, None, gs, xs), floats_only)


def permute(axes):
    """From a dim cut by `axes` to the same cut by them in the other order."""
    return comm.Permute(MESH, axes, Layout.on(MESH, (axes, ())), Layout.on(MESH, (axes[::-1], ())))


AVERAGE = pair("ToPartial", "to_partial", "avg")
PAIRS = {
    "all_reduce sum": pair("AllReduce", "all_reduce"),
    "all_reduce avg": pair("AllReduce", "all_reduce", "avg", floats_only=True),
    "all_reduce max": pair("AllReduce", "all_reduce", "max"),
    "all_reduce min": pair("AllReduce", "all_reduce", "min"),
    "all_reduce_varying": pair("AllReduceVarying", "all_reduce_varying"),
    "all_reduce_varying avg": pair("AllReduceVarying", "all_reduce_varying", "avg", floats_only=True),
    "all_gather": pair("AllGather", "all_gather", dim=1),
    "all_gather_varying": pair("AllGatherVarying", "all_gather_varying", dim=0),
    "reduce_scatter": pair("ReduceScatter", "reduce_scatter", dim=1),
    "reduce_scatter avg": pair("ReduceScatter", "reduce_scatter", "avg", dim=0, floats_only=True),
    "reduce_scatter max": pair("ReduceScatter", "reduce_scatter", "max", dim=0),
    "reduce_scatter min": pair("ReduceScatter", "reduce_scatter", "min", dim=1),
    "permute": Pair(permute, reordered, backward_of(reordered)),
    "shift": Pair(lambda axes: comm.Shift(MESH, axes, 1), shifted(1), backward_of(shifted(-1))),
    "all_to_all": pair("AllToAll", "all_to_all", dim=0, to_dim=1),
    "slice": pair("SliceToShard", "slice", dim=1),
    "slice_varying": pair("SliceVarying", "slice_varying", dim=0),
    "mark_varying": pair("MarkVarying", "mark_varying"),
    "unmark_varying": pair("UnmarkVarying", "unmark_varying", floats_only=True),
    "to_partial": pair("ToPartial", "to_partial"),
    "to_partial avg": replace(AVERAGE, backward=lambda xs, gradients: [len(xs) * each for each in gradients]),
    "to_partial max": pair("ToPartial", "to_partial", "max"),
    "to_partial min": pair("ToPartial", "to_partial", "min"),
    "to_partial_varying": pair("ToPartialVarying", "to_partial_varying"),
    "pad": pair("PadToPartial", "pad", dim=1),
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
    if jit:  # local ones take long to compile, too
        pairs = {name: pair for name, pair in pairs.items() if name.startswith((*COLLECTIVES, "shift"))}
    truths = [expected(pair, axes, seed, dtype) for seed, pair in enumerate(pairs.values())]
    outputs_of = all_of(pairs.values(), axes)
    outputs = (ms.jit(outputs_of) if jit else outputs_of)(*[ms.Tensor(truth[0]) for truth in truths])
    for name, truth, output in zip(pairs, truths, outputs, strict=True):
        where = f"{name} over {axes}, {np.dtype(dtype)}, jit {jit}"
        assert output.asnumpy().dtype == dtype, where
        np.testing.assert_array_equal(output.asnumpy(), truth[1], where)


@on_ranks(4)
def case_floats_pynative():
    """Forward and gradient of all pairs, float32; float16 over all axes."""
    for axes, dtype in (*product(AXES, (np.float32,)), (AXES[2], np.float16)):
        check_floats(axes, dtype, jit=False)


@on_ranks(nightly=(4,))
def case_floats_jit():
    """The same inside a compiled graph; daily, graphs of models have them."""
    for axes, dtype in zip((AXES[2], AXES[1], AXES[0], AXES[3]), [np.float32] * 2 + [np.float16] * 2):
        check_floats(axes, dtype, jit=True)


@on_ranks(4)
def case_integers_pynative():
    """Integers over all axes, booleans and short ones over all ranks; forward."""
    others = product(AXES[2:3], (np.int64, np.bool_, np.int16, np.int8, np.uint8))
    for axes, dtype in (*product(AXES, (np.int32,)), *others):
        check_integers(axes, dtype, jit=False)


@on_ranks(nightly=(4,))
def case_integers_jit():
    """The same in graphs, where they travel as 16-bit parts in floats: int64 as four, all others like int32, as two;
    daily, some in `case_every_bit_survives`.
    """
    check_integers(AXES[3], np.int64, jit=True)


@on_ranks(nightly=(2,))
def case_a_compiled_step_sends_what_its_plan_foretells():
    """In one graph, where int8 is sent as int32, its sum as int64. Daily, not compiled: `test_sent_bytes`."""
    mesh, dtypes = init_device_mesh((2,), ("tp",)), ("int8", "float32")
    expected = traffic.summed(
        (key, (calls, size * (4 if dtype == "int8" and key[0] != "all_reduce" else 1)))
        for dtype in dtypes
        for key, (calls, size) in foretold(dtype, mesh).items()
    )
    cells, xs = zip(*(sharded(dtype, mesh) for dtype in dtypes))
    trained = [parameter for cell in cells for parameter in cell.trainable_params()]

    def loss(*xs):
        results = [cells[index](xs[index]) for index in range(len(xs))]
        return sum([loss_of(each) for each in results])

    with count_in_graph(mesh) as counts:
        compiled(ms.value_and_grad(loss, None, trained))(*xs)
    assert dict(counts) == expected


@on_ranks(2)
def case_every_bit_survives():
    """-0.0, NaN, infinities, and the largest integers, in gathers and sums, in both modes."""
    mesh = init_device_mesh((2,), ("tp",))
    floats = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf, 1.2e-38, 3.4e38], np.float32)
    limits = {dtype: (np.iinfo(dtype).min, np.iinfo(dtype).max) for dtype in (np.int32, np.int64)}
    integers = {dtype: np.array([*limits[dtype], -1, 65535], dtype) for dtype in limits}
    collective, reduce = comm.AllGather(mesh, "tp", 0), comm.AllReduce(mesh, "tp")
    for x in (floats, floats.astype(np.float16), np.array([1 - 2j, np.inf * 1j], np.complex64), *integers.values()):
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
        names = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce max", "slice_varying", "pad")
        for name in names:
            PAIRS[name].make(("dp", "tp"))(x)
        ms.grad(lambda x: comm.MarkVarying(MESH, "tp")(x).sum())(x)
    whole = 4 * 8 * 4
    assert counts == {
        ("all_gather", ("dp", "tp")): (1, 3 * whole),
        ("reduce_scatter", ("dp", "tp")): (1, 3 * whole // 4),
        ("all_to_all", ("dp", "tp")): (1, 3 * whole // 4),
        ("all_reduce", ("dp", "tp")): (1, 2 * 3 * whole // 4),
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
