"""Large tensors in PyNative: collectives through memory that ranks of one host share, and what they are instead of."""

import os
from itertools import product
from unittest.mock import patch

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops
from support.launch import on_ranks
from support.message_tensors import bits_of
from support.routed_rows import routed_rows

from mindformers_core import communication as comm
from mindformers_core.communication import shared_collectives, world
from mindformers_core.communication.communicator import communicator
from mindformers_core.communication.groups import make_group
from mindformers_core.communication.world import process_state
from mindformers_core.mesh import init_device_mesh

SHAPE = (8, 64, 1000)  # 2 MB
TOTAL, MOST = 160, 50  # rows that a rank has for all, and for one
LARGE, SMALL = (3, 200), (5,)  # dims of a row
OTHERS = {  # dtypes of rows besides float32, compiled or not
    **dict.fromkeys([(False, LARGE), (False, SMALL)], (ms.float16, ms.bfloat16, ms.int32)),
    (True, LARGE): (ms.int32,), (True, SMALL): (ms.float16, ms.int32),
}  # fmt: skip


def barriers(group):
    """The number of barriers that a group has passed."""
    return shared_collectives.shared_group(group).barriers


def squared(cell):
    """A function of a tensor: the sum of the squares of what a collective makes of it."""
    return lambda x: ops.sum(cell(x) * cell(x))


def values(rank, shape=SHAPE, dtype=np.float32):
    return np.random.default_rng(rank).integers(-3, 4, shape).astype(dtype)


@on_ranks(4)
def case_large_tensors_on_subgroups():
    """Forward and gradient of the collectives that are made of them, over rows, columns, and all in both orders."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    for axes, dim in product((("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")), range(3)):
        group = make_group(mesh, axes)
        before, xs = barriers(group), [values(rank) for rank in group.ranks]
        x, total = ms.Tensor(xs[group.index]), sum(xs)
        part, whole = np.split(total, group.size, dim)[group.index], np.concatenate(xs, dim)
        for collective, truth, weight, gradient in (
            (comm.AllReduceVarying(mesh, axes), total, xs, total),
            (comm.AllGatherVarying(mesh, axes, dim), whole, [whole * rank for rank in group.ranks], "sums"),
            (comm.ReduceScatter(mesh, axes, dim), part, [np.split(x, group.size, dim)[0] for x in xs], None),
        ):
            weights = ms.Tensor(weight[group.index])
            result, backward = ms.vjp(collective, x)
            np.testing.assert_array_equal(result.asnumpy(), truth)
            if isinstance(gradient, str):
                gradient = np.split(whole * sum(group.ranks), group.size, dim)[group.index]
            elif gradient is None:
                gradient = np.concatenate(weight, dim)
            np.testing.assert_array_equal(backward(weights)[0].asnumpy(), gradient)
        assert barriers(group) >= before + 6


@on_ranks(4)
def case_sums_have_the_same_bits_on_all_ranks():
    """Of floats whose sum depends on the order."""
    mesh = init_device_mesh((4,), ("dp",))
    x = np.random.default_rng(world().rank).normal(size=100_003).astype(np.float32)
    summed = comm.AllReduce(mesh, "dp")(ms.Tensor(x))
    everywhere = comm.AllGather(mesh, "dp", 0)(summed.reshape(1, -1)).asnumpy()
    assert all(row.tobytes() == everywhere[0].tobytes() for row in everywhere)


@on_ranks(2)
def case_large_views_that_are_not_contiguous():
    """Their elements count, in the order of the view."""
    mesh = init_device_mesh((2,), ("dp",))
    xs = [values(rank) for rank in range(2)]
    view = ms.mint.transpose(ms.Tensor(xs[world().rank]), 0, 2)
    np.testing.assert_array_equal(comm.AllReduce(mesh, "dp")(view).asnumpy(), sum(xs).T)
    whole = np.concatenate([x.T for x in xs], 1)
    np.testing.assert_array_equal(comm.AllGather(mesh, "dp", 1)(view).asnumpy(), whole)


@on_ranks(2)
def case_what_goes_another_way():
    """Small sums, those of float16, and ranks of several hosts: the same results, without barriers."""
    mesh = init_device_mesh((2,), ("dp",))
    group = make_group(mesh, "dp")
    before = barriers(group)
    reduce, gather = comm.AllReduce(mesh, "dp"), comm.AllGather(mesh, "dp", 1)
    scatter, largest = comm.ReduceScatter(mesh, "dp", 1), comm.AllReduce(mesh, "dp", "max")
    small = [values(rank, (4, 6)) for rank in range(2)]
    np.testing.assert_array_equal(reduce(ms.Tensor(small[world().rank])).asnumpy(), sum(small))
    xs = [values(rank, dtype=np.float16) for rank in range(2)]
    np.testing.assert_array_equal(reduce(ms.Tensor(xs[world().rank])).asnumpy(), sum(xs))
    assert barriers(group) == before
    xs, shared = [values(rank) for rank in range(2)], []
    x = ms.Tensor(xs[world().rank])
    collectives = (reduce, gather, scatter, largest, comm.AllToAll(mesh, "dp", 0, 1), comm.Shift(mesh, "dp", 1))
    for collective in collectives:
        before = barriers(group)
        shared.append(collective(x).asnumpy())
        assert barriers(group) > before
    np.testing.assert_array_equal(shared[3], np.maximum(*xs))
    np.testing.assert_array_equal(shared[5], xs[1 - world().rank])
    memo = process_state().memo(shared_collectives.__name__)
    kept = memo[group.ranks]
    memo[group.ranks] = None  # as on several hosts
    for result, collective in zip(shared, collectives):
        np.testing.assert_array_equal(collective(x).asnumpy(), result)
    memo[group.ranks] = kept


@on_ranks(2)
def case_small_tensors_once_ranks_are_connected():
    """The same moves and extremes as by messages, of every dtype, without dims or elements, through shared memory."""
    mesh = init_device_mesh((2,), ("dp",))
    group = make_group(mesh, "dp")
    shared_collectives.shared_group(group)
    memo, index = process_state().memo(shared_collectives.__name__), world().rank
    kept, random = memo[group.ranks], np.random.default_rng(index)
    gather, shift, largest = comm.AllGather(mesh, "dp", 0), comm.Shift(mesh, "dp", 1), comm.AllReduce(mesh, "dp", "max")
    for dtype in (ms.float32, ms.float64, ms.bfloat16, ms.int16, ms.int32, ms.bool_):
        x = ms.Tensor(random.normal(size=(4, 6)) * 9, dtype)
        cells = (gather, shift) if dtype in (ms.bfloat16, ms.bool_) else (gather, shift, largest)
        before, found = barriers(group), [cell(x) for cell in cells]
        assert barriers(group) > before
        del memo[group.ranks]
        for one, other in zip(found, [cell(x) for cell in cells], strict=True):
            assert (one.dtype, bits_of(one).tobytes()) == (other.dtype, bits_of(other).tobytes())
        memo[group.ranks] = kept
    assert shift(ms.Tensor(float(index))).asnumpy() == 1 - index
    assert gather(ms.Tensor(np.zeros((0, 8), np.float32))).shape == (0, 8)


@on_ranks(2)
def case_graphs_give_the_same():
    """Independent collectives of one graph, small and large, of many dtypes: bit by bit PyNative's results."""
    mesh, random = init_device_mesh((2,), ("dp",)), np.random.default_rng(world().rank)
    cells = [
        comm.AllReduceVarying(mesh, "dp"), comm.AllReduce(mesh, "dp", "max"), comm.AllGatherVarying(mesh, "dp", 1),
        comm.ReduceScatter(mesh, "dp", 1), comm.AllToAll(mesh, "dp", 0, 1), comm.Shift(mesh, "dp", 1),
    ]  # fmt: skip
    segments, offsets = shared_collectives.shared_group(make_group(mesh, ("dp",))).segments, []
    write = segments.write
    segments.write = lambda pieces, readers: offsets.append(write(pieces, readers)) or offsets[-1]

    def results(x):
        return tuple([cell(x) for cell in (cells if x.dtype != ms.bfloat16 else cells[2:3])])  # it has no eager sums

    def gradients(x):
        return tuple([ms.grad(squared(cell))(x) for cell in (cells[0], *cells[2:])])

    for rows, dtype in ((4, ms.float32), (400, ms.float32), (400, ms.int8), (400, ms.bfloat16)):
        x = ms.Tensor(random.normal(size=(rows, 256)) * 9, dtype)
        offsets.clear()
        for eager, compiled in zip(results(x), ms.jit(results)(x), strict=True):
            assert (compiled.dtype, compiled.shape) == (eager.dtype, eager.shape)
            assert bits_of(compiled).tobytes() == bits_of(eager).tobytes(), (rows, dtype)
        assert len(offsets) == (len(results(x)) if rows == 400 else 0)
    x = ms.Tensor(random.normal(size=(400, 64)).astype(np.float32))
    for eager, compiled in zip(gradients(x), ms.jit(gradients)(x), strict=True):
        np.testing.assert_array_equal(compiled.asnumpy(), eager.asnumpy())


@on_ranks(2)
def case_the_core_is_yielded_after_each():
    """Else MindSpore's thread of messages waits on this core, and the other rank for it; of no elements, too."""
    mesh = init_device_mesh((2,), ("dp",))
    reduce, dispatch = comm.AllReduceVarying(mesh, "dp"), comm.Dispatch(mesh, "dp", 400, 800)
    sizes = ms.Tensor(np.full((2, 2), 200, np.float32))
    with patch.object(os, "sched_yield", wraps=os.sched_yield) as yields:
        for rows, dtype in ((4, ms.float32), (400, ms.float32), (4, ms.int32), (40, ms.int32), (4, ms.int64)):
            x = ms.ops.ones((rows, 256), dtype)
            for called in (reduce, ms.jit(reduce)) if dtype == ms.float32 else (ms.jit(reduce),):
                yields.reset_mock()
                assert (called(x).asnumpy() == 2).all() and yields.called, (rows, dtype, called)
        yields.reset_mock()
        assert (ms.jit(dispatch.forward)(ms.ops.ones((400, 256)), sizes)[:200].asnumpy() == 1).all() and yields.called
    assert ms.jit(reduce)(ms.ops.ones((0, 8))).shape == (0, 8)
    assert ms.jit(reduce)(ms.Tensor(1.5)).asnumpy() == 3


@on_ranks(2)
def case_other_calls_are_an_error_that_names_them():
    """Both ranks are told at once what failed; a group of its own, which can't be used after it."""
    mesh = init_device_mesh((2,), ("dp",), rank_list=[1, 0])
    x = ms.Tensor(values(0))
    collective = (comm.AllReduce(mesh, "dp"), comm.AllGather(mesh, "dp", 0))[world().rank]
    kind = ("all_reduce", "all_gather")[world().rank]
    watch, process_state().watch = process_state().watch, None  # which would end all ranks
    with pytest.raises(RuntimeError, match=rf"{kind} over dp \(ranks 1, 0\) failed on rank {world().rank}") as failure:
        collective(x)
    process_state().watch = watch
    assert "called something else" in str(failure.value.__cause__) or "ended" in str(failure.value.__cause__)


def numbers(x):
    """A tensor's numbers, which float32 has."""
    return x.astype(ms.float32).asnumpy()


@on_ranks(4)
def case_as_many_rows_as_data_say_go_to_ranks_and_back():
    """`dispatch` and `combine`, each the gradient of the other, small and large, eager and compiled; bytes of graphs.

    Over two axes whose order isn't that of ranks.
    """
    mesh, axes = init_device_mesh((2, 2), ("dp", "tp")), ("tp", "dp")
    group = make_group(mesh, axes)
    dispatch, combine = (
        communicator(mesh).make(kind, axes, rows=rows, to_rows=to_rows)
        for kind, rows, to_rows in (("dispatch", TOTAL, 4 * MOST), ("combine", 4 * MOST, TOTAL))
    )
    segments, written, me = shared_collectives.shared_group(group).segments, [], group.index
    write = segments.write
    segments.write = lambda pieces, readers: written.append(sum(map(len, pieces))) or write(pieces, readers)

    def both(x, y, sizes, home):
        return dispatch(x, sizes), combine(y, home)

    def total(x, y, sizes, home, of_there, of_back):
        there, back = both(x, y, sizes, home)
        return ops.sum(there * of_there) + ops.sum(back * of_back)

    def gradients(*given):
        return ms.grad(total, (0, 1))(*given)

    compiled, eager = (ms.jit(both), ms.jit(gradients)), (both, gradients)
    for jit, others, (seed, most) in product((False, True), (LARGE, SMALL), ((0, 41), (1, 41), (2, 1))):
        counts = np.random.default_rng(seed).integers(0, most, (4, 4))  # the last ones: nothing at all
        for dtype in (ms.float32, *OTHERS[jit, others] * (seed == 0)):
            x, y, there, back, rows_of = routed_rows(me, counts, others, TOTAL, MOST if jit else None)
            sizes = np.stack((counts[me], counts[:, me])).astype(np.int32)
            given = [
                ms.Tensor(x).astype(dtype),
                ms.Tensor(y).astype(dtype),
                *map(ms.Tensor, (sizes, sizes[::-1].copy())),
            ]
            written.clear()
            forward, backward = compiled if jit else eager
            found = [forward(*given)]
            if dtype == ms.float32:
                found.append(backward(*given, ms.Tensor(y), ms.Tensor(x))[::-1])  # what the other one gives
            for gone, come in found:
                assert gone.dtype == come.dtype == dtype
                for rows, truth in zip(rows_of(numbers(gone)), there, strict=True):
                    if len(truth):
                        np.testing.assert_array_equal(rows, numbers(ms.Tensor(truth).astype(dtype)))
                assert jit or most > 1 or gone.shape == (1, *others) and not numbers(gone).any()
                np.testing.assert_array_equal(numbers(come), numbers(ms.Tensor(back).astype(dtype)))
            if jit and others == LARGE and dtype == ms.float32:
                assert sorted(written) == sorted([count * 4 * 3 * 200 for count in (*counts[me], *counts[:, me])] * 2)
    segments.write = write
