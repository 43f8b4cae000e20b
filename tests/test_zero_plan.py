"""`plan_parameters`: which parameters are cut, along which dim, by thousands of drawn cases and at the edges."""

import random
from dataclasses import replace
from math import prod

import pytest
from support.nightly import seeds

from mindformers_core.zero.plan import LEVELS, ParameterPlan, plan_parameters

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1, "bool": 1}
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 15, 16, 64, 100)


def drawn(seed):
    """`(parameters, shard_size, threshold, level)` of a seed."""
    draw = random.Random(seed)
    parameters = []
    for number in range(draw.randrange(8)):
        shape = tuple(draw.choice(SIZES) for _ in range(draw.randrange(4)))
        dtype = draw.choice(list(BYTES))
        parameters.append(
            ParameterPlan(f"layers.{number}.weight", shape, dtype, "float32", draw.random() < 0.8, f"layers.{number}")
        )
    return parameters, draw.choice((1, 2, 3, 4, 8, 64)), draw.choice((0, 0.01, 0.25, 1, 64)), draw.choice([*LEVELS])


def is_cut_by_the_rules(plan, shard_size, threshold, level):
    """The rules of `hsdp()`, said once more."""
    large = prod(plan.shape) * BYTES[plan.dtype] > threshold * 1024
    counts = plan.trainable or level == "level3"
    return shard_size > 1 and large and counts and any(size and size % shard_size == 0 for size in plan.shape)


@pytest.mark.parametrize("first", seeds(1000, 4000, 1000))
def test_drawn_parameters(first):
    cut = 0
    for seed in range(first, first + 1000):
        parameters, shard_size, threshold, level = drawn(seed)
        plans = plan_parameters(parameters, shard_size, threshold, level)
        assert [replace(plan, dim=None, reason="") for plan in plans] == parameters, seed  # each once, in order
        for plan in plans:
            assert (plan.dim is not None) == is_cut_by_the_rules(plan, shard_size, threshold, level), (seed, plan)
            assert (plan.dim is None) == bool(plan.reason), (seed, plan)
            check_part(plan, shard_size, seed)
            cut += plan.dim is not None
    assert cut > 300


def check_part(plan, shard_size, seed):
    """A part has the whole's shape but along `dim`, the first that can be cut, and parts add up to the whole."""
    part = plan.shard_shape(shard_size)
    assert plan.size == prod(plan.shape) and plan.nbytes == plan.size * BYTES[plan.dtype], (seed, plan)
    if plan.dim is None:
        assert part == plan.shape, (seed, plan)
        return
    assert prod(part) * shard_size == plan.size and prod(part) > 0, (seed, plan)
    assert part == tuple(
        size // shard_size if dim == plan.dim else size for dim, size in enumerate(plan.shape)
    ), (seed, plan)  # fmt: skip
    assert not any(size % shard_size == 0 and size for size in plan.shape[: plan.dim]), (seed, plan)


def planned(shape, shard_size=2, threshold=0, level="level1", **fields):
    """The plan of one parameter."""
    plan = ParameterPlan(**{"path": "weight", "shape": shape, "dtype": "float32", "shard_dtype": "float32", **fields})
    (plan,) = plan_parameters([plan], shard_size, threshold, level)
    return plan


@pytest.mark.parametrize(("dtype", "length"), [("float32", 256), ("float16", 512), ("bfloat16", 512)])
def test_what_has_the_threshold_stays_whole_and_one_row_more_is_cut(dtype, length):
    at, above = planned((2, length // 2), threshold=1, dtype=dtype), planned((2, length // 2 + 1), 2, 1, dtype=dtype)
    assert (at.dim, at.nbytes, at.reason) == (None, 1024, "1 KB, not more than the threshold of 1 KB")
    assert (above.dim, above.reason) == (0, "")
    assert planned((2, 128), threshold=1 - 1e-9).dim == 0  # a threshold need not be whole


def test_the_threshold_counts_what_computes_not_the_master_copy():
    assert planned((512,), threshold=1, dtype="float16", shard_dtype="float32").dim is None
    assert planned((512,), threshold=1, dtype="float32", shard_dtype="float16").dim == 0


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_trained_is_cut_at_level_3_only(level):
    plan = planned((8, 8), level=level, trainable=False)
    assert plan.dim == (0 if level == "level3" else None)
    assert plan.reason == ("" if level == "level3" else f"not trained, and {level} cuts what comes of gradients")
