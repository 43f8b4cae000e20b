"""The random numbers of dropout: uniform, without correlations, the same for every part, drawn anew at every call."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from support.nightly import daily

from mindformers_core.algorithms.draws import whole_context
from mindformers_core.algorithms.dropout import counters, dropout_with_mask, next_random_state
from mindformers_core.dtensor.interception import intercept_operators
from mindformers_core.mindspore_private import connect_generator

SIZE = 1024


def masks(shape, keep_probability, calls):
    """What stays in some calls, as normalised numbers of mean 0 and variance 1."""
    x, cut = Tensor(np.ones(shape, np.float32)), whole_context(shape)
    ms.manual_seed(5)
    stays = [dropout_with_mask(None, (x, keep_probability), cut)[1].asnumpy() for _ in range(calls)]
    return (np.array(stays) - keep_probability) / np.sqrt(keep_probability * (1 - keep_probability))


@pytest.mark.parametrize("keep_probability", daily([0.9], [0.9, 0.5, 0.1]))
def test_means_and_correlations_are_those_of_chance(keep_probability):
    """Every figure is normal with deviation 1 for independent draws; 5 is beyond chance for the few, 7 for the many."""
    first, second, _ = masks((SIZE, SIZE), keep_probability, 3)
    few = {
        "mean": first,
        "neighbours in a row": first[:, 1:] * first[:, :-1],
        "neighbours in a column": first[1:] * first[:-1],
        "calls": first * second,
        "corners of a square": first[1:, 1:] * first[1:, :-1] * first[:-1, 1:] * first[:-1, :-1],
        "shifted by one between calls": first[1:] * second[:-1],
    }
    for name, products in few.items():
        assert abs(products.sum()) / np.sqrt(products.size) < 5, name
    many = {"columns": first.T @ first, "rows": first @ first.T, "columns of two calls": first.T @ second}
    for name, sums in many.items():
        pairs = sums[np.triu_indices(SIZE, 1)] / np.sqrt(SIZE)
        assert abs(pairs).max() < 7 and abs(pairs.std() - 1) < 0.01, name


def test_means_vary_as_by_chance():
    """Over calls, rows, columns and blocks: variances within five deviations."""
    (first,) = masks((SIZE, SIZE), 0.9, 1)
    calls = masks((32, 32), 0.9, 100)
    blocks = first.reshape(32, SIZE // 32, 32, SIZE // 32).sum((1, 3)).ravel()
    for means in (first.sum(0), first.sum(1), blocks, calls.sum((1, 2))):
        assert abs(means.mean()) < 5 * np.sqrt(SIZE / means.size)
        assert abs(means.var() / SIZE - 1) < 5 * np.sqrt(2 / means.size)


def test_values_are_exact():
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    kept, stays = dropout_with_mask(None, (Tensor(x), 0.75), whole_context(x.shape))
    np.testing.assert_allclose(kept.asnumpy(), np.where(stays.asnumpy(), x / np.float32(0.75), 0), 1e-6)
    for probability in (1.0, 0.0):
        kept, stays = dropout_with_mask(None, (Tensor(x), probability), whole_context(x.shape))
        np.testing.assert_array_equal(kept.asnumpy(), x * probability)
        assert probability == 0.0 or stays.asnumpy().all()


@pytest.mark.parametrize("shape", [(), (6,), (4, 6), (2, 4, 6), (2, 3, 4, 6), (6, 1), (1, 4)])
def test_counters_of_a_part_are_those_of_the_whole(shape):
    """And all rows and columns together have different ones."""
    rows, columns = counters(shape, [slice(0, size) for size in shape])
    assert rows.size * columns.size == np.prod(shape, dtype=int)
    assert len({*rows.ravel(), *columns}) == rows.size + columns.size
    whole = (rows + columns).reshape(shape)
    part = [slice(size // 2, size) for size in shape]
    rows, columns = counters(shape, part)
    np.testing.assert_array_equal((rows + columns).ravel(), whole[tuple(part)].ravel())


def draw():
    return next_random_state()


def test_graphs_and_pynative_draw_from_one_generator():
    intercept_operators()
    compiled = ms.jit(draw)
    for seed in (5, 6):
        ms.manual_seed(seed)
        states = [tuple(int(part) for part in step()) for step in (draw, compiled, compiled, draw)]
        assert states == [(seed, 0), (seed, 12), (seed, 24), (seed, 36)]
        state = ms.get_rng_state()
        ahead = [tuple(int(part) for part in compiled()) for _ in range(2)]
        ms.set_rng_state(state)
        assert [tuple(int(part) for part in compiled()) for _ in range(2)] == ahead


def test_connecting_keeps_the_state():
    generator = ms.Generator()
    generator.manual_seed(9)
    generator._step(Tensor(12, ms.int64))
    state = generator.get_state().asnumpy()
    connect_generator(generator)
    np.testing.assert_array_equal(generator.get_state().asnumpy(), state)
