"""Rules of convolution, pooling and group norm of images (batch, channels, height, width): the last two are whole."""

from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import dim_names, dim_sizes, unary
from mindformers_core.operators.saved import SavedByOperator
from mindformers_core.operators.signature import Signature

_PAD_MODES = ("pad", "same", "valid")  # by the number that MindSpore gives them
_SETTINGS = {"pad_mode": "valid", "pad": 0, "stride": 1, "dilation": 1, "group": 1, "data_format": "NCHW"}
_POOL_SAVES = SavedByOperator("all", outputs=(0,), as_they_are=True)
_SAVES = SavedByOperator(inputs_by_need={0: (1,), 1: (0,)}, as_they_are=True)


def _operations(sizes):
    return 2 * prod(sizes[factor] for factor in ("n", "o", "oh", "ow", "c", "kh", "kw"))


@register_operator("Conv2D", attributes=tuple(_SETTINGS), saves=_SAVES, operations=_operations, source="(x, w)")
def convolution(x, weight, out_channel=None, kernel_size=None, mode=1, *settings, **named):
    """`x` by `weight` (channels out, channels in / group, height, width): a sum over windows and channels in.

    Channels out are whole, for the primitive has their number as an attribute; channels in, too, if there are groups.
    """
    pad_mode, pad, stride, dilation, group, data_format = (_SETTINGS | dict(zip(_SETTINGS, settings)) | named).values()
    _check_image(x, data_format)
    if weight.ndim != 4 or x.shape[1] != weight.shape[1] * group:
        raise ValueError(f"a weight {weight.shape} in {group} groups doesn't fit an image {x.shape}")
    height, width = _windows(x.shape[2:], weight.shape[2:], pad_mode, pad, _pair(stride), _pair(dilation))
    sizes = {"n": x.shape[0], "o": weight.shape[0], "c": weight.shape[1], "oh": height, "ow": width}
    sizes |= dict(zip(("h", "w", "kh", "kw"), (*x.shape[2:], *weight.shape[2:])))
    channels = ("c",)
    if group > 1:
        sizes["channels"], channels = x.shape[1], ("channels",)
    whole = set(sizes) - ({"n", "c"} if group == 1 else {"n"})
    image, kernel = (("n",), channels, ("h",), ("w",)), (("o",), ("c",), ("kh",), ("kw",))
    output = (("n",), ("o",), ("oh",), ("ow",))
    reduced = {"c": "sum"} if group == 1 else {}
    return Signature((image, kernel), (output,), sizes, reduced, whole=frozenset(whole), linear=({0}, {1}))


@register_operator("MaxPool", attributes=("kernel_size", "strides", "pad_mode", "data_format"), saves=_POOL_SAVES)
def max_pool(x, kernel_size=1, strides=1, pad_mode="valid", data_format="NCHW"):
    """The largest of every window."""
    return _pooled(x, kernel_size, strides, pad_mode, data_format, linear=())


@register_operator("AvgPool", saves=_POOL_SAVES)
def average_pool(x, kernel_size=1, strides=1, pad_mode="valid", data_format="NCHW"):
    """The mean of every window: linear."""
    return _pooled(x, kernel_size, strides, pad_mode, data_format, linear=({0},))


@register_operator("GroupNorm", saves=SavedByOperator("all", outputs=(1, 2)), operations=7)
def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
    """Every group of channels normalised: the result, mean and reciprocal standard deviation. Groups are parallel."""
    if x.ndim < 2 or x.shape[1] % num_groups:
        raise ValueError(f"the channels of {x.shape} don't make {num_groups} groups")
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    if any(parameter.shape != x.shape[1:2] for parameter in given):
        raise ValueError(f"scales of shape {[parameter.shape for parameter in given]} don't fit {x.shape}")
    channels = ("group", "member")
    names = (("d0",), channels, *dim_names(x)[2:])
    sizes = dim_sizes(x) | {"group": num_groups, "member": x.shape[1] // num_groups}
    del sizes["d1"]
    statistic = (("d0",), ("group",))
    inputs = (names, *((channels,),) * len(given))
    whole = frozenset(sizes) - {"d0", "group"}

    def localize(args, shapes):
        return (args[0], shapes[1][1], *args[2:])

    return Signature(inputs, (names, statistic, statistic), sizes, whole=whole, localize=localize)


def _pooled(x, kernel_size, strides, pad_mode, data_format, linear):
    """Batch and channels stay parallel."""
    _check_image(x, data_format)
    height, width = _windows(x.shape[2:], _pair(kernel_size), pad_mode, 0, _pair(strides), (1, 1))
    output = (*dim_names(x)[:2], ("oh",), ("ow",))
    return unary(x, output, sizes={"oh": height, "ow": width}, whole=(2, 3), linear=linear)


def _check_image(x, data_format):
    if data_format not in ("NCHW", 0) or x.ndim != 4:
        raise ValueError(f"an image is (batch, channels, height, width), NCHW, not {x.shape}, {data_format}")


def _pair(value):
    """Sizes of height and width: one number for both, a pair, or four numbers for all dims."""
    return (value, value) if isinstance(value, int) else tuple(value)[-2:]


def _windows(sizes, kernel, mode, pad, strides, dilation):
    """The number of windows along the height and along the width."""
    mode = _PAD_MODES[mode] if isinstance(mode, int) else mode.lower()
    pads = (pad,) * 4 if isinstance(pad, int) else tuple(pad)
    counts = []
    for place, (size, length, stride, step) in enumerate(zip(sizes, kernel, strides, dilation)):
        if mode == "same":
            counts.append(-(-size // stride))
            continue
        padded = size + sum(pads[2 * place : 2 * place + 2]) if mode == "pad" else size
        counts.append((padded - step * (length - 1) - 1) // stride + 1)
    if min(counts) < 1:
        raise ValueError(f"windows of {tuple(kernel)} don't fit into {tuple(sizes)}")
    return counts
