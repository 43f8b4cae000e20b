"""Buckets: what is communicated together, by thousands of drawn cases; and what `comm_fusion` can't be."""

import random

import pytest
from support.nightly import seeds

from mindformers_core.zero.buckets import KINDS, Fusion, make_buckets, parse_comm_fusion
from mindformers_core.zero.plan import ParameterPlan

MB = 2**20


def plan_of(number, size, dtype="float32", unit=""):
    return ParameterPlan(f"weight{number}", (size,), dtype, dtype, True, unit)


def buckets_of(plans, members, fusion, kind="allgather"):
    return make_buckets(kind, plans, members, fusion, lambda plan: plan.dtype)


def drawn(seed):
    """`(plans, members, fusion)` of a seed: some of the parameters, in the order of a forward or backward pass."""
    draw = random.Random(seed)
    units = ["", "a", "b", "c"][: draw.randrange(1, 5)]
    plans = [
        plan_of(number, draw.randrange(1, 3 * MB // 8), draw.choice(["float32", "float32", "float16"]), units[place])
        for number, place in enumerate(sorted(draw.randrange(len(units)) for _ in range(draw.randrange(24))))
    ]
    members = [number for number in range(len(plans)) if draw.random() < 0.8]
    if draw.random() < 0.5:
        members.reverse()
    places = sorted(draw.sample(range(1, 30), draw.randrange(4)))
    fusion = draw.choice([Fusion(), Fusion(0), Fusion(draw.uniform(0.1, 4)), Fusion(None, tuple(places))])
    return plans, members, fusion


@pytest.mark.parametrize("first", seeds(1000, 4000, 1000))
def test_drawn_buckets(first):
    shared = 0
    for seed in range(first, first + 1000):
        plans, members, fusion = drawn(seed)
        buckets = buckets_of(plans, members, fusion)
        placed = [number for bucket in buckets for number in bucket.members]
        assert sorted(placed) == sorted(members), seed  # every one once
        order = {number: place for place, number in enumerate(members)}
        for bucket in buckets:
            check_bucket(bucket, plans, order, fusion, seed)
            shared += len(bucket.members) > 1
        last = [order[bucket.members[-1]] for bucket in buckets]
        assert last == sorted(last), seed  # in the order in which they are complete
        check_that_full_ones_only_are_closed(buckets, plans, fusion, order, seed)
    assert shared > 500


def check_bucket(bucket, plans, order, fusion, seed):
    """A bucket is of one unit and dtype, in order, ends as soon as it is full, and at the places that were given."""
    held = [plans[number] for number in bucket.members]
    assert {(plan.unit, plan.dtype) for plan in held} == {(bucket.unit, bucket.dtype)}, seed
    assert bucket.size == sum(plan.size for plan in held) and bucket.kind == "allgather", seed
    assert sorted(bucket.members, key=order.get) == list(bucket.members), seed
    if fusion.megabytes is None:
        low, high = min(bucket.members), max(bucket.members)
        assert not any(low < place <= high for place in fusion.places), seed
    else:
        before_last = sum(plan.nbytes for plan in held[:-1])
        assert len(held) == 1 or before_last < fusion.megabytes * MB, seed


def check_that_full_ones_only_are_closed(buckets, plans, fusion, order, seed):
    """Of each unit, dtype and place all buckets but the last one are full."""
    groups = {}
    for bucket in buckets:
        part = sum(bucket.members[0] >= place for place in fusion.places)
        groups.setdefault((bucket.unit, bucket.dtype, part), []).append(bucket)
    for group in groups.values():
        *closed, _ = sorted(group, key=lambda bucket: order[bucket.members[0]])
        assert fusion.megabytes is not None or not closed, seed
        for bucket in closed:
            assert sum(plans[number].nbytes for number in bucket.members) >= fusion.megabytes * MB, seed


def members_of(buckets):
    return [bucket.members for bucket in buckets]


def test_a_bucket_is_full_at_its_bytes():
    quarter = [plan_of(number, MB // 16) for number in range(6)]  # 256 KB each
    assert members_of(buckets_of(quarter, range(6), Fusion(0.5))) == [(0, 1), (2, 3), (4, 5)]
    assert members_of(buckets_of(quarter, range(6), Fusion(0.5 + 1e-6))) == [(0, 1, 2), (3, 4, 5)]
    assert members_of(buckets_of(quarter, range(6), Fusion(0))) == [(number,) for number in range(6)]
    assert members_of(buckets_of(quarter, range(6), Fusion())) == [tuple(range(6))]
    halves = [plan_of(number, MB // 16, "float16") for number in range(6)]
    assert members_of(buckets_of(halves, range(6), Fusion(0.5))) == [(0, 1, 2, 3), (4, 5)]


def test_buckets_end_before_the_parameters_with_these_numbers():
    plans = [plan_of(number, 8) for number in range(6)]
    fusion = Fusion(None, (2, 5))
    assert members_of(buckets_of(plans, range(6), fusion)) == [(0, 1), (2, 3, 4), (5,)]
    assert members_of(buckets_of(plans, range(5, -1, -1), fusion)) == [(5,), (4, 3, 2), (1, 0)]
    assert members_of(buckets_of(plans, [0, 3, 5], fusion)) == [(0,), (3,), (5,)]  # counted with those left out
    assert members_of(buckets_of(plans, range(6), Fusion(None, (100,)))) == [tuple(range(6))]


def test_another_dtype_has_a_bucket_beside_and_units_have_their_own():
    plans = [plan_of(0, 8), plan_of(1, 8, "float16"), plan_of(2, 8), plan_of(3, 8, "float16", "b"), plan_of(4, 8)]
    buckets = buckets_of(plans, range(5), Fusion())
    assert members_of(buckets) == [(1,), (3,), (0, 2, 4)]
    assert [(bucket.unit, bucket.dtype) for bucket in buckets] == [("", "float16"), ("b", "float16"), ("", "float32")]


@pytest.mark.parametrize(
    ("given", "fusion"),
    [
        ("auto", Fusion(64)),
        (0, Fusion(0)),
        (2.5, Fusion(2.5)),
        ({"mode": "auto"}, Fusion(64)),
        ({"mode": "auto", "config": None}, Fusion(64)),
        ({"mode": "size", "config": 32}, Fusion(32)),
        ({"mode": "index", "config": [20, 35]}, Fusion(None, (20, 35))),
        ({"mode": "index", "config": ()}, Fusion(None, ())),
    ],
)
def test_comm_fusion_for_all_kinds(given, fusion):
    assert parse_comm_fusion(given) == dict.fromkeys(KINDS, fusion)
    for kind in KINDS:
        others = dict.fromkeys(KINDS, Fusion(64))
        assert parse_comm_fusion({kind: given}) == {**others, kind: fusion}


def test_comm_fusion_as_mindspore_takes_it():
    given = {
        "allreduce": {"mode": "size", "config": 32},
        "allgather": {"mode": "index", "config": [3]},
        "reducescatter": {"mode": "auto", "config": None},
    }
    assert parse_comm_fusion(given) == {
        "allreduce": Fusion(32), "allgather": Fusion(None, (3,)), "reducescatter": Fusion(64),
    }  # fmt: skip
