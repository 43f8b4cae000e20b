"""Collectives through shared memory: what every rank gets, and what happens when one doesn't come.

Several ranks in this process, a thread each, which run no operators: these aren't made for threads.
`tests/ranks/case_shared_collectives.py` has ranks that are processes.
"""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from support.channel_pairs import joined_connections
from support.message_tensors import bits_of, random_tensor
from support.nightly import daily

from mindformers_core.communication.shared_collectives import _HALF, join_memory


def together(calls):
    """The results of functions that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def joined_groups(size, apart=False, limit=20.0):
    """The `SharedGroup` of every rank."""
    connections = joined_connections(size, apart, timeout=limit)
    return together([lambda rank=rank: join_memory(rank, connections[rank]) for rank in range(size)])


def called(groups, name, xs, *arguments):
    """What a method gives on every rank, as arrays."""
    tensors = [ms.Tensor(x) for x in xs]
    calls = [lambda g=group, x=x: getattr(g, name)(x, *arguments) for group, x in zip(groups, tensors)]
    return [result.asnumpy() for result in together(calls)]


def numbers(size, shape):
    """Floats for every rank whose sum depends on the order."""
    return [np.random.default_rng(rank).normal(size=shape).astype(np.float32) for rank in range(size)]


def summed(xs):
    return sum(xs[1:], xs[0])


def shapes(size):
    """Small, uneven, and such that rows, and parts of rows, need several pieces."""
    elements = _HALF // 4
    return [
        (size,),
        (size, 3),
        (2 * size, size, 5),
        (7, size * 1001, 131),
        (3, size * (elements // 2 + 7)),
        (4096, size),
    ]


@pytest.fixture(params=daily([2, 3], [2, 3, 4]))
def groups(request):
    """The `SharedGroup`s of so many ranks."""
    return joined_groups(request.param)


def test_sums_are_those_of_the_groups_order_bit_for_bit(groups):
    size = len(groups)
    for shape in shapes(size):
        xs = numbers(size, shape)
        expected = summed(xs)
        assert all(np.array_equal(result, expected) for result in called(groups, "all_reduce", xs)), shape
        for dim in [dim for dim, length in enumerate(shape) if length % size == 0]:
            results = called(groups, "reduce_scatter", xs, dim)
            assert np.array_equal(np.concatenate(results, dim), expected), (shape, dim)
            assert len({result.shape for result in results}) == 1


def test_a_sum_of_any_number_of_elements(groups):
    for count in (1, 2, 5, _HALF // 4 - 1, _HALF // 4 + 1, 3 * _HALF // 4 + 5):
        xs = numbers(len(groups), (count,))
        for result in called(groups, "all_reduce", xs):
            np.testing.assert_array_equal(result, summed(xs))


def test_gathered_parts_come_in_the_groups_order(groups):
    for shape in shapes(len(groups)):
        xs = numbers(len(groups), shape)
        for dim in range(len(shape)):
            whole = np.concatenate(xs, dim)
            assert all(np.array_equal(result, whole) for result in called(groups, "all_gather", xs, dim)), (shape, dim)


def test_parts_and_whole_tensors_go_from_rank_to_rank(groups):
    size = len(groups)
    for shape in shapes(size):
        xs = [ms.Tensor(x) for x in numbers(size, shape)]
        give = [
            lambda g=g, x=x: g.exchange({(g.index - 1) % size: x}, [(g.index + 1) % size]) for g, x in zip(groups, xs)
        ]
        assert [bits_of(x).tobytes() for (x,) in together(give)] == [bits_of(x).tobytes() for x in (*xs[1:], xs[0])]
    parts = [{to: random_tensor(ms.int64, (300, 301), size * rank + to) for to in range(size)} for rank in range(size)]
    found = together([lambda g=g, each=each: g.exchange(each, range(size)) for g, each in zip(groups, parts)])
    for to, (rank, part) in product(range(size), enumerate(parts)):
        np.testing.assert_array_equal(found[to][rank].asnumpy(), part[to].asnumpy())


def test_as_many_rows_go_from_rank_to_rank_as_there_are(groups):
    """Zeros are behind them; of few rows and many, small and wide, in several pieces; more rows than are sent."""
    size, random = len(groups), np.random.default_rng(7)
    for rows, *others in ((3, 5), (40, 7, 1001), (5, _HALF // 4 + 3), (9000, 64)):
        sizes = random.integers(0, rows + 1, (size, size))
        sizes[0] = 0, *[rows] * (size - 1)
        xs = [random.normal(size=(counts.sum() + 1, *others)).astype(np.float32) for counts in sizes]
        counts = sizes.sum(0) + np.arange(size)
        calls = [
            partial(g.exchange_rows, ms.Tensor(x), sizes[me].tolist(), sizes[:, me].tolist(), int(counts[me]), rows)
            for me, (g, x) in enumerate(zip(groups, xs))
        ]
        cut = [np.split(x, np.cumsum(counts)) for x, counts in zip(xs, sizes)]
        for me, found in enumerate(together(calls)):
            truth = np.concatenate([*(parts[me] for parts in cut), np.zeros((me, *others), np.float32)])
            np.testing.assert_array_equal(found.asnumpy(), truth)


def test_every_dtype_is_gathered_bit_for_bit():
    groups = joined_groups(2)
    for dtype in ms.common.dtype.all_types:
        xs = [random_tensor(dtype, (300, 7), rank) for rank in range(2)]
        results = together([lambda g=group, x=x: g.all_gather(x, 0) for group, x in zip(groups, xs)])
        truth = np.concatenate([bits_of(x) for x in xs])
        for result in results:
            assert (result.dtype, result.shape) == (dtype, (600, 7))
            np.testing.assert_array_equal(bits_of(result), truth, str(dtype))


def test_a_result_keeps_its_values_when_the_memory_is_used_again(groups):
    x = np.ones(1000, np.float32)
    results = [called(groups, "all_gather", [x * turn] * len(groups), 0)[0] for turn in range(4)]
    assert [set(result) for result in results] == [{turn} for turn in range(4)]


def test_a_dim_that_cant_be_cut():
    groups = joined_groups(2, limit=5.0)
    with pytest.raises(ValueError, match=r"shape \(3, 4\) can't be cut along dim 0 into 2 equal parts"):
        groups[0].reduce_scatter(ms.Tensor(np.ones((3, 4), np.float32)), 0)
    assert called(groups, "all_reduce", numbers(2, (4,)))  # nothing was begun


def test_ranks_on_several_hosts_have_no_shared_memory():
    assert joined_groups(2, apart=True) == [None, None]


def failures(calls):
    """What every call fails with."""

    def run(call):
        with pytest.raises(RuntimeError) as failure:
            call()
        return str(failure.value)

    return together([lambda call=call: run(call) for call in calls])


@pytest.mark.parametrize(
    "other",
    [
        lambda group: group.all_gather(ms.Tensor(np.ones((4, 4), np.float32)), 0),
        lambda group: group.all_reduce(ms.Tensor(np.ones((2, 8), np.float32))),
        lambda group: group.all_reduce(ms.Tensor(np.ones((4, 4), np.int32))),
    ],
    ids=["collective", "shape", "dtype"],
)
def test_another_call_is_an_error_on_all_ranks(other):
    x = ms.Tensor(np.ones((4, 4), np.float32))
    first, second = joined_groups(2, limit=5.0)
    said = failures([lambda: first.all_reduce(x), lambda: other(second)])
    # the first to find out closes its end, which the other one may find instead
    assert all("called something else" in text or "has ended" in text for text in said), said
    assert any("called something else" in text for text in said), said
    assert said[0].startswith("all_reduce Float32 (4, 4) with the rank at place 1 of 2: it ")
    assert "the channel is closed" in failures([lambda: first.all_reduce(x)])[0]


def test_a_call_that_a_rank_left_out_is_an_error():
    groups = joined_groups(2)
    x = ms.Tensor(np.ones((4, 4), np.float32))
    groups[1].barriers += 1
    said = failures([lambda: groups[0].all_reduce(x), lambda: groups[1].all_reduce(x)])
    assert any("called something else" in text for text in said)


def test_a_rank_that_doesnt_come_is_an_error_at_the_limit():
    groups = joined_groups(3, limit=0.5)
    x = ms.Tensor(np.ones((4, 4), np.float32))
    start = time.monotonic()
    said = failures([lambda g=group: g.all_reduce(x) for group in groups[:2]])
    assert time.monotonic() - start > 0.4
    assert any(text.endswith("with the rank at place 2 of 3: nothing has come for 0.5 s") for text in said)


def test_a_rank_that_has_ended_is_an_error_at_once():
    groups = joined_groups(2)
    x = ms.Tensor(np.ones((4, 4), np.float32))
    groups[1].connections[0].socket.close()  # as the system does for a process that ends
    start = time.monotonic()
    assert "with the rank at place 1 of 2: it has ended" in failures([lambda: groups[0].all_reduce(x)])[0]
    assert time.monotonic() - start < 10  # the limit is 20


def test_a_rank_that_ends_while_memory_is_shared():
    connections = joined_connections(2)
    connections[1][0].close()
    with pytest.raises(RuntimeError, match="ranks can't share memory"):
        join_memory(0, connections[0])


def test_nothing_is_left_open():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    groups = joined_groups(3)
    called(groups, "all_reduce", numbers(3, (1000,)))
    assert len(os.listdir("/proc/self/fd")) > before
    del groups
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
