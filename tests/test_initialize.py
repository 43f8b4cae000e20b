"""Initial values: slices of the whole, statistics, and parameters that stay the same objects."""

import random
import tracemalloc

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.common import initializer as init
from support.small_cells import cell_of

from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.initialize import _uniforms, draw_slice, initializers, materialize

DRAWN = [
    init.Normal(0.02, 1.0),
    init.TruncatedNormal(0.5, 0.1, -0.6, 0.7),
    init.Uniform(0.3),
    init.XavierNormal(1.5),
    init.XavierUniform(2),
    init.HeNormal(),
    init.HeUniform(5**0.5),
    init.HeUniform(mode="fan_out", nonlinearity="relu"),
]
CONSTANT = [init.Zero(), init.One(), init.Constant(0.25)]


def named(initializer):
    return type(initializer).__name__


def whole(initializer, shape, seed=1, path="a.weight", dtype=np.float32):
    return draw_slice(initializer, shape, tuple(slice(0, size) for size in shape), seed, path, dtype)


def random_case(draw):
    """A random mesh, and a random layout on it of a random shape that it divides."""
    names = ("dp", "cp", "tp")[: draw.randint(1, 3)]
    mesh = DeviceMesh(tuple(draw.choice((1, 2, 3, 4)) for _ in names), names)
    ndim = draw.randint(2, 4)
    dims = [[] for _ in range(ndim)]
    for axis in draw.sample(names, len(names)):
        place = draw.randint(-1, ndim - 1)
        if place >= 0:
            dims[place].append(axis)
    layout = Layout.on(mesh, dims)
    return layout, tuple(layout.divisor(dim) * draw.randint(1, 5) for dim in range(ndim))


@pytest.mark.parametrize("initializer", DRAWN + CONSTANT, ids=named)
def test_every_slice_equals_the_same_slice_of_the_whole(initializer):
    draw = random.Random(7)
    for _ in range(25):
        layout, shape = random_case(draw)
        values = whole(initializer, shape)
        for rank in layout.mesh.rank_list:
            slices = layout.local_slices(shape, rank)
            np.testing.assert_array_equal(draw_slice(initializer, shape, slices, 1, "a.weight"), values[slices])


def test_slices_longer_than_a_chunk_equal_the_whole():
    shape = (700, 900)
    values = whole(init.Normal(), shape)
    for slices in ((slice(0, 350), slice(0, 900)), (slice(0, 700), slice(450, 900)), (slice(100, 600), slice(3, 890))):
        np.testing.assert_array_equal(draw_slice(init.Normal(), shape, slices, 1, "a.weight"), values[slices])


@pytest.mark.parametrize("initializer", DRAWN, ids=named)
def test_distribution_agrees_with_what_mindspore_draws(initializer):
    """Mean, deviation and deciles of 10⁶ values against those of MindSpore's own generator."""
    shape = (1250, 800)
    ms.set_seed(3)
    np.random.seed(3)
    theirs = init.initializer(initializer, shape).init_data().asnumpy().ravel()
    ours = whole(initializer, shape).ravel()
    deviation = theirs.std()
    assert abs(ours.mean() - theirs.mean()) < 6e-3 * deviation
    assert abs(ours.std() / deviation - 1) < 5e-3
    deciles = np.linspace(0.1, 0.9, 9)
    np.testing.assert_allclose(np.quantile(ours, deciles), np.quantile(theirs, deciles), atol=1e-2 * deviation)
    assert abs(np.corrcoef(ours[:-1], ours[1:])[0, 1]) < 4e-3


def test_tail_of_the_normal():
    values = whole(init.Normal(1.0), (1000, 1000))
    assert 4.2 < np.abs(values).max() < 6.5
    assert abs((np.abs(values) > 3).mean() / 0.0026998 - 1) < 0.1


def test_other_seeds_and_paths_draw_other_values():
    base = whole(init.Normal(1.0), (100, 100))
    for other in (whole(init.Normal(1.0), (100, 100), seed=2), whole(init.Normal(1.0), (100, 100), path="b.weight")):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 0.05
    np.testing.assert_array_equal(base, whole(init.Normal(1.0), (100, 100)))


def test_generator_is_splitmix64():
    """Against the outputs that Rosetta Code's page "Pseudo-random numbers/Splitmix64" lists for the seed 1234567."""
    uniforms = _uniforms(np.uint64(1234567), np.arange(3, dtype=np.uint64))
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(number * 2**52) for number in uniforms] == [number >> 12 for number in expected]


def test_values_are_pinned():
    """Another generator would silently change every run; here a change shows."""
    values = whole(init.Normal(1.0), (2, 2)).ravel()
    np.testing.assert_allclose(values, [0.8765646, -0.17494301, -1.1623585, 0.5790157], rtol=1e-6)


def test_memory_is_bounded_by_the_slice_not_the_whole():
    """A slice of 2 million values (8 MB) of a weight of 4·10¹² values."""
    tracemalloc.start()
    values = draw_slice(init.Normal(), (2_000_000, 2_000_000), (slice(5, 1005), slice(10**6, 10**6 + 2000)), 1, "a")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.shape == (1000, 2000) and values.std() > 0
    assert peak < values.nbytes + 20e6


class Pair(nn.Cell):
    def __init__(self, dtype=ms.float32):
        super().__init__()
        self.first = nn.Dense(6, 4)
        self.weight = Parameter(init.initializer(init.Normal(0.5), (4, 6), dtype), name="own")
        self.shared = self.first.weight


def built_on_meta(*args):
    with ms.DeviceCtx("meta"):
        return Pair(*args)


def test_initializer_survives_the_meta_device_only():
    kept = {path: type(initializer) for path, _, initializer in initializers(built_on_meta())}
    assert (kept["weight"], kept["shared"]) == (init.Normal, init.HeUniform)
    assert all(initializer is None for _, _, initializer in initializers(Pair()))


def test_materialize_keeps_objects_and_names():
    cell = built_on_meta()
    before = [(path, id(parameter), parameter.name) for path, parameter in cell.parameters_and_names()]
    materialize(cell, seed=4)
    assert before == [(path, id(parameter), parameter.name) for path, parameter in cell.parameters_and_names()]
    np.testing.assert_array_equal(cell.weight.asnumpy(), whole(init.Normal(0.5), (4, 6), 4, "weight"))
    assert not any(p.is_meta or p.has_init for p in cell.get_parameters())
    assert cell.shared is cell.first.weight
    gradient = ms.grad(lambda x: cell.first(x).sum(), None, cell.first.trainable_params())
    gradients = gradient(Tensor(np.ones((2, 6), np.float32)))
    assert [g.shape for g in gradients] == [(4, 6), (4,)]


def test_materialize_gives_every_rank_its_slice():
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    layouts = {"weight": Layout.on(mesh, [("tp",), ("dp",)])}
    single = built_on_meta()
    materialize(single, seed=4)
    for rank in range(4):
        cell = built_on_meta()
        materialize(cell, seed=4, layouts=layouts, rank=rank)
        slices = layouts["weight"].local_slices((4, 6), rank)
        np.testing.assert_array_equal(cell.weight.asnumpy(), single.weight.asnumpy()[slices])
        np.testing.assert_array_equal(cell.first.bias.asnumpy(), single.first.bias.asnumpy())


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_materialize_rounds_to_half_precision(dtype):
    cell = built_on_meta(dtype)
    materialize(cell, seed=4)
    assert cell.weight.dtype == dtype
    expected = whole(init.Normal(0.5), (4, 6), 4, "weight")
    np.testing.assert_allclose(cell.weight.float().asnumpy(), expected, rtol=2.0**-8)


def test_materialize_leaves_values_alone():
    cell = Pair()
    before = cell.weight.asnumpy()
    materialize(cell, seed=4)
    np.testing.assert_array_equal(before, cell.weight.asnumpy())


def test_errors_name_the_parameter():
    def odd(value):
        return cell_of(lambda self, x: x, weight=Parameter(value, name="weight"))

    with ms.DeviceCtx("meta"):
        lost = nn.SequentialCell(odd(Tensor(np.ones(2, np.float32))))
        orthogonal = odd(init.initializer(init.Orthogonal(), (4, 4)))
        flat = odd(init.initializer(init.XavierUniform(), (4,)))
    uneven = {"weight": Layout.on(DeviceMesh((3,), ("tp",)), [("tp",), ()])}
    for message, *given in (
        (r"^0\.weight: .* without an initializer", lost, 1),
        ("^weight: initializer Orthogonal can't be drawn .* Normal", orthogonal, 1),
        (r"^weight: .* shape \(4,\) has no fan", flat, 1),
        ("^weight: .* dim 0 has size 4, which axes tp", built_on_meta(), 1, uneven, 0),
    ):
        with pytest.raises(ValueError, match=message):
            materialize(*given)
