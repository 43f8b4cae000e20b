"""Random draws: the numbers of each distribution, and the same ones on any mesh, in any mode, seeded or not."""

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from support.nightly import daily
from support.small_cells import cell_of

from mindformers_core import verify
from mindformers_core.algorithms.dropout import draws_of, next_draw
from mindformers_core.dtensor.interception import draws_by_position
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.tensor_parallel import jit, shard

SHAPE = (8, 8)
ZERO, TWO = (Tensor(value, ms.float32) for value in (0.0, 2.0))
LOW, HIGH = (Tensor(value, ms.int32) for value in (-3, 4))
DRAWS = {  # functions of the tensor whose shape is drawn: without a tensor
    "ops.standard_normal": lambda x: ops.standard_normal(x.shape),
    "ops.rand": lambda x: ops.rand(*x.shape),
    "ops.randn": lambda x: ops.randn(*x.shape),
    "ops.randint": lambda x: ops.randint(-3, 4, x.shape),
    "ops.uniform": lambda x: ops.uniform(x.shape, ZERO, TWO),
    "ops.uniform of integers": lambda x: ops.uniform(x.shape, LOW, HIGH, dtype=ms.int32),
    "ops.normal": lambda x: ops.normal(x.shape, TWO, TWO),
    "ops.laplace": lambda x: ops.laplace(x.shape, TWO, TWO),
    "ops.randperm": lambda x: ops.randperm(x.shape[-1]),
    "ops.gamma": lambda x: ops.gamma(x.shape, ops.exp(x[0]), ops.exp(x[0])),
    "ops.random_gamma": lambda x: ops.random_gamma(Tensor(x.shape), Tensor([0.5, 3.0])).mean(-1),
    "ops.poisson": lambda x: ops.poisson(x.shape, ops.exp(x[0])),
    "ops.random_poisson": lambda x: ops.random_poisson(Tensor(x.shape), Tensor(3.0)),
    "ops.TruncatedNormal": lambda x: ops.TruncatedNormal()(Tensor(x.shape)),
    "mint.rand": lambda x: mint.rand(*x.shape),
    "mint.randn": lambda x: mint.randn(x.shape),
    "mint.randn, float16": lambda x: mint.randn(x.shape, dtype=ms.float16),
    "mint.randint": lambda x: mint.randint(-3, 4, x.shape),
    "mint.normal": lambda x: mint.normal(2.0, 2.0, x.shape),
    "mint.randperm": lambda x: mint.randperm(x.shape[-1]),
    # of plain tensors, and into them
    "like a plain one": lambda x: mint.rand_like(mint.zeros(x.shape)),
    "dropout of a plain one": lambda x: ops.dropout(mint.ones(x.shape), 0.25),
    "mint's dropout of a plain one": lambda x: mint.nn.functional.dropout(mint.ones(x.shape), 0.25, True),
    "normal_": lambda x: mint.empty(x.shape).normal_(1.0, 2.0),
    "uniform_": lambda x: mint.empty(x.shape).uniform_(1.0, 2.0),
    "random_": lambda x: mint.empty(x.shape).random_(0, 5),
    "exponential_": lambda x: mint.empty(x.shape).exponential_(2.0),
}
LIKE = {  # of a tensor
    "ops.rand_like": lambda x: ops.rand_like(x),
    "ops.bernoulli": lambda x: ops.bernoulli(x, 0.25),
    "ops.dropout2d": lambda x: ops.dropout2d(x.reshape(*x.shape, 1, 1), 0.25).reshape(x.shape),
    "ops.dropout3d": lambda x: ops.dropout3d(x.reshape(*x.shape, 1, 1, 1), 0.25).reshape(x.shape),
    "ops.shuffle": lambda x: ops.shuffle(x),
    "ops.choice_with_mask": lambda x: ops.choice_with_mask(ops.greater(x, 0), 8)[0].sum(-1),
    "ops.multinomial_with_replacement": lambda x: ops.multinomial_with_replacement(ops.sigmoid(x), 3, 4, 8, True),
    "Tensor.log_normal": lambda x: x.log_normal(),
    "Tensor.uniform": lambda x: x.uniform(-1.0, 2.0),
    "mint.rand_like": lambda x: mint.rand_like(x),
    "mint.randn_like": lambda x: mint.randn_like(x),
    "mint.randint_like": lambda x: mint.randint_like(x, -3, 4),
    "mint.normal": lambda x: mint.normal(x, 2.0),
    "mint.bernoulli": lambda x: mint.bernoulli(ops.sigmoid(x)),
    "mint.multinomial": lambda x: ops.tile(mint.multinomial(ops.sigmoid(x), 2, False), (1, 4)),
    "mint.multinomial, replaced": lambda x: mint.multinomial(ops.sigmoid(x), 8, True),
    "ops.random_categorical": lambda x: ops.random_categorical(x, 8),
    "mint.dropout2d": lambda x: mint.nn.functional.dropout2d(x.reshape(*x.shape, 1, 1), 0.25, True).reshape(x.shape),
}
EVERY = [*DRAWS.items(), *LIKE.items()]
TOGETHER = 15  # every fifteenth draw in one Cell
MESHES = [((1,), ("dp",)), ((2,), ("dp",)), ((4,), ("dp",)), ((2, 2), ("dp", "tp"))]


class Noisy(nn.Cell):
    """Several draws, one after the other, each of them twice."""

    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        self.weight = ms.Parameter(Tensor(np.full(SHAPE, 0.25, np.float32)), name="weight")

    def construct(self, x):
        hidden = ops.matmul(x, self.weight)
        return [hidden * ops.cast(draw(hidden), ms.float32) + draw(hidden) for draw in self.draws]


def array():
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def cut(mesh):
    """A plan that cuts the input over all axes."""
    return {"": {"input": {"x": Layout.on(mesh, [(axis,) for axis in mesh.axis_names] + [()] * (2 - mesh.ndim))}}}


@pytest.mark.parametrize("first", daily([1], range(TOGETHER)))
@pytest.mark.parametrize("place", daily([3], [1, 3]))
def test_all_ranks_draw_their_parts_of_the_same_numbers(first, place):
    mesh, draws = DeviceMesh(*MESHES[place]), [draw for _, draw in EVERY[first::TOGETHER]]
    check = verify(Noisy(draws), mesh, Tensor(array()), plan=cut(mesh))
    assert not check.faults, check.report()
    assert check.compared > 20 * len(draws)


@pytest.mark.parametrize(("name", "draw"), EVERY, ids=[f"{place}.{name}" for place, (name, _) in enumerate(EVERY)])
def test_blocks_of_a_batch_draw_their_rows(name, draw):
    """Those of the whole batch; what has no rows, an order, is the same for all blocks."""
    ms.manual_seed(5)
    drawn = []
    with draws_by_position():
        for block, rows in ((0, 8), (0, 4), (1, 4)):
            with draws_of(block, 24):
                drawn.append(draw(Tensor(np.tile(array()[0], (rows, 1)))).asnumpy())
            assert next_draw() > 24  # without the block
    whole, *parts = drawn
    if "perm" in name or "shuffle" in name:
        np.testing.assert_array_equal(*parts)
    else:
        assert (parts[0] != parts[1]).any()
    if name != "ops.choice_with_mask":  # of all rows together
        np.testing.assert_array_equal(parts[1] if "perm" in name else np.concatenate(parts), whole)


def numbers(draws, mode, seeded):
    """Two calls of draws on a mesh of one rank."""
    mesh = init_device_mesh((1,), ("dp",))
    net = shard(Noisy(draws), mesh, plan=cut(mesh), mode="eager" if mode == "eager" else "generated")
    call = jit(net) if mode == "jit" else net
    ms.manual_seed(5 if seeded else 0)  # 0: as it is at the start
    results = [result for _ in range(2) for result in call(Tensor(array()))]
    return [(result.full_tensor() if hasattr(result, "full_tensor") else result).asnumpy() for result in results]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("first", daily([0], range(TOGETHER)))
def test_all_modes_draw_the_same_numbers(first):
    names, draws = zip(*EVERY[first::TOGETHER])
    expected, others = (numbers(draws, "generated", seeded) for seeded in (True, False))
    for place, name in enumerate(names):
        assert np.abs(expected[place] - expected[place + len(names)]).max() > 0, name
        assert np.abs(expected[place] - others[place]).max() > 0, name
    for mode in ("eager", "jit"):
        for name, found, wanted in zip(names * 2, numbers(draws, mode, True), expected, strict=True):
            np.testing.assert_allclose(found, wanted, 1e-5, 1e-5, err_msg=f"{name}, {mode}")


LARGE = (256, 128)
COUNT = 256 * 128
FEW = 2 / math.sqrt(3)  # the third moment of a truth value of probability 1/4
UNIFORM = (math.sqrt(1 / 12), 0.0, 1.8)
# draws of a tensor's shape; mean, deviation, third and fourth moment about the mean, of which the deviation is 1
MOMENTS = {
    "normal": (lambda x: ops.standard_normal(x.shape), 0.0, 1.0, 0.0, 3.0),
    "normal like": (lambda x: mint.randn_like(x), 0.0, 1.0, 0.0, 3.0),
    "normal of a mean": (lambda x: mint.normal(1.0, 2.0, x.shape), 1.0, 2.0, 0.0, 3.0),
    "normal of means": (lambda x: mint.normal(x, 2.0), 1.0, 2.0, 0.0, 3.0),
    "normal of ops": (lambda x: ops.normal(x.shape, TWO, TWO), 2.0, 2.0, 0.0, 3.0),
    "normal, float16": (lambda x: mint.randn(x.shape, dtype=ms.float16), 0.0, 1.0, 0.0, 3.0),
    "uniform": (lambda x: mint.rand(x.shape), 0.5, *UNIFORM),
    "uniform like": (lambda x: mint.rand_like(x), 0.5, *UNIFORM),
    "uniform, float16": (lambda x: mint.rand(x.shape, dtype=ms.float16), 0.5, *UNIFORM),
    "uniform of ops": (lambda x: ops.uniform(x.shape, ZERO, TWO) / 2, 0.5, *UNIFORM),
    "log normal": (lambda x: ops.log(x.log_normal(1.0, 2.0)), 1.0, 2.0, 0.0, 3.0),
    "truncated normal": (lambda x: ops.TruncatedNormal()(Tensor(x.shape)), 0.0, 0.87962566, 0.0, 2.36513),
    "laplace": (lambda x: ops.laplace(x.shape, ZERO, TWO), 0.0, 2 * math.sqrt(2), 0.0, 6.0),
    "integers": (lambda x: mint.randint(-3, 4, x.shape), 0.0, 2.0, 0.0, 1.75),
    "integers like": (lambda x: mint.randint_like(x, -3, 4), 0.0, 2.0, 0.0, 1.75),
    "integers of ops": (lambda x: ops.randint(-3, 4, x.shape), 0.0, 2.0, 0.0, 1.75),
    "uniform integers": (lambda x: ops.uniform(x.shape, LOW, HIGH, dtype=ms.int32), 0.0, 2.0, 0.0, 1.75),
    "normal_": (lambda x: mint.empty(x.shape).normal_(1.0, 2.0), 1.0, 2.0, 0.0, 3.0),
    "uniform_": (lambda x: mint.empty(x.shape).uniform_(-1.0, 1.0) / 2, 0.0, *UNIFORM),
    "random_": (lambda x: mint.empty(x.shape).random_(-3, 4), 0.0, 2.0, 0.0, 1.75),
    "exponential_": (lambda x: mint.empty(x.shape).exponential_(2.0), 0.5, 0.5, 2.0, 9.0),
    "bernoulli": (lambda x: ops.bernoulli(x, 0.25), 0.25, math.sqrt(3) / 4, FEW, 7 / 3),
    "bernoulli of mint": (lambda x: mint.bernoulli(x / 4), 0.25, math.sqrt(3) / 4, FEW, 7 / 3),
    "dropout": (lambda x: ops.dropout(x, 0.25), 1.0, math.sqrt(1 / 3), -FEW, 7 / 3),
    "dropout2d": (lambda x: ops.dropout2d(x[..., None, None], 0.25)[..., 0, 0], 1.0, math.sqrt(1 / 3), -FEW, 7 / 3),
    "dropout3d": (
        lambda x: ops.dropout3d(x[..., None, None, None], 0.25)[..., 0, 0, 0], 1.0, math.sqrt(1 / 3), -FEW, 7 / 3,
    ),
    # of heavy tails: the share below 1, three quarters, is told
    "cauchy": (
        lambda x: ops.less(ops.Cauchy(list(LARGE), 0.0, 1.0)(), 1.0).astype(ms.float32) * x,
        0.75, math.sqrt(3) / 4, -FEW, 7 / 3,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_those_of_the_distribution(name):
    """Within 5 deviations of each figure; no element has the numbers of a neighbour."""
    draw, mean, deviation, skewness, kurtosis = MOMENTS[name]
    ms.manual_seed(3)
    net = shard(cell_of(lambda self, x: draw(x)), init_device_mesh((1,), ("dp",)))
    values = net(Tensor(np.ones(LARGE, np.float32))).full_tensor().astype(ms.float32).asnumpy().astype(np.float64)
    values = (values - mean) / deviation
    limit = 5 / math.sqrt(COUNT)
    assert abs(values.mean()) < limit
    assert abs(values.var() - 1) < limit * math.sqrt(kurtosis - 1) + 1e-3
    spreads = {"laplace": (90, 2484), "exponential_": (261, 14752)}.get(name, (15, 96))
    assert abs((values**3).mean() - skewness) < limit * math.sqrt(spreads[0])
    assert abs((values**4).mean() - kurtosis) < limit * math.sqrt(spreads[1])
    for products in (values[1:] * values[:-1], values[:, 1:] * values[:, :-1], values[::2, ::2] * values[1::2, 1::2]):
        assert abs(products.mean()) < 5 / math.sqrt(products.size)


@pytest.mark.parametrize("parameter", [0.3, 1.0, 4.0, 300.0])
def test_gamma_and_poisson(parameter):
    """Their means, variances, and frequencies of single counts, within 5 deviations of each figure."""
    ms.manual_seed(3)
    with draws_by_position():
        gamma, counts = (
            draw.asnumpy().astype(np.float64)
            for draw in (
                ops.gamma(LARGE, Tensor([parameter], ms.float32), Tensor(1.0)),
                ops.poisson(LARGE, Tensor([parameter], ms.float32)),
            )
        )
    for values, kurtosis in ((gamma, 3 + 6 / parameter), (counts, 3 + 1 / parameter)):
        deviations = (values - parameter) / math.sqrt(parameter)
        assert abs(deviations.mean()) < 5 / math.sqrt(COUNT)
        assert abs((deviations**2).mean() - 1) < 5 * math.sqrt((kurtosis - 1) / COUNT)
    assert gamma.min() > 0 and counts.min() >= 0
    for count in range(int(max(parameter - 6, 0)), int(parameter) + 9):
        share = math.exp(count * math.log(parameter) - parameter - math.lgamma(count + 1))
        assert abs((counts == count).mean() - share) < 5 * math.sqrt(share / COUNT) + 1e-9


@pytest.mark.usefixtures("one_rank")
def test_classes_are_drawn_by_their_weights():
    """Frequencies within five deviations; without replacement no class twice, and none without weight."""

    class Draws(nn.Cell):
        def construct(self, x):
            return mint.multinomial(x, 1000, True), mint.multinomial(x, 3, False)

    mesh = init_device_mesh((1,), ("dp",))
    weights = np.tile(np.float32([1, 0, 2, 5]), (64, 1))
    many, few = (part.asnumpy() for part in shard(Draws(), mesh)(Tensor(weights)))
    assert many.shape == (64, 1000) and few.shape == (64, 3)
    shares = np.bincount(many.ravel(), minlength=4) / many.size
    expected = weights[0] / 8
    assert (np.abs(shares - expected) <= 5 * np.sqrt(expected * (1 - expected) / many.size)).all()
    np.testing.assert_array_equal(np.sort(few, 1), np.tile([0, 2, 3], (64, 1)))
    assert 0.4 < (few[:, 0] == 3).mean() < 0.85


def test_ranges():
    """Fractions are below 1, in every dtype; integers reach both ends; a permutation has every number once."""
    with draws_by_position():
        for dtype in (ms.float32, ms.float16, ms.bfloat16, ms.float64):
            fractions = mint.rand(LARGE, dtype=dtype)
            assert fractions.dtype == dtype
            fractions = fractions.astype(ms.float32).asnumpy()
            assert fractions.min() >= 0 and 0.99 < fractions.max() < 1
        integers = mint.randint(-3, 4, LARGE).asnumpy()
        assert integers.dtype == np.int64 and sorted(set(integers.ravel())) == list(range(-3, 4))
        wide = mint.randint(0, 2**31, LARGE).asnumpy()
        assert wide.min() >= 0 and wide.max() > 2**31 - 2**20
        first, second = (mint.randperm(1000).asnumpy() for _ in range(2))
    assert sorted(first) == list(range(1000)) and (first != second).mean() > 0.9
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 5 / math.sqrt(1000)


def test_too_many_integers():
    with draws_by_position(), pytest.raises(ValueError, match="integers from 0 to below 4294967296 can't be drawn"):
        mint.randint(0, 2**32, (2, 2))
