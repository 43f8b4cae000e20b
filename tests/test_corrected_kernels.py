"""Operators whose kernels on CPU are wrong for some values: NumPy's results and gradients, in all engines."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_core import shard, verify
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.tensor_parallel import distribute_tensor

LOWEST = np.float32(-np.inf)
RANDOM = np.random.default_rng(11)


def some(*shape, lowest=0.3):
    x = RANDOM.normal(size=shape).astype(np.float32)
    return np.where(RANDOM.random(shape) < lowest, LOWEST, x)


def with_rows(x, *rows):
    x[list(rows)] = LOWEST
    return x


def softmax(x, slope):
    e = np.exp(x - x.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    return y, y * (slope - (slope * y).sum(-1, keepdims=True))


def cumulative(step=1, exclusive=False):
    """Products one by one along the last dim, and their slopes by leaving one factor out."""

    def function(x, slope):
        x, slope = x[..., ::step], slope[..., ::step]
        products = [x[..., : end + (not exclusive)] for end in range(x.shape[-1])]
        slopes = np.zeros_like(x)
        for end, factors in enumerate(products):
            for place in range(factors.shape[-1]):
                slopes[..., place] += slope[..., end] * np.delete(factors, place, -1).prod(-1)
        return np.stack([factors.prod(-1) for factors in products], -1)[..., ::step], slopes[..., ::step]

    return function


def mish(x, slope):
    softplus = np.logaddexp(0, x)
    return x * np.tanh(softplus), slope * np.where(
        ~(x < 50), 1, np.tanh(softplus) + x / np.cosh(softplus) ** 2 / (1 + np.exp(-x))
    )


def shifted(shift, back, *dims):
    """An order of the elements, and the one that undoes it."""
    return lambda x, slope: (shift(x, *dims), back(slope, *dims))


FORTH, BACK = np.fft.fftshift, np.fft.ifftshift
ZEROS = np.where(RANDOM.random((4, 7)) < 0.2, 0, RANDOM.uniform(-2, 2, (4, 7))).astype(np.float32)
MASKED, CUBE, LATER = with_rows(some(4, 29), 1), with_rows(some(4, 3, 37), 0, 2), some(4, 16)
LATER[:, 0] = 0  # no row is -inf throughout
NOT_FINITE = np.float32([[np.inf, 1, 2], [np.nan, 1, 2], [1, 2, LOWEST], [3e38, -3e38, 0]])
ONE, FACTORS = np.float32([[3], [-1e9], [0], [1e30]]), RANDOM.uniform(0.5, 2, (4, 9)).astype(np.float32)
ROW = np.float32([-80, -20, -1, 0, 0.5, 19, 20, 21, 44, 45, 100, 1e30, np.inf, np.nan])
ODD = some(1, 5, 4, 7, lowest=0)
# arrays, and what is computed of each
CALLS = (
    (MASKED, softmax), (CUBE, softmax), (LATER, softmax), (NOT_FINITE, softmax), (ONE, softmax),
    (FACTORS, cumulative()), (ZEROS, cumulative()), (ZEROS, cumulative(-1)), (ZEROS, cumulative(1, True)),
    (ROW, mish), (ODD, shifted(FORTH, BACK)), (ODD, shifted(BACK, FORTH)), (ODD, shifted(FORTH, BACK, -1)),
    (ODD, shifted(BACK, FORTH, (1, 0))),
)  # fmt: skip


class Calls(nn.Cell):
    """MindSpore's operators, of all the arrays."""

    def construct(
        self,
        masked,
        cube,
        later,
        not_finite,
        one,
        factors,
        zeros,
        backwards,
        in_front,
        row,
        first,
        second,
        third,
        fourth,
    ):
        return (
            ops.softmax(masked, -1), ops.softmax(cube, 2), ops.softmax(later), ops.softmax(not_finite, 1),
            ops.softmax(one, -1), ops.cumprod(factors, 1), ops.cumprod(zeros, -1),
            ops.CumProd(False, True)(backwards, 1), ops.CumProd(True)(in_front, 1), ops.mish(row),
            ops.fftshift(first), ops.ifftshift(second), ops.fftshift(third, -1), ops.ifftshift(fourth, (1, 0)),
        )  # fmt: skip


def expected():
    """Results, gradients, and those of the results that they belong to."""
    slopes = [RANDOM.normal(size=x.shape).astype(np.float32) for x, _ in CALLS]
    with np.errstate(all="ignore"):
        pairs = [meaning(x.astype(np.float64), slope) for (x, meaning), slope in zip(CALLS, slopes)]
    return *zip(*pairs), slopes


def check(found, wanted):
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        one = one.asnumpy() if isinstance(one, Tensor) else one
        np.testing.assert_allclose(one, other, 1e-5, 1e-5, err_msg=f"call {number}")


@pytest.mark.usefixtures("one_rank")
def test_generated_code():
    """In PyNative, and compiled."""
    values, gradients, slopes = expected()
    net, arrays = shard(Calls(), init_device_mesh((1,), ("dp",))), [Tensor(x) for x, _ in CALLS]
    gradient = ops.GradOperation(get_all=True, sens_param=True)(net)

    @ms.jit
    def compiled(*given):
        return net(*given[: len(CALLS)]), gradient(*given[: len(CALLS)], given[len(CALLS) :])

    slopes = tuple(map(Tensor, slopes))
    for _ in range(2):  # some are right in the first call only
        for found in (net(*arrays), gradient(*arrays, slopes)), compiled(*arrays, *slopes):
            check(found[0], values)
            check(found[1], gradients)


@pytest.mark.usefixtures("one_rank")
def test_operator_by_operator():
    values, gradients, slopes = expected()
    mesh = init_device_mesh((1,), ("dp",))

    def forward(*arrays):
        results = Calls()(*(distribute_tensor(x, layout(*[None] * x.ndim), mesh) for x in arrays))
        return tuple(result.to_local() for result in results)

    arrays = [Tensor(x) for x, _ in CALLS]
    check(forward(*arrays), values)
    gradient = ops.GradOperation(get_all=True, sens_param=True)(forward)
    check(gradient(*arrays, tuple(map(Tensor, slopes))), gradients)


def test_the_truth_of_verify():
    values, _, _ = expected()
    mesh = DeviceMesh((2,), ("tp",))
    plan = {"": {"input": {name: layout("tp", None) for name in ("masked", "later", "zeros")}}}
    found = verify(lambda: shard(Calls(), mesh, plan=plan), mesh, *(Tensor(x) for x, _ in CALLS))
    check(next(iter(found.truth.outputs.values())), values)
    assert not found.faults, found.report()


class Hermitian(nn.Cell):
    def construct(self, x, y):
        return (
            ops.hfft(x), ops.hfft2(x, norm="ortho"), ops.hfftn(x, norm="forward"),
            ops.ihfft(y), ops.ihfft2(y, norm="ortho"), ops.ihfftn(y, norm="forward"),
        )  # fmt: skip


@pytest.mark.usefixtures("one_rank")
def test_transforms_of_hermitian_signals_are_right_in_every_call():
    y = RANDOM.normal(size=(3, 4, 6)).astype(np.float32)
    x = (y[..., :4] + 1j * RANDOM.normal(size=(3, 4, 4))).astype(np.complex64)
    back, forth, conj = (np.fft.irfft, np.fft.irfft2, np.fft.irfftn), (np.fft.rfft, np.fft.rfft2, np.fft.rfftn), np.conj
    norms = ("forward", "ortho", "backward")
    wanted = [f(conj(x), norm=norm) for f, norm in zip(back, norms)]
    wanted += [conj(f(y, norm=norm)) for f, norm in zip(forth, norms)]
    net = shard(Hermitian(), init_device_mesh((1,), ("dp",)))
    for _ in range(3):
        check([each.to_local() for each in net(Tensor(x), Tensor(y))], wanted)
