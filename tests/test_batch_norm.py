"""Batch norm of few passes against the same written out: values and gradients, in PyNative and under jit."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.nightly import daily

from mindformers_core.algorithms.batch_norm import apply_factors, train_norm

X, CHANNELS = np.random.default_rng(3).normal(5, 2, (4, 3, 5, 6)), np.random.default_rng(4).normal(size=(3, 3))

PRECISE, SHORT = (np.float64, 1e-12), (np.float32, 1e-5)
WAYS = [("pynative", *SHORT), ("jit", *PRECISE), ("pynative", *PRECISE), ("jit", *SHORT)]  # two of them by day


def written(x, scale, bias, mean, variance):
    scale, bias, mean, variance = (
        ops.reshape(each, (1, -1) + (1,) * (x.ndim - 2)) for each in (scale, bias, mean, variance)
    )
    return (x - mean) * ops.rsqrt(variance) * scale + bias


def trained(x, scale, bias):
    y, mean, variance = train_norm(x, scale, bias, 1e-5)
    return y * y * y, mean, variance


def trained_as_written(x, scale, bias):
    dims = (0, *range(2, x.ndim))
    mean = ops.mean(x, dims, keep_dims=True)
    variance = ops.mean(ops.square(x - mean), dims)
    mean = ops.reshape(mean, (-1,))
    y = written(x, scale, bias, mean, variance + 1e-5)
    return y * y * y, ops.stop_gradient(mean), ops.stop_gradient(variance)


def factors(x, factor, shift, center):
    return (apply_factors(x, factor, shift, center) ** 3,)


def factors_as_written(x, factor, shift, center):
    return (written(x, factor, shift, center, ops.ones_like(center)) ** 3,)


@pytest.mark.parametrize("shape", [(20, 3), (4, 3, 30), (4, 3, 5, 6)], ids=str)
@pytest.mark.parametrize(("wrap", "dtype", "tolerance"), daily(WAYS[:2], WAYS))
@pytest.mark.parametrize(
    ("own", "plain", "count"), [(trained, trained_as_written, 2), (factors, factors_as_written, 3)]
)
def test_values_and_gradients(shape, dtype, tolerance, wrap, own, plain, count):
    values = [each.astype(dtype) for each in (np.resize(X, shape), *CHANNELS[:count])]

    def results(function, dtype):
        given = [Tensor(each.astype(dtype)) for each in values]

        def loss(*given):
            found = function(*given)
            return ops.sum(found[0]), *found

        step = ms.value_and_grad(loss, tuple(range(len(given))), has_aux=True)
        (_, *found), gradients = (ms.jit(step) if wrap == "jit" else step)(*given)
        return [each.asnumpy() for each in (*found, *gradients)]

    for mine, expected in zip(results(own, dtype), results(plain, np.float64), strict=True):
        np.testing.assert_allclose(mine, expected, atol=tolerance * np.abs(expected).max())
