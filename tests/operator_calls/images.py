"""Operators on images, (batch, channels, height, width), and boxes."""

import numpy as np
from mindspore import Tensor, ops
from numpy.lib.stride_tricks import sliding_window_view

from operator_calls.call import Call, f, ints, local, positive, shaped


def _pair(value):
    return (value, value) if isinstance(value, int) else value


def _windows(x, kernel, mode, pad, stride, dilation=1):
    """(batch, channels, rows, columns, kernel height, kernel width); what is padded is 0."""
    (height, width), (down, right), (first, second) = _pair(kernel), _pair(stride), _pair(dilation)
    reach = [(size - 1) * step + 1 for size, step in ((height, first), (width, second))]
    if mode == "same":
        missing = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(x.shape[2:], (down, right), reach)]
        x = np.pad(x, [(0, 0), (0, 0), *((amount // 2, amount - amount // 2) for amount in missing)])
    elif mode == "pad":
        x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    return sliding_window_view(x, reach, (2, 3))[:, :, ::down, ::right, ::first, ::second]


def convolution(x, w, out_channel=0, kernel_size=1, mode=1, pad_mode="valid", pad=0, stride=1, dilation=1, group=1):
    """`ops.Conv2D`."""
    windows = np.split(_windows(x, w.shape[2:], pad_mode, pad, stride, dilation), group, 1)
    return np.concatenate([np.einsum("nchwij,ocij->nohw", *pair) for pair in zip(windows, np.split(w, group))], 1)


def pooling(reduce):
    """`ops.MaxPool`, `ops.AvgPool`, without padding."""

    def function(x, kernel_size, strides, *_, **__):
        return reduce(_windows(x, kernel_size, "valid", 0, strides), (-2, -1))

    return function


IMAGE, LINE, VOLUME = f(2, 4, 6, 6), f(2, 4, 8), f(2, 4, 4, 4, 4)

NONE = "MindSpore has none"
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


def _indexed(pool):
    return _by(lambda x, *args, **named: pool(x, *args, return_indices=True, **named))


def _resized(mode):
    corners = {} if mode in ("nearest", "area") else {"align_corners": False}
    return _by(lambda x, size, *_, **__: ops.interpolate(x, size=tuple(size), mode=mode, **corners))


CALLS = [
    Call("RotatedIou", [f(2, 5, 4), f(2, 5, 6), False, 0, True, 0.0, 0.0],
         lambda x, y, *_: np.einsum("nfa,nfb->nab", x, y), runs="meta"),
    Call("MultiScaleDeformableAttn",
         [f(2, 8, 4, 2), ints(4, 2, 2), ints(4, 2), f(2, 4, 4, 2, 1, 2), f(2, 4, 4, 2, 1)], _sampled, runs="meta"),
]  # fmt: skip
OTHERS = [
    Call("UniqueWithPad", [np.array([5, 5, 2, 7]), np.array(9)],
         lambda x, pad: (np.array([5, 2, 7, 9]), np.array([0, 0, 1, 2])), gradient=NONE),
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
    Call("GridSampler2D", [IMAGE, f(2, 16, 8, 2) / 2, 0, 0, False], _by(lambda x, grid, *_: ops.grid_sample(x, grid))),
    Call("GridSampler3D", [VOLUME, f(2, 4, 8, 8, 3) / 2, 0, 0, False],
         _by(lambda x, grid, *_: ops.grid_sample(x, grid))),
    Call("AffineGrid", [f(2, 2, 3), (2, 3, 4, 6), False], _by(lambda theta, size, *_: ops.affine_grid(theta, size))),
    Call("CropAndResize", [f(2, 6, 6, 4), positive(4, 4) / 2, ints(2, 4), (4, 4)], _by(ops.crop_and_resize)),
    Call("LRN", [IMAGE, 2], _by(ops.lrn)),
    Call("ChannelShuffle", [IMAGE, 2], lambda x, groups: x[:, [0, 2, 1, 3]], gradient=NONE),
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
             x, 2, (3, 3), return_indices=True, _random_samples=drawn)), gradient=NONE),
    Call("FractionalMaxPool3DWithFixedKsize", [VOLUME, np.full((2, 4, 3), 0.5), 2, (2, 2, 2)],
         _by(lambda x, drawn, *_: ops.fractional_max_pool3d(
             x, 2, (2, 2, 2), return_indices=True, _random_samples=drawn))),
    Call("BoundingBoxEncode", [positive(4, 4), positive(4, 4), (0.0,) * 4, (1.0,) * 4], _by(ops.bounding_box_encode),
         gradient=NONE),
    Call("BoundingBoxDecode", [f(4, 4), f(4, 4), (9, 9)], _by(ops.bounding_box_decode), gradient=NONE),
    Call("CheckValid", [np.float64([[0, 0, 7, 7], [0, 0, 9, 7]]), np.float64([8, 8, 1])],
         lambda boxes, _: (boxes < 8).all(1), gradient=NONE),
    Call("IOU", [positive(4, 4), positive(6, 4)], _by(ops.iou), gradient=NONE),
    Call("ROIAlign", [IMAGE, np.float64([[0, 1, 1, 6, 6], [1, 0, 0, 5, 5]]), 2, 2, 0.5],
         _by(lambda x, rois, *args: ops.ROIAlign(*args)(x, rois))),
    Call("ExtractImagePatches", [IMAGE, (3, 2), (2, 1), (1, 2), "valid"], shaped((2, 24, 2, 4)), runs="meta"),
    Call("ExtractImagePatches", [IMAGE, (3, 2), (2, 1), (1, 2), "same"], shaped((2, 24, 3, 6)), runs="meta"),
    *(Call(f"Conv{ndim}D{kind}", [x, f(2, 4, *(3,) * ndim), f(2), 1, pad, 1, 1], shaped((2, 2, *x.shape[2:])),
           runs="meta")
      for ndim, x in enumerate((LINE, IMAGE, VOLUME), 1) for kind, pad in (("Ext", 1), ("Padding", "same"))),
    Call("ConvTranspose2D", [IMAGE, f(4, 2, 2, 2), f(2), 2, 0, 0, 1, 1], shaped((2, 2, 12, 12)), runs="meta"),
    Call("AvgPool1D", [LINE, 2, 2, 0, False, True], shaped((2, 4, 4)), runs="meta"),
    Call("AvgPool2D", [IMAGE, 3, 1, 1, False, True, None], shaped((2, 4, 6, 6)), runs="meta"),
    Call("AvgPool3DExt", [VOLUME, 2, 2, 0, False, True, None], shaped((2, 4, 2, 2, 2)), runs="meta"),
    Call("UpsampleLinear1D", [LINE, (16,), None, False], shaped((2, 4, 16)), runs="meta"),
    *(Call(f"Upsample{kind}2D", [IMAGE, (12, 12), None, False], shaped((2, 4, 12, 12)), runs="meta")
      for kind in ("Bilinear", "Bicubic")),
    Call("AdaptiveAvgPool1D", [LINE, 2], shaped((2, 4, 2)), runs="meta"),
    Call("AdaptiveAvgPool2DExt", [IMAGE, (3, 2)], shaped((2, 4, 3, 2)), runs="meta"),
    Call("AdaptiveAvgPool3DExt", [VOLUME, (2, 2, 2)], shaped((2, 4, 2, 2, 2)), runs="meta"),
    Call("AdaptiveMaxPool1D", [LINE, 2], shaped((2, 4, 2), (2, 4, 2)), runs="meta"),
    Call("Im2ColExt", [IMAGE, (2, 2), (1, 1), (0, 0), (2, 2)], shaped((2, 16, 9)), runs="meta"),
    Call("Col2ImExt", [f(2, 16, 9), (6, 6), (2, 2), (1, 1), (0, 0), (2, 2)], shaped((2, 4, 6, 6)), runs="meta"),
    Call("MaxUnpool2DExt", [IMAGE, ints(9, 2, 4, 6, 6), 2], shaped((2, 4, 12, 12)), runs="meta"),
    Call("Pad", [IMAGE, ((0, 0), (0, 0), (1, 1), (0, 2))], lambda x, pairs: np.pad(x, pairs)),
    Call("Padding", [f(4, 2, 1)], lambda x, pad_dim_size: np.pad(x, [(0, 0)] * 2 + [(0, 3)]), {"pad_dim_size": 4}),
    *(Call(f"{kind}Pad{ndim}D", [x, (1, 1) * ndim], shaped((*x.shape[:2], *(size + 2 for size in x.shape[2:]))),
           runs="meta") for kind in ("Reflection", "Replication") for ndim, x in enumerate((LINE, IMAGE, VOLUME), 1)),
]  # fmt: skip
