"""Reshapes: the factors that two shapes have in common, and which shards may stay where they are."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import LocalCall, OperatorCall, resolve, signature_of, tensor_meta
from mindformers_core.operators.rules.shape import common_factors
from mindformers_core.redistribution import CPU

MESH = init_device_mesh((2, 2), ("a", "b"))


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((4, 8), (32,), [[(4,), (8,)], [(4, 8)]]),
        ((32,), (4, 8), [[(4, 8)], [(4,), (8,)]]),
        ((2, 3, 4), (2, 12), [[(2,), (3,), (4,)], [(2,), (3, 4)]]),
        ((6, 4), (4, 6), [[(2, 3), (4,)], [(2, 2), (6,)]]),
        ((4, 1, 6), (1, 4, 2, 3), [[(4,), (), (2, 3)], [(), (4,), (2,), (3,)]]),
        ((3, 5, 2), (5, 3, 2), [[(3,), (5,), (2,)], [(5,), (3,), (2,)]]),
    ],
)
def test_common_factors(source, target, expected):
    first, second, sizes, whole = common_factors(source, target)
    assert [[tuple(sizes[factor] for factor in factors) for factors in dims] for dims in (first, second)] == expected
    inside = [{factor for factors in dims for factor in factors} for dims in (first, second)]
    assert inside[0] ^ inside[1] == whole, "a factor of one side only is whole"


def test_random_reshapes_move_shards_only_where_their_elements_stay():
    """Any two factorisations of one number: each common factor, cut in two, cuts both arrays into the same elements."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        primes = list(rng.choice([1, 2, 2, 3, 5], rng.integers(1, 7)))
        source, target = (shape_at_random(rng.permutation(primes), rng) for _ in "xy")
        first, second, sizes, whole = common_factors(source, target)
        numbers = np.arange(math.prod(source))
        wide = [numbers.reshape([sizes[factor] for factors in dims for factor in factors]) for dims in (first, second)]
        order = [[factor for factors in dims for factor in factors] for dims in (first, second)]
        for factor in set(order[0]) - whole:
            halves = [np.take(array, 0, names.index(factor)) for array, names in zip(wide, order)]
            assert set(halves[0].ravel()) == set(halves[1].ravel()), (source, target, factor)


def shape_at_random(primes, rng):
    cuts = np.sort(rng.integers(0, len(primes) + 1, rng.integers(0, 4)))
    return tuple(math.prod(map(int, part)) for part in np.split(primes, cuts))


@pytest.mark.parametrize(
    "name, args", [("Reshape", ((2, 16),)), ("SumExt", ((0,), True)), ("ConstantPadND", ((1, 1),))]
)
def test_equal_calls_have_equal_mappings(name, args):
    """Their local calls are functions and tensors of their own, and don't count."""
    once, again, other = (
        signature_of(name, [tensor_meta(shape, "float32"), *args]) for shape in ((4, 8), (4, 8), (8, 4))
    )
    assert once == again and once is not again and hash(once) == hash(again) and not once.differences(again)
    assert once != other and "sizes" in once.differences(other)
    assert once != replace(once, moves_only=not once.moves_only) and once == replace(once, local=LocalCall((1,)))


def test_a_dim_that_is_cut_to_size_1_is_not_squeezed():
    layout = Layout.on(MESH, (("a", "b"), (), ()))
    x = tensor_meta((4, 1, 8), "float32", layout)
    signature = signature_of("Squeeze", [x])
    resolution = resolve(OperatorCall("Squeeze", signature, (x,), MESH, CPU))
    assert resolution.outputs == (Layout.on(MESH, (("a", "b"), ())),)
    assert signature.local.localize([x], [(1, 8)]) == (x, (1,))
