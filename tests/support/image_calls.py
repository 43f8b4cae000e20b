"""Operator calls on images, and of norms: of every operator with a rule in `convolution.py` and `images.py`.

`tests/test_operators_images.py` compares what models call with one card, each dim cut; here is that the operators are
written as source, and that local calls have the shapes of parts.
"""

import numpy as np
from mindspore import Tensor, ops
from support.image_functions import convolution, group_norm, pooling
from support.operator_calls import Call, f, ints, local

__all__ = ["CUT", "IMAGE_CALLS", "WITHOUT_GRADIENT", "WITHOUT_KERNEL"]

IMAGE, LINE, VOLUME = f(2, 4, 6, 6), f(2, 4, 8), f(2, 4, 4, 4, 4)
_GIVEN = {"out_channel": 2, "kernel_size": 3, "pad_mode": "same"}


def _by(function):
    """What a function of MindSpore gives, in single precision."""

    def compute(*args, **named):
        tensors = [Tensor(local(arg)) if isinstance(arg, np.ndarray) else arg for arg in args]
        results = function(*tensors, **named)
        return tuple(r.asnumpy() for r in results) if isinstance(results, tuple) else results.asnumpy()

    return compute


def _sampled(value, shapes, starts, places, weights):
    """As much of it as matters for the dims: all tokens of a head go into each result of the head."""
    found = np.einsum("nkhc,nqhlp,nqhlpt->nqhc", value, weights, places)
    return found.reshape(*found.shape[:2], -1)


_STATISTICS = np.repeat(np.abs(f(2, 4, 4, 1)), 8, -1), np.repeat(np.abs(f(2, 4, 4, 1)), 8, -1)  # (B, N, S, 8)


def _attention_of_both(one, top, total, other, other_top, other_total, *_):
    """The attention over both parts of the keys, and softmax's maxima and sums."""
    best = np.maximum(top, other_top)
    weight, other_weight = total * np.exp(top - best), other_total * np.exp(other_top - best)
    both = weight + other_weight

    def scaled(part, weight):
        share = (weight / both)[..., 0].transpose(2, 0, 1)[..., None]
        return (part.reshape(*part.shape[:2], share.shape[2], -1) * share).reshape(part.shape)

    return scaled(one, weight) + scaled(other, other_weight), best, both


def _shaped(*shapes):
    return lambda *_, **__: tuple(np.zeros(shape) for shape in shapes) if len(shapes) > 1 else np.zeros(shapes[0])


def _indexed(pool):
    return _by(lambda x, *args, **named: pool(x, *args, return_indices=True, **named))


def _resized(mode):
    corners = {} if mode in ("nearest", "area") else {"align_corners": False}
    return _by(lambda x, size, *_, **__: ops.interpolate(x, size=tuple(size), mode=mode, **corners))


_MEASURED = [
    Call("Conv2D", [IMAGE, f(2, 4, 3, 3)], convolution, _GIVEN),
    Call("Conv2D", [IMAGE, f(4, 2, 2, 3), 4, (2, 3), 1, "pad", 1, 2, (1, 2), 2], convolution),
    Call("Conv3D", [VOLUME, f(2, 4, 3, 3, 3)], _by(lambda x, w, **_: ops.conv3d(x, w, None, 1, "same")), _GIVEN),
    Call("Conv2DTranspose", [IMAGE, f(4, 2, 2, 2), (2, 2, 12, 12), 4, 2, "valid", 0, None, 1, 2],
         _by(lambda x, w, size, *_: ops.Conv2DTranspose(4, 2, stride=2)(x, w, size))),
    Call("Conv2DBackpropInput", [IMAGE, f(4, 2, 2, 2), (2, 2, 12, 12), 4, 2, "valid", 0, None, 1, 2],
         _by(lambda x, w, size, *_: ops.Conv2DTranspose(4, 2, stride=2)(x, w, size))),
    Call("Conv3DTranspose", [VOLUME, f(4, 2, 2, 2, 2), 4, 2, 2, 1, "valid", 0, 2],
         _by(lambda x, w, *_: ops.Conv3DTranspose(4, 2, 2, stride=2)(x, w))),
    Call("MaxPool", [IMAGE, 2, 2], pooling(np.max)),
    Call("MaxPool", [IMAGE], pooling(np.max), {"kernel_size": (3, 2), "strides": (1, 2)}),
    Call("AvgPool", [IMAGE, (2, 2), (2, 2), 2, 0], pooling(np.mean)),
    Call("MaxPool3D", [VOLUME, 2, 2], _by(lambda x, *_: ops.max_pool3d(x, 2, 2))),
    Call("AvgPool3D", [VOLUME, 2, 2], _by(lambda x, *_: ops.avg_pool3d(x, 2, 2))),
    Call("MaxPoolWithArgmaxV2", [IMAGE, 3, 2, 1], _indexed(ops.max_pool2d)),
    Call("MaxPool3DWithArgmax", [VOLUME, 2, 2, 0], _indexed(ops.max_pool3d)),
    Call("GroupNorm", [f(4, 8, 2, 2), 4, f(8), f(8), 1e-5], group_norm),
    Call("UpsampleNearest1D", [LINE, (16,), None], _by(lambda x, *_: ops.repeat_interleave(x, 2, 2))),
    Call("UpsampleNearest2D", [IMAGE, (12, 12), None], _resized("nearest")),
    Call("UpsampleNearest3D", [VOLUME, (8, 8, 8), None], _resized("nearest")),
    Call("UpsampleTrilinear3D", [VOLUME, (8, 8, 8), None, False], _resized("trilinear")),
    Call("ResizeNearestNeighbor", [IMAGE, (12, 3), False, False], _resized("nearest")),
    Call("ResizeNearestNeighborV2", [IMAGE, (3, 12), False, False], _resized("nearest")),
    Call("ResizeBilinearV2", [IMAGE, (12, 12), False, True], _resized("bilinear")),
    Call("ResizeBicubic", [IMAGE, (12, 12), False, True], _resized("bicubic")),
    Call("ResizeLinear1D", [LINE, (16,), "half_pixel"], _resized("linear")),
    Call("AdaptiveAvgPool2D", [IMAGE], _by(lambda x, output_size: ops.adaptive_avg_pool2d(x, output_size)),
         {"output_size": (3, 2)}),
    Call("AdaptiveAvgPool3D", [VOLUME], _by(lambda x, output_size: ops.adaptive_avg_pool3d(x, output_size)),
         {"output_size": 2}),
    Call("AdaptiveMaxPool2D", [IMAGE, (3, 2)], _indexed(ops.adaptive_max_pool2d)),
    Call("Pad", [IMAGE, ((0, 0), (0, 0), (1, 1), (0, 2))], lambda x, pairs: np.pad(x, pairs)),
    Call("GridSampler2D", [IMAGE, f(2, 16, 8, 2) / 2, 0, 0, False], _by(lambda x, grid, *_: ops.grid_sample(x, grid))),
    Call("GridSampler3D", [VOLUME, f(2, 4, 8, 8, 3) / 2, 0, 0, False],
         _by(lambda x, grid, *_: ops.grid_sample(x, grid))),
    Call("AffineGrid", [f(2, 2, 3), (2, 3, 4, 6), False], _by(lambda theta, size, *_: ops.affine_grid(theta, size))),
    Call("CropAndResize", [f(2, 6, 6, 4), np.abs(f(4, 4)) / 2, ints(2, 4), (4, 4)], _by(ops.crop_and_resize)),
    Call("LRN", [IMAGE, 2], _by(ops.lrn)),
    Call("ChannelShuffle", [IMAGE, 2], lambda x, groups: x[:, [0, 2, 1, 3]]),
    Call("PReLU", [IMAGE, f(4)], lambda x, slopes: np.where(x > 0, x, x * slopes[:, None, None])),
    Call("SpaceToBatchND", [f(4, 2, 4, 4), (2, 2), ((0, 0), (1, 1))], _by(ops.space_to_batch_nd)),
    Call("BatchToSpaceND", [f(4, 2, 4, 4), (2, 2), ((0, 0), (1, 1))], _by(ops.batch_to_space_nd)),
    Call("Im2Col", [IMAGE, (2, 2), (2, 2)],
         _by(lambda x, *_: ops.reshape(ops.unfold(x, (2, 2), stride=(2, 2)), (2, 4, 4, 9)))),
    Call("MaxUnpool2D", [f(2, 4, 3, 3), np.tile(np.int64([[0, 2, 4], [12, 14, 16], [24, 26, 28]]), (2, 4, 1, 1)), 2, 2],
         _by(ops.max_unpool2d)),
    Call("MaxUnpool3D", [f(2, 4, 2, 2, 2), np.tile(np.arange(8).reshape(2, 2, 2) * 2, (2, 4, 1, 1, 1)), 2, 2],
         _by(ops.max_unpool3d)),
    Call("FractionalMaxPoolWithFixedKsize", [IMAGE, np.full((2, 4, 2), 0.5), 2, (3, 3)],
         _by(lambda x, drawn, *_: ops.fractional_max_pool2d(
             x, 2, (3, 3), return_indices=True, _random_samples=drawn))),
    Call("FractionalMaxPool3DWithFixedKsize", [VOLUME, np.full((2, 4, 3), 0.5), 2, (2, 2, 2)],
         _by(lambda x, drawn, *_: ops.fractional_max_pool3d(
             x, 2, (2, 2, 2), return_indices=True, _random_samples=drawn))),
    Call("BoundingBoxEncode", [np.abs(f(4, 4)), np.abs(f(4, 4)), (0.0,) * 4, (1.0,) * 4], _by(ops.bounding_box_encode)),
    Call("BoundingBoxDecode", [f(4, 4), f(4, 4), (9, 9)], _by(ops.bounding_box_decode)),
    Call("Padding", [f(4, 2, 1)], lambda x, pad_dim_size: np.pad(x, [(0, 0)] * 2 + [(0, 3)]), {"pad_dim_size": 4}),
    Call("CheckValid", [np.float64([[0, 0, 7, 7], [0, 0, 9, 7]]), np.float64([8, 8, 1])],
         lambda boxes, _: (boxes < 8).all(1)),
    Call("IOU", [np.abs(f(4, 4)), np.abs(f(6, 4))], _by(ops.iou)),
    Call("ROIAlign", [IMAGE, np.float64([[0, 1, 1, 6, 6], [1, 0, 0, 5, 5]]), 2, 2, 0.5],
         _by(lambda x, rois, *args: ops.ROIAlign(*args)(x, rois))),
]  # fmt: skip
_PADDED = (("Reflection", "Replication"), ((LINE, (2, 4, 10)), (IMAGE, (2, 4, 8, 8)), (VOLUME, (2, 4, 6, 6, 6))))
CUT = [  # without a kernel on CPU: their parts are computed by NumPy
    Call("RotatedIou", [f(2, 5, 4), f(2, 5, 6), False, 0, True, 0.0, 0.0],
         lambda x, y, *_: np.einsum("nfa,nfb->nab", x, y)),
    Call("MultiScaleDeformableAttn",
         [f(2, 8, 4, 2), ints(4, 2, 2), ints(4, 2), f(2, 4, 4, 2, 1, 2), f(2, 4, 4, 2, 1)], _sampled),
    Call("RingAttentionUpdate", [f(4, 2, 8), *_STATISTICS, f(4, 2, 8), *_STATISTICS[::-1], None, "SBH"],
         _attention_of_both),
]  # fmt: skip
_UNMEASURED = [
    *CUT,
    Call("ExtractImagePatches", [IMAGE, (3, 2), (2, 1), (1, 2), "valid"], _shaped((2, 24, 2, 4))),
    Call("ExtractImagePatches", [IMAGE, (3, 2), (2, 1), (1, 2), "same"], _shaped((2, 24, 3, 6))),
    *(Call(f"Conv{ndim}D{kind}", [x, f(2, 4, *(3,) * ndim), f(2), 1, pad, 1, 1], _shaped((2, 2, *x.shape[2:])))
      for ndim, x in enumerate((LINE, IMAGE, VOLUME), 1) for kind, pad in (("Ext", 1), ("Padding", "same"))),
    Call("ConvTranspose2D", [IMAGE, f(4, 2, 2, 2), f(2), 2, 0, 0, 1, 1], _shaped((2, 2, 12, 12))),
    Call("AvgPool1D", [LINE, 2, 2, 0, False, True], _shaped((2, 4, 4))),
    Call("AvgPool2D", [IMAGE, 3, 1, 1, False, True, None], _shaped((2, 4, 6, 6))),
    Call("AvgPool3DExt", [VOLUME, 2, 2, 0, False, True, None], _shaped((2, 4, 2, 2, 2))),
    Call("UpsampleLinear1D", [LINE, (16,), None, False], _shaped((2, 4, 16))),
    *(Call(f"Upsample{kind}2D", [IMAGE, (12, 12), None, False], _shaped((2, 4, 12, 12))) for kind in
      ("Bilinear", "Bicubic")),
    Call("AdaptiveAvgPool1D", [LINE, 2], _shaped((2, 4, 2))),
    Call("AdaptiveAvgPool2DExt", [IMAGE, (3, 2)], _shaped((2, 4, 3, 2))),
    Call("AdaptiveAvgPool3DExt", [VOLUME, (2, 2, 2)], _shaped((2, 4, 2, 2, 2))),
    Call("AdaptiveMaxPool1D", [LINE, 2], _shaped((2, 4, 2), (2, 4, 2))),
    *(Call(f"{kind}Pad{ndim}D", [x, (1, 1) * ndim], _shaped(shape)) for kind in _PADDED[0]
      for ndim, (x, shape) in enumerate(_PADDED[1], 1)),
    Call("Im2ColExt", [IMAGE, (2, 2), (1, 1), (0, 0), (2, 2)], _shaped((2, 16, 9))),
    Call("Col2ImExt", [f(2, 16, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2)], _shaped((2, 4, 6, 6))),
    Call("MaxUnpool2DExt", [IMAGE, ints(9, 2, 4, 6, 6), 2], _shaped((2, 4, 12, 12))),
    Call("AddRmsNorm", [f(2, 8), f(2, 8), f(8), 1e-6], _shaped((2, 8), (2, 1), (2, 8))),
    Call("AddLayerNormV2", [f(2, 8), f(2, 8), f(8), f(8), 1e-5, True], _shaped((2, 8), (2, 1), (2, 1), (2, 8))),
]  # fmt: skip
IMAGE_CALLS = [*_MEASURED, *_UNMEASURED]
WITHOUT_KERNEL = tuple(dict.fromkeys(call.name for call in _UNMEASURED))
_NONE = ("ChannelShuffle", "BoundingBoxEncode", "BoundingBoxDecode", "IOU", "FractionalMaxPoolWithFixedKsize")
WITHOUT_GRADIENT = {str(call): "MindSpore has no gradient on CPU" for call in _MEASURED if call.name in _NONE}
