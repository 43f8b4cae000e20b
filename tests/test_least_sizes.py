"""The least sizes that keep how tensors are cut."""

import random

import pytest

from mindformers_core.verification.sizes import divisors_of, least_sizes, parts_of_products


@pytest.mark.parametrize("seed", range(20))
def test_least_sizes(seed):
    draw = random.Random(seed)
    counts = [draw.choice(((1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (8, 2), (12, 3))) for _ in range(3)]
    sizes = {draw.choice((8, 12, 64)) * draw.randint(1, 300) for _ in range(6)} | {3, 4}
    divisors = divisors_of(counts)
    parts = {size: draw.choice([pair for pair in (*divisors, (1, 1)) if size % pair[0] == 0]) for size in sizes}
    large = max(sizes)
    small = least_sizes(sizes, parts, divisors, draw.choice((0, 0.1)), lambda found: found[large] >= large / 5)
    assert small.keys() == sizes and len({*small.values()}) == len(sizes) and small[3] == 3
    assert large / 5 <= small[large] <= max(large / 3, 200)
    for size, (many, few) in parts.items():
        assert small[size] % few == 0 and (small[size] > few or size == many) and small[size] <= size
        assert small[size] == size or all(small[size] % d for many, d in divisors if size % many and few % d)


def test_parts_of_a_product_are_parts_of_its_factors():
    """Of 8 heads of 128 that tensor parallel cuts into 8, and ZeRO what remains into 8: on half of the ranks, too."""
    parts = {8: (8, 4), 1024: (64, 32)}
    found = parts_of_products({8, 32, 128}, parts)
    assert found == parts | {32: (1, 1), 128: (8, 8)}
    assert least_sizes({8, 128}, found, divisors_of([(8, 8), (8, 4)]), 0, lambda found: True) == {8: 4, 128: 16}


def test_halves_keep_several_elements():
    """Also where four, as a number of ranks that doesn't divide the size, mustn't divide the small one."""
    assert least_sizes({64}, {}, divisors_of([(64, 2), (2, 2)]), 0, lambda found: True) == {64: 6}


def test_a_part_of_one_element_stays_one():
    sizes, divisors = {8, 64, 8192}, divisors_of([(1, 1), (16, 2), (8, 4)])
    small = least_sizes(sizes, {8: (8, 4), 64: (8, 4), 8192: (128, 8)}, divisors, 0, lambda found: True)
    assert small == {8: 4, 64: 12, 8192: 16}  # 2 and 8 don't divide what 16 and 128 don't, but for the 4 parts
