"""The least sizes that keep how tensors are cut."""

import random

import pytest

from mindformers_core.verification.sizes import alike_sizes, divisors_of, least_sizes


@pytest.mark.parametrize("seed", range(20))
def test_least_sizes(seed):
    draw = random.Random(seed)
    counts = [draw.choice((1, 2, 3, 4, 8)) for _ in range(3)]
    sizes = {draw.choice((8, 12, 64)) * draw.randint(1, 300) for _ in range(6)} | {3, 4}
    divisors = divisors_of(counts)
    parts = {size: draw.choice([d for d in (*divisors, 1) if size % d == 0]) for size in sizes}
    large = max(sizes)
    small = least_sizes(sizes, parts, divisors, draw.choice((0, 0.1)), lambda found: found[large] >= large / 5)
    assert small.keys() == sizes and len({*small.values()}) == len(sizes) and small[3] == 3
    assert large / 5 <= small[large] <= max(large / 3, 200)
    for size, count in parts.items():
        assert small[size] % count == 0 and (small[size] > count or size == count) and small[size] <= size
        assert all(small[size] % divisor for divisor in divisors if size % divisor)


def test_fewer_ranks_divide_the_same_sizes():
    found = alike_sizes({16384, 128, 8, 128256, 53249}, [(1, 1), (64, 2), (8, 8)])
    assert found == {16384: 16384, 128256: 128264, 53249: 53249}  # 64 x 8 don't divide 128256; 8 and 128 are factors
