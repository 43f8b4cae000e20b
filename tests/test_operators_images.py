"""What models call on images, each dim of each tensor cut over an axis of 2: `verify` compares it with one card."""

import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from support.launch import ROOT
from support.nightly import daily
from support.small_cells import cell_of
from support.verified_calls import MESH_OF_4, Sample, eager, verified

from mindformers_core import shard, verify
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.lowering.compositions import composed
from mindformers_core.mesh import DeviceMesh
from mindformers_core.sharding.inspecting import explain, prepare

LINE = DeviceMesh((2,), ("tp",))
F = mint.nn.functional
RANDOM = np.random.default_rng(5)


def f(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


ROW, IMAGE, VOLUME, WIDE = f(2, 4, 8), f(2, 4, 8, 8), f(2, 4, 4, 4, 4), f(2, 8, 4, 4)
W1, W2, W3, BIAS = f(6, 4, 3), f(6, 4, 3, 3), f(6, 4, 3, 3, 3), f(6)
CHANNELS, SPREADS = f(4), np.abs(f(4)) + 0.5


def same(x, w, **more):
    return ops.conv2d(x, w, None, pad_mode="same", **more)


# name -> function and its tensors
CALLS = {
    "conv1d": (lambda x, w, b: ops.conv1d(x, w, b, 1, "pad", 1), [ROW, W1, BIAS]),
    "conv2d": (lambda x, w, b: ops.conv2d(x, w, b, 1, "pad", 1), [IMAGE, W2, BIAS]),
    "conv3d": (lambda x, w, b: ops.conv3d(x, w, b, 1, "same"), [VOLUME, W3, BIAS]),
    "strides": (lambda x, w: ops.conv2d(x, w, None, 2, "pad", 1), [IMAGE, W2]),
    "strides, same": (lambda x, w: same(x, w, stride=2), [IMAGE, W2]),
    "dilation": (lambda x, w: same(x, w, dilation=2), [IMAGE, W2]),
    "patches": (lambda x, w: ops.conv2d(x, w, None, 2), [IMAGE, f(6, 4, 2, 2)]),
    "one by one": (lambda x, w: ops.conv2d(x, w), [IMAGE, f(6, 4, 1, 1)]),
    "one by one, every second": (lambda x, w: ops.conv2d(x, w, None, 2), [IMAGE, f(6, 4, 1, 1)]),
    "even": (same, [IMAGE, f(6, 4, 2, 4)]),
    "large": (lambda x, w: ops.conv2d(x, w, None, 1, "pad", 6), [IMAGE, f(2, 4, 13, 13)]),
    "depthwise": (lambda x, w: same(x, w, groups=4), [IMAGE, f(8, 1, 3, 3)]),
    "groups": (lambda x, w: same(x, w, groups=2), [IMAGE, f(8, 2, 3, 3)]),
    "upwards": (lambda x, w: ops.Conv2DTranspose(4, 2, stride=2)(x, w, (2, 6, 16, 16)), [IMAGE, f(4, 6, 2, 2)]),
    "upwards in groups": (
        lambda x, w: ops.Conv2DTranspose(4, 3, "same", stride=2, group=2)(x, w, (2, 6, 16, 16)),
        [IMAGE, f(4, 3, 3, 3)],
    ),
    "upwards in 3 dims": (lambda x, w: ops.Conv3DTranspose(4, 6, 2, stride=2)(x, w), [VOLUME, f(4, 6, 2, 2, 2)]),
    "max_pool2d": (lambda x: ops.max_pool2d(x, 3, 2, 1, return_indices=True), [IMAGE]),
    "max_pool2d apart": (lambda x: ops.max_pool2d(x, 2, 2, return_indices=True), [IMAGE]),
    "max_pool2d with the rest": (lambda x: ops.max_pool2d(x, 3, 2, ceil_mode=True), [IMAGE]),
    "max_pool3d": (lambda x: ops.max_pool3d(x, 3, 1, 1, return_indices=True), [VOLUME]),
    "MaxPool": (lambda x: ops.MaxPool(3, 2, "same")(x - 2), [IMAGE]),
    "MaxPool3D": (lambda x: ops.MaxPool3D(3, 1, "same")(x), [VOLUME]),
    "mint.max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), [IMAGE]),
    "AvgPool": (lambda x: ops.AvgPool(2, 2)(x), [IMAGE]),
    "AvgPool, same": (lambda x: ops.AvgPool(3, 2, "same")(x), [IMAGE]),
    "avg_pool1d": (lambda x: ops.avg_pool1d(x, 3, 1, 1), [ROW]),
    "avg_pool2d": (lambda x: ops.avg_pool2d(x, 3, 1, 1), [IMAGE]),
    "avg_pool2d inside": (lambda x: ops.avg_pool2d(x, 3, 1, 1, count_include_pad=False), [IMAGE]),
    "avg_pool3d": (lambda x: ops.avg_pool3d(x, 3, 1, 1, divisor_override=5), [VOLUME]),
    "lp_pool2d": (lambda x: ops.lp_pool2d(x, 2, 2), [np.abs(IMAGE)]),
    "adaptive means": (lambda x: ops.adaptive_avg_pool2d(x, (2, None)), [IMAGE]),
    "uneven means": (lambda x: ops.adaptive_avg_pool2d(x, (3, 8)), [IMAGE]),
    "means of volumes": (lambda x: ops.adaptive_avg_pool3d(x, 2), [VOLUME]),
    "adaptive maxima": (lambda x: ops.adaptive_max_pool2d(x, 2, return_indices=True), [IMAGE]),
    "nearest 1d": (lambda x: F.interpolate(x, (16,), mode="nearest"), [ROW]),
    "nearest": (lambda x: ops.interpolate(x, size=(16, 4), mode="nearest"), [IMAGE]),
    "nearest thrice": (lambda x: ops.interpolate(x, size=(24, 24), mode="nearest"), [IMAGE]),
    "nearest by scale": (lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), [IMAGE]),
    "nearest by odd scales": (lambda x: F.interpolate(x, scale_factor=2.05, mode="nearest"), [VOLUME[..., 0]]),
    "nearest exact": (lambda x: ops.interpolate(x, size=(16, 16), mode="nearest-exact"), [IMAGE]),
    "nearest 3d": (lambda x: ops.interpolate(x, size=(8, 4, 2), mode="nearest"), [VOLUME]),
    "linear": (lambda x: ops.interpolate(x, size=(16,), mode="linear"), [ROW]),
    "bilinear": (lambda x: ops.interpolate(x, size=(16, 16), mode="bilinear"), [IMAGE]),
    "bicubic": (lambda x: ops.interpolate(x, size=(16, 16), mode="bicubic"), [IMAGE]),
    "trilinear": (lambda x: ops.interpolate(x, size=(8, 8, 8), mode="trilinear"), [VOLUME]),
    "area": (lambda x: ops.interpolate(x, size=(4, 2), mode="area"), [IMAGE]),
    "reflected": (lambda x: ops.pad(x, (1, 1, 0, 0), "reflect"), [IMAGE]),
    "circular": (lambda x: F.pad(x, (1, 1, 0, 0), "circular"), [IMAGE]),
    "replicated": (lambda x: ops.pad(x, (0, 0, 1, 2), "replicate"), [IMAGE]),
    "mirrored": (lambda x: nn.ReflectionPad2d((0, 0, 1, 1))(x), [IMAGE]),
    "Pad": (lambda x: ops.Pad(((0, 0), (0, 0), (1, 1), (0, 0)))(x), [IMAGE]),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), [WIDE]),
    "unfold": (lambda x: ops.unfold(x, 3, padding=1), [IMAGE]),
    "grid_sample": (ops.grid_sample, [IMAGE, f(2, 6, 4, 2)]),
    "grid_sample 3d": (ops.grid_sample, [VOLUME, f(2, 6, 4, 2, 3)]),
    "affine_grid": (lambda x: ops.affine_grid(x, (2, 3, 4, 6)), [f(2, 2, 3)]),
    "crop_and_resize": (
        lambda x, b: ops.crop_and_resize(x, b, Tensor([0, 1, 0, 1], ms.int32), (4, 4)),
        [f(2, 8, 8, 4), f(4, 4)],
    ),
    "ROIAlign": (lambda x, r: ops.ROIAlign(2, 2, 0.5)(x, r), [IMAGE, np.float32([[0, 1, 1, 6, 6], [1, 0, 0, 5, 5]])]),
    "lrn": (ops.lrn, [IMAGE]),
    "channel_shuffle": (lambda x: ops.channel_shuffle(ops.stop_gradient(x), 2), [IMAGE]),
    "prelu": (ops.prelu, [IMAGE, CHANNELS]),
    "one slope": (ops.prelu, [IMAGE, f(1)]),
    "space_to_batch": (lambda x: ops.space_to_batch_nd(x, [2, 2], [[0, 0], [1, 1]]), [WIDE]),
    "batch_to_space": (lambda x: ops.batch_to_space_nd(x, [2, 1], [[0, 0], [1, 1]]), [WIDE]),
    "max_unpool2d": (lambda x: ops.max_unpool2d(*ops.max_pool2d(x, 2, 2, return_indices=True), 2), [IMAGE]),
    "boxes": (lambda a, b: ops.bounding_box_decode(ops.stop_gradient(a), ops.stop_gradient(b), (9, 9)), [f(4, 4)] * 2),
    "iou": (ops.iou, [np.abs(f(4, 4)), np.abs(f(6, 4))]),
    "group_norm": (lambda x, w, b: ops.group_norm(x, 2, w, b), [IMAGE, CHANNELS, f(4)]),
    "group_norm without scales": (lambda x: ops.group_norm(x, 2), [VOLUME]),
    "batch_norm": (lambda x, w, b: ops.batch_norm(x, Tensor(CHANNELS), Tensor(SPREADS), w, b), [IMAGE, f(4), f(4)]),
    "batch_norm in training": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [IMAGE, CHANNELS, f(4)],
    ),
}
# dims of the image that are gathered: windows cut them unevenly, or they are looked at as a whole
GATHERED = {
    "avg_pool2d inside": "2 3", "AvgPool, same": "2 3", "nearest thrice": "2 3", "nearest exact": "2 3",
    "nearest by odd scales": "2 3", "uneven means": "2", "adaptive maxima": "2 3", "linear": "2", "bilinear": "2 3",
    "bicubic": "2 3", "trilinear": "2 3 4", "reflected": "3", "circular": "3", "replicated": "2", "mirrored": "2",
    "Pad": "2", "unfold": "2 3", "grid_sample": "2 3", "grid_sample 3d": "2 3 4", "crop_and_resize": "0 1 2",
    "ROIAlign": "0 2 3", "space_to_batch": "0 2 3", "batch_to_space": "0 2 3", "affine_grid": "1", "boxes": "1",
    "iou": "1", "lrn": "1", "channel_shuffle": "1", "upwards in groups": "2 3",
    "upwards": "1", "upwards in 3 dims": "1",
}  # fmt: skip


def cell_for(function):
    def construct(self, x, y=None, z=None):
        return function(*(given for given in (x, y, z) if given is not None))

    return cell_of(construct)


def cut(arrays, place, dim, axes="tp"):
    """A plan in which one dim of one tensor is cut."""
    entries = [layout()] * len(arrays)
    entries[place] = layout(*[None] * dim, axes)
    return {"": {"input": dict(zip("xyz", entries))}}


def places(arrays):
    return [
        (place, dim) for place, array in enumerate(arrays) for dim in range(array.ndim) if array.shape[dim] % 2 == 0
    ]


def source_of(function, arrays, plan, mesh=LINE):
    """The program of rank 0, and the layouts of its results."""
    with rank_of(mesh.size, 0):
        net = shard(cell_for(function), mesh, plan=plan)
        bound = [plan[""]["input"][name].bind(mesh, array.ndim) for name, array in zip("xyz", arrays)]
        parts = [array[given.local_slices(array.shape, 0)] for array, given in zip(arrays, bound)]
        program = prepare(net, *(Tensor(part.copy()) for part in parts))
    return program.source.text, [result.layout for result in program.results]


def sample(name, *cuts):
    """A call, each dim of each tensor cut in turn, or as `cuts` say."""
    return Sample(name, CALLS[name][0], tuple(CALLS[name][1]), terms=False, cuts=cuts)


@pytest.mark.parametrize("name", daily(list(CALLS)[::4], CALLS))
def test_a_call_computes_what_one_card_does(name):
    """Only the dims listed are gathered: of all others of the image a rank gets no more than halos."""
    dims = {found.split("_")[2] for found in verified(sample(name), LINE) if found.startswith("cut_0_")}
    assert sorted(dims) == GATHERED.get(name, "").split()


def test_a_cut_height_sends_its_halo_only():
    """A row of 512 bytes goes to each neighbour, of an image of 64 rows, whatever the numbers of rows and ranks."""
    x, weight = f(4, 4, 64, 8), f(6, 4, 3, 3)
    for ranks in (2, 8):
        with rank_of(ranks, 0):
            net = shard(cell_for(lambda x, w: same(x, w)), DeviceMesh((ranks,), ("tp",)), plan=cut([x, weight], 0, 2))
            told = explain(net, Tensor(x[:, :, : 64 // ranks].copy()), Tensor(weight))
        assert all(f"permute by {by} over tp, 512 B" in told for by in (1, -1)), told
        assert "sends 1.0 KiB forward" in told
    text, (placed,) = source_of(lambda x, w: same(x, w, stride=2), [x, weight], cut([x, weight], 0, 2))
    assert "slice_op(x, (0, 0, 0, 0), (4, 4, 1, 8))" in text and str(placed) == "[-, -, tp, -]"


AXES = layout("a", None, "b"), layout(None, None, "a", "b"), layout(None, None, ("b", "a")), layout(None, "a", "b")


TWICE = "conv2d", "large", "max_pool2d", "strides", "depthwise", "avg_pool2d", "group_norm"


@pytest.mark.parametrize("name", daily(TWICE[1:2], TWICE))
def test_two_axes(name):
    """Corners of halos, and halos that are larger than a part."""
    others = [layout()] * (len(CALLS[name][1]) - 1)
    verified(sample(name, *([image, *others] for image in AXES)), MESH_OF_4)


# in spellings without a kernel on CPU, of which the classic one of the same rule is above: where the result is cut
DRY = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 1, 1), [ROW, W1, BIAS], ("[tp, -, -]", None, "[-, -, tp]")),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), [IMAGE, W2, BIAS],
               ("[tp, -, -, -]", None, "[-, -, tp, -]", "[-, -, -, tp]")),
    "of one image": (lambda x, w: F.conv2d(x, w, None, 1, "same"), [IMAGE[0], W2], (None, "[-, tp, -]", "[-, -, tp]")),
    "by words": (lambda x, w: F.conv2d(x, w, padding="same", dilation=2), [IMAGE, W2],
                 ("[tp, -, -, -]", None, "[-, -, tp, -]", "[-, -, -, tp]")),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1, groups=2), [VOLUME, f(6, 2, 3, 3, 3)],
               ("[tp, -, -, -, -]", "[-, tp, -, -, -]", "[-, -, tp, -, -]")),
    "transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, 2), [IMAGE, f(4, 6, 2, 2), BIAS],
                   ("[tp, -, -, -]", None, "[-, -, tp, -]", "[-, -, -, tp]")),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 3, 1, 1), [ROW], ("[tp, -, -]", "[-, tp, -]", "[-, -, tp]")),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 1, 1), [IMAGE], ("[tp, -, -, -]", "[-, tp, -, -]", "[-, -, tp, -]")),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), [VOLUME], ("[tp, -, -, -, -]", None, None, None, "[-, -, -, -, tp]")),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, 4), [IMAGE], (None, "[-, tp, -, -]", "[-, -, tp, -]")),
    "bilinear": (lambda x: F.interpolate(x, (16, 16), mode="bilinear"), [IMAGE],
                 (None, "[-, tp, -, -]", "[-, -, -, -]")),
    "reflect": (lambda x: F.pad(x, (1, 1, 0, 0), "reflect"), [IMAGE], (None, None, "[-, -, tp, -]", "[-, -, -, -]")),
    "replicate": (lambda x: F.pad(x, (1, 1), "replicate"), [ROW], (None, "[-, tp, -]", "[-, -, -]")),
    "unfold": (lambda x: F.unfold(x, 2, stride=2), [IMAGE], ("[tp, -, -]", "[-, tp, -]", "[-, -, -]")),
    "fold": (lambda x: F.fold(x, (8, 8), 2, stride=2), [f(2, 16, 16)], (None, "[-, tp, -, -]", "[-, -, -, -]")),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, w, b, w, b), [IMAGE, CHANNELS, CHANNELS],
                   ("[tp, -, -, -]", "[-, tp, -, -]", "[-, -, tp, -]")),
    "add_rms_norm": (lambda x, w: ops.auto_generate.add_rms_norm(x, x, w)[0], [f(4, 8), f(8)], ("[tp, -]", "[-, -]")),
}  # fmt: skip


@pytest.mark.parametrize("name", DRY)
def test_spellings_without_a_kernel(name):
    function, arrays, expected = DRY[name]
    for dim, wanted in enumerate(expected):
        if wanted is not None:
            _, results = source_of(function, arrays, cut(arrays, 0, dim))
            assert str(results[0]) == wanted, f"dim {dim}"


def test_batch_norm_is_that_of_one_card():
    """Captured as its parts, it computes what MindSpore's kernel does."""
    x, (scale, shift) = f(6, 4, 2, 2), (Tensor(CHANNELS), Tensor(f(4)))
    for training in (False, True):
        given = [Tensor(CHANNELS.copy()), Tensor(SPREADS.copy())]
        expected = ops.BatchNorm(training)(Tensor(x), scale, shift, *given)[0].asnumpy()
        statistics = (None, None) if training else given
        found = composed("BatchNormExt", (Tensor(x), scale, shift, *statistics, training), {}, None)[0]
        np.testing.assert_allclose(found.asnumpy(), expected, 1e-5, 1e-5)


def test_running_statistics_are_those_of_one_card():
    x, scales = Tensor(f(6, 4, 2, 2)), (Tensor(CHANNELS), Tensor(CHANNELS))
    found, expected = ([Parameter(Tensor(each), name="state") for each in (CHANNELS, SPREADS)] for _ in range(2))
    composed("BatchNorm", (x, *scales, *found, True, 1e-5, 0.2), {}, None)
    ops.BatchNorm(True, 1e-5, 0.2)(x, *scales, *expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), 1e-5, 1e-6)
    assert np.abs(found[0].asnumpy() - CHANNELS).max() > 0.01


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.BatchNorm1d])
def test_layers_of_batch_norm_in_evaluation(norm):
    layer = norm(4)
    layer.moving_mean.set_data(Tensor(CHANNELS))
    layer.moving_variance.set_data(Tensor(SPREADS))
    x = f(4, 4) if norm is nn.BatchNorm1d else IMAGE
    net = cell_of(lambda self, x: self.layer(x), layer=layer).set_train(False)
    for _, dim in places([x]):
        check = verify(net, LINE, Tensor(x), plan=cut([x], 0, dim))
        assert not check.faults, check.report()


AT_ONCE = "conv2d", "max_pool2d", "upwards", "group_norm"  # whose eager calls have halos, or statistics
AT_ONCE_BY_NIGHT = "MaxPool", "avg_pool2d", "depthwise", "nearest", "batch_norm", "crop_and_resize", "lrn"


@pytest.mark.parametrize("name", daily(AT_ONCE, AT_ONCE + AT_ONCE_BY_NIGHT))
def test_the_eager_engine(name):
    eager(sample(name), LINE)


ORDER = """
from mindformers_core.operators import signature_of, tensor_meta
for name, shapes, args in (("GridSampler2D", [(2, 4, 8, 8), (2, 6, 4, 2)], ()), ("GroupNorm", [(2, 4, 8, 8)], (2,)),
                           ("Conv2DExt", [(2, 4, 8, 8), (6, 4, 3, 3)], (None, 1, 1))):
    signature = signature_of(name, (*(tensor_meta(shape, "float32") for shape in shapes), *args))
    print(list(signature.sizes), list(signature.distributed), list(signature.local.halos))
"""


def test_all_processes_have_factors_in_one_order():
    """It decides in which order ranks communicate; that of a set differs from process to process."""
    run = [sys.executable, "-c", ORDER]
    said = {subprocess.check_output(run, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=ROOT) for seed in "1234"}
    assert len(said) == 1
