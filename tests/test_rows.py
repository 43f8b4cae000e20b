"""RMS norm and rotary embedding with gradients of their own: plain formulas and their gradients by MindSpore, as
computed on CPU and on devices, in PyNative and under jit."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_core.algorithms.rows import _Norm, _NormOfProducts, _Rotary, _RotaryOfProducts
from mindformers_core.models.positions import static_ranges
from mindformers_core.models.rotary import rotary_tables
from mindformers_core.tensor_parallel.attention import attention
from mindformers_core.tensor_parallel.layers import RMSNorm

RNG = np.random.default_rng(3)


def random_tensor(*shape):
    return Tensor(RNG.normal(size=shape).astype(np.float32))


def norm_by_hand(x, weight):
    return x * ops.rsqrt(ops.mean(ops.square(x), -1, keep_dims=True) + 1e-3) * weight


def rotated_by_hand(x, cosines, sines):
    first, second = ops.split(x, x.shape[-1] // 2, -1)
    return x * cosines + ops.concat((-second, first), -1) * sines


def tables(is_of_rows):
    return [ops.gather(each, Tensor([[1, 0, 5], [2, 3, 4]]), 0) if is_of_rows else each[:3]
            for each in rotary_tables(6, 8, 100.0)]  # fmt: skip


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("what", ["norm", "rotary", "rotary of rows"])
def test_values_and_gradients(what, jit, on_cpu):
    x, slopes = random_tensor(2, 3, 4, 8), random_tensor(2, 3, 4, 8)
    if what == "norm":
        norm = _NormOfProducts if on_cpu else _Norm
        cell, by_hand, others, places = norm(ms.float32, 1e-3), norm_by_hand, [random_tensor(8)], (0, 1)
    else:
        rotary = _RotaryOfProducts if on_cpu else _Rotary
        cell, by_hand, others, places = rotary(ms.float32), rotated_by_hand, tables("rows" in what), (0,)

    def both(function):
        def run(*args):
            return ops.sum(function(*args) * slopes)

        found = ms.value_and_grad(run, places)
        return (ms.jit(found) if jit else found)(x, *others)

    (value, gradients), (expected, wanted) = both(cell), both(by_hand)
    np.testing.assert_allclose(cell(x, *others).asnumpy(), by_hand(x, *others).asnumpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value.asnumpy(), expected.asnumpy(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(mine.asnumpy(), theirs.asnumpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_float64_is_computed_in_float64(on_cpu):
    """As `verify` asks, whose tolerance is below the rounding of float32."""
    x, weight, eps = RNG.normal(size=(2, 3, 4, 8)), RNG.normal(size=8), 2**-10  # a number of float32
    kinds = (_NormOfProducts, _RotaryOfProducts) if on_cpu else (_Norm, _Rotary)
    norm, rotary = kinds[0](ms.float64, eps), kinds[1](ms.float64)
    normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    found = ms.grad(lambda given: ops.sum(norm(Tensor(x), given)))(Tensor(weight))
    np.testing.assert_allclose(norm(Tensor(x), Tensor(weight)).asnumpy(), normed * weight, 1e-12)
    np.testing.assert_allclose(found.asnumpy(), normed.sum((0, 1, 2)), 1e-12)
    wide = [ops.cast(each, ms.float64) for each in tables(False)]
    by_hand = rotated_by_hand(Tensor(x), *wide).asnumpy()
    np.testing.assert_allclose(rotary(Tensor(x), *wide).asnumpy(), by_hand, 1e-12)


class Recomputed(nn.Cell):
    """Two norms and two calls of attention, each of which is one Cell with a `bprop`."""

    def __init__(self):
        super().__init__()
        self.norms = nn.CellList([RMSNorm(8), RMSNorm(8)])

    def construct(self, x, *ranges):
        for norm in self.norms:
            x = norm(x)
            x = x + attention(x * 2, x, ops.sin(x), *ranges, 1.0, (0,), (None, 0), True)[0]
        return x


def test_calls_of_a_compiled_cell_that_is_recomputed():
    """Where PyNative differentiates, each has its own tensors."""
    given, net = (random_tensor(1, 3, 2, 8), *static_ranges(3)), Recomputed()

    def loss(*given):
        return ops.sum(ops.sin(net(*given)))

    expected = ms.grad(loss, 0, net.trainable_params())(*given)
    net.recompute()
    found = ms.grad(ms.jit(loss), 0, net.trainable_params())(*given)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), 1e-4, 1e-5)
