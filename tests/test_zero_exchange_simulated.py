"""Parts of parameters and the buffers of buckets on simulated ranks: what comes out equals plain slices and sums."""

import random
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint
from support.nightly import seeds

from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.zero.bucket_collectives import BucketCollectives
from mindformers_core.zero.meter import MemoryMeter
from mindformers_core.zero.plan import ParameterPlan, plan_parameters
from mindformers_core.zero.precision import MixedPrecision
from mindformers_core.zero.sharded_parameter import ShardedParameter

pytestmark = pytest.mark.usefixtures("one_rank")


def drawn(seed):
    """`(ranks, plans, values)`: parameters that are all cut, some along another dim than the first."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    ranks = draw.choice((2, 3, 4))
    plans, values = [], []
    for number in range(draw.randrange(1, 4)):
        shape = [draw.choice((5, 7)) for _ in range(draw.randrange(1, 4))]
        shape[draw.randrange(len(shape))] = ranks * draw.randrange(1, 4)
        plans.append(ParameterPlan(f"weight{number}", tuple(shape), "float32", "float32"))
        values.append(numbers.integers(-9, 9, shape).astype(np.float32))  # sums of them are exact
    return ranks, plan_parameters(plans, ranks, 0, "level1"), values


def stored_on(rank, ranks, plans, values):
    """What a rank stores, and its `BucketCollectives`, whose collectives are still to come."""
    meter, mesh = MemoryMeter(), DeviceMesh((1,), ("dp",))
    stored = []
    for plan, value in zip(plans, values):
        whole = Parameter(Tensor(value), name=plan.path)
        layout = Layout.on(mesh, ((),) * len(plan.shape))
        stored.append(ShardedParameter(plan, whole, whole, layout, rank, ranks, meter))
    settings = SimpleNamespace(mesh=mesh, shard_axes=(), replicate_axes=(), scale=0.5, precision=MixedPrecision())
    settings.without = lambda cut: settings
    return stored, BucketCollectives(settings, meter)


def cut(value, plan, rank, ranks):
    """A rank's slice."""
    return np.split(value, ranks, plan.dim)[rank]


@pytest.mark.parametrize("first", seeds(8, 24, 8))
def test_parts_gathers_and_reductions(first):
    dims = set()
    for seed in range(first, first + 8):
        ranks, plans, values = drawn(seed)
        dims |= {plan.dim for plan in plans}
        everyone = [stored_on(rank, ranks, plans, values) for rank in range(ranks)]
        for rank, (stored, _) in enumerate(everyone):
            for entry, plan, value in zip(stored, plans, values):
                np.testing.assert_array_equal(entry.shard.asnumpy(), cut(value, plan, rank, ranks), str(seed))
                rows = entry.rows(Tensor(value))
                np.testing.assert_array_equal(rows[rank].asnumpy(), entry.shard.asnumpy().reshape(-1), str(seed))
                np.testing.assert_array_equal(entry.joined(rows).asnumpy(), value, str(seed))
        check_gather(everyone, values, seed)
        check_reduce_scatter(everyone, plans, seed)
    assert len(dims) > 1


def check_gather(everyone, values, seed):
    """All ranks' parts, changed by their optimizers, become the same wholes, which are lent and given back."""
    for stored, _ in everyone:
        for entry in stored:
            entry.release()
            entry.shard.set_data(Tensor(entry.shard.asnumpy() + 1))
    sent = []
    for stored, exchange in everyone:
        exchange._gather = {(): lambda buffer: sent.append(buffer) or mint.zeros((buffer.size * len(everyone),))}
        exchange.gather(stored)
    together = Tensor(np.concatenate([buffer.asnumpy() for buffer in sent]))
    for stored, exchange in everyone:
        exchange._gather = {(): lambda buffer: together}
        exchange.gather(stored)
        for entry, value in zip(stored, values):
            np.testing.assert_array_equal(entry.unsharded.asnumpy(), value + 1, str(seed))
            before = entry.shard.asnumpy().copy()
            entry.lend()
            entry.release()
            np.testing.assert_array_equal(entry.shard.asnumpy(), before, str(seed))


def check_reduce_scatter(everyone, plans, seed):
    """Every rank gets its part of the sum of all ranks' gradients, scaled."""
    numbers, ranks = np.random.default_rng(seed + 1), len(everyone)
    gradients = [[numbers.integers(-9, 9, plan.shape).astype(np.float32) for plan in plans] for _ in everyone]
    sent = []
    for (stored, exchange), own in zip(everyone, gradients):
        exchange._scatter = {(): lambda flat: sent.append(flat.asnumpy()) or flat[: flat.size // ranks]}
        exchange.reduce_scatter(stored, list(map(Tensor, own)))
    total = sum(sent)
    for rank, (stored, exchange) in enumerate(everyone):
        exchange._scatter = {(): lambda flat, rank=rank: Tensor(np.split(total, ranks)[rank])}
        given = list(map(Tensor, gradients[rank]))
        reduced = exchange.reduce_scatter(stored, given)
        assert given == []  # the wholes are free
        for place, (gradient, plan) in enumerate(zip(reduced, plans, strict=True)):
            whole = sum(own[place] for own in gradients) * 0.5
            np.testing.assert_array_equal(gradient.asnumpy(), cut(whole, plan, rank, ranks), str(seed))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_of_whole_parameters(count, dtype):
    plans = [ParameterPlan(f"weight{number}", (2, number + 1), dtype, "float32") for number in range(count)]
    values = [np.full(plan.shape, 3.0, dtype) for plan in plans]
    stored, exchange = stored_on(0, 1, plan_parameters(plans, 1, 0, "level1"), values)
    seen = []
    exchange._over_all = {(): lambda flat: seen.append(flat) or flat * 4}  # four ranks with the same gradients
    reduced = exchange.all_reduce(stored, [Tensor(value) for value in values])
    assert [flat.dtype for flat in seen] == [ms.float32] and seen[0].size == sum(plan.size for plan in plans)
    for gradient, value in zip(reduced, values, strict=True):
        assert gradient.dtype == ms.float32  # of half precision, too
        np.testing.assert_array_equal(gradient.asnumpy(), value * 2)
