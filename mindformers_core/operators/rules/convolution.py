"""Rules of convolutions and pooling over n dims: a cut dim sends the borders of its parts, where windows reach over.

Batch and channels are parallel. A dim of which every part makes an equal part of the result, whose size is that of the
dim over the stride, is the factor `o0`, `o1`, … of both, with the stride as its minor factor.
"""

from functools import partial
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import bound, per_dim
from mindformers_core.operators.saved import UNMEASURED, SavedByOperator
from mindformers_core.operators.signature import Signature, is_float

_PAD_MODES = ("pad", "same", "valid")  # by the number that MindSpore gives them
_FORMATS = ("NCHW", "NCDHW", 0, 14)
_IN_PLACE = SavedByOperator("all", outputs=(0,), as_they_are=True)


class _Windows:
    """The windows of an operator along the dims of an image.

    Attributes:
        counts: of windows, for every dim.
        sizes: of the factors of the dims.
        inputs, outputs: factors of the dims of image and result.
        cut: the factors that can be sharded.
        halos: as of a `Signature`, by place among the dims.
    """

    def __init__(self, image, kernel, stride, dilation, pads, ceil=False, uneven=False):
        self.counts, self.sizes, self.inputs, self.outputs = [], {}, [], []
        self.cut, self.halos = [], {}
        for place, (size, length, step, spread, (before, behind)) in enumerate(
            zip(image, kernel, stride, dilation, pads)
        ):
            reach = spread * (length - 1)
            rest = size + before + behind - reach - 1
            count = floor = rest // step + 1
            if ceil and rest % step and count * step < size + before:
                count += 1
            if rest < 0:
                raise ValueError(f"windows of {tuple(kernel)} don't fit into {tuple(image)}")
            names = f"o{place}", f"i{place}"
            self.counts.append(count)
            end = max(behind, (count - 1) * step + reach + 1 - size - before)
            if count * step == size and before <= reach and (count == floor or uneven):
                self.cut.append(names[0])
                self.sizes |= {names[0]: count} | ({names[1]: step} if step > 1 else {})
                self.inputs.append(names if step > 1 else names[:1])
                self.halos[place] = before, max(reach - before - step + 1, 0), end
            else:
                self.sizes |= {names[0]: count, names[1]: size}
                self.inputs.append(names[1:])
                self.halos[place] = before, 0, end
            self.outputs.append(names[:1])

    @property
    def padded(self):
        """Whether an algorithm is needed where a dim is cut: borders, or padding at the image's edges only."""
        return any(map(any, self.halos.values()))


def _same(size, length, stride, spread):
    missing = max((-(-size // stride) - 1) * stride + spread * (length - 1) + 1 - size, 0)
    return missing // 2, missing - missing // 2


def _pads(mode, pad, image, *windows):
    """Pairs (before, behind) of a padding: by its mode, or one number a dim, or two."""
    mode = _PAD_MODES[mode] if isinstance(mode, int) else mode.lower()
    if mode == "same":
        return [_same(*along) for along in zip(image, *windows)]
    if mode not in ("pad", "valid"):
        raise ValueError(f"a padding {mode!r} is not one of {', '.join(_PAD_MODES)}")
    pad = (0,) if mode == "valid" else (pad,) if isinstance(pad, int) else tuple(pad)
    pairs = list(zip(pad[::2], pad[1::2])) if len(pad) == 2 * len(image) else []
    return pairs or [(pad[dim % len(pad)],) * 2 for dim in range(len(image))]


def _operations(sizes):
    return 2 * prod(size for factor, size in sizes.items() if factor[0] != "i")


_CONVOLVED = {"x": None, "weight": None}
_CLASSIC = {"out_channel": None, "kernel_size": None, "mode": 1, "pad_mode": "valid", "pad": 0, "stride": 1}
_CLASSIC |= {"dilation": 1, "groups": 1, "data_format": "NCHW"}
_ALIASES = {"group": "groups", "ksize": "kernel_size", "strides": "stride", "pads": "padding", "pad_list": "padding",
            "pad": "padding", "input": "x"}  # fmt: skip
_ATTRIBUTES = ("out_channel", "kernel_size", "mode", "pad_mode", "pad", "stride", "dilation", "group", "data_format")
_SAVES = SavedByOperator(inputs_by_need={0: (1,), 1: (0,)}, as_they_are=True)
_EXT = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _convolution(ndim, parameters, *args, **named):
    """`x` (batch, channels in, dims) by `weight` (channels out, channels in / groups, dims): a sum over windows.

    Channels in are summed. With groups these are the parallel part of the channels.
    """
    given, again = bound(parameters, args, named, _ALIASES)
    x, weight, bias, groups = given["x"], given["weight"], given.get("bias"), given["groups"]
    batch = _batch(x, ndim, given.get("data_format", "NCHW"))
    fits = weight.ndim == ndim + 2 and x.shape[len(batch)] == weight.shape[1] * groups and not weight.shape[0] % groups
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"a weight {weight.shape} in {groups} groups doesn't fit an image {x.shape}")
    image, kernel = x.shape[-ndim:], weight.shape[2:]
    stride, dilation = per_dim(given["stride"], ndim), per_dim(given["dilation"], ndim)
    padding = given.get("padding", given.get("pad"))
    mode = padding if isinstance(padding, str) else given.get("pad_mode", "pad")
    windows = _Windows(image, kernel, stride, dilation, _pads(mode, padding, image, kernel, stride, dilation))
    channels = ("g", "c"), ("g", "o") if groups > 1 else ("o",)
    sizes = {"g": groups, "c": weight.shape[1], "o": weight.shape[0] // groups, "n": x.shape[0]}
    sizes = {name: size for name, size in sizes.items() if (name != "g" or groups > 1) and (name != "n" or batch)}
    kernels = [(f"k{dim}",) for dim in range(ndim)]
    sizes |= windows.sizes | {f"k{dim}": size for dim, size in enumerate(kernel)}
    inputs = [(*batch, channels[0] if groups > 1 else ("c",), *windows.inputs), (channels[1], ("c",), *kernels)]
    inputs += [] if bias is None else [(channels[1],)]
    outputs = (*batch, channels[1], *windows.outputs)
    more = {"linear": ({0, 2}, {1, 2}), "added": (2,)} if bias is not None else {"linear": ({0}, {1})}

    def localize(values, shapes):
        local, changed = shapes[0], {}
        if windows.padded and tuple(local[-ndim:]) != tuple(windows.counts):
            changed = {"padding": "valid"} if isinstance(padding, str) else {"padding": 0}
            changed = {"pad_mode": "valid", "pad": 0} if "pad_mode" in parameters else changed
        if local[len(batch)] != weight.shape[0]:
            changed |= {"out_channel": local[len(batch)], "groups": max(local[len(batch)] // sizes["o"], 1)}
        return again(values, changed)

    return _windowed(windows, inputs, (outputs,), sizes, "halo", len(batch) + 1, {"c": "sum"}, localize, **more)


def _windowed(windows, inputs, outputs, sizes, algorithm, first, reduced, localize, **more):
    """The `Signature`: dims from `first` on are cut by an algorithm where windows need borders."""
    parallel = {"n", "g", "c", "o", *windows.cut}
    if windows.padded or algorithm == "halo_with_index":
        more["distributed"] = dict.fromkeys(windows.cut, algorithm)
        more["halos"] = {first + place: halo for place, halo in windows.halos.items()}
    whole = frozenset(sizes) - parallel
    return Signature(tuple(inputs), tuple(outputs), sizes, reduced, whole=whole, localize=localize, **more)


def _batch(x, ndim, data_format):
    if data_format not in _FORMATS or x.ndim not in (ndim + 1, ndim + 2):
        raise ValueError(f"an image is (batch, channels, {ndim} dims), not {x.shape}, {data_format}")
    return (("n",),) * (x.ndim - ndim - 1)


for _ndim, _name in enumerate(("Conv1D", "Conv2D", "Conv3D"), 1):
    _facts = {"operations": _operations, "saves": UNMEASURED}
    _rule = partial(_convolution, _ndim, _CONVOLVED | _EXT)
    register_operator(f"{_name}Ext", f"{_name}Padding", **_facts)(_rule)
    if _ndim > 1:
        _facts |= {"saves": _SAVES, "attributes": _ATTRIBUTES, "source": "(x, w)"}
        register_operator(_name, **_facts)(partial(_convolution, _ndim, _CONVOLVED | _CLASSIC))


def _transposed(ndim, parameters, *args, **named):
    """The transpose of a convolution, by `weight` (channels in, channels out / groups, dims).

    A dim may be cut where windows don't overlap: the stride is the kernel's size. Channels in of a classic primitive
    are whole, for it has their number as an attribute.
    """
    given, again = bound(parameters, args, named, _ALIASES)
    x, weight, bias, groups = given["x"], given["weight"], given.get("bias"), given["groups"]
    batch = _batch(x, ndim, given.get("data_format", "NCHW"))
    is_classic, place = "data_format" in parameters, len(batch)
    if weight.ndim != ndim + 2 or x.shape[place] != weight.shape[0] or weight.shape[0] % groups:
        raise ValueError(f"a weight {weight.shape} in {groups} groups doesn't fit an image {x.shape}")
    image, kernel = x.shape[-ndim:], weight.shape[2:]
    shape = _transposed_shape(given, image, kernel, ndim)
    head = ("g",) if groups > 1 else ()
    sizes = dict(zip(head, (groups,))) | {"c": weight.shape[0] // groups, "o": weight.shape[1]}
    sizes |= {"n": x.shape[0]} if batch else {}
    whole, tails = {"c"} if is_classic else set(), []
    stride, dilation = per_dim(given["stride"], ndim), per_dim(given["dilation"], ndim)
    for dim, (size, length, result) in enumerate(zip(image, kernel, shape)):
        sizes |= {f"i{dim}": size, f"k{dim}": length}
        whole.add(f"k{dim}")
        if length == stride[dim] and dilation[dim] == 1 and result == size * length:
            tails.append((f"i{dim}", f"s{dim}"))
            sizes[f"s{dim}"] = length
            whole.add(f"s{dim}")
        else:
            tails.append((f"o{dim}",))
            sizes[f"o{dim}"] = result
            whole |= {f"i{dim}"}
    images, kernels = [(f"i{dim}",) for dim in range(ndim)], [(f"k{dim}",) for dim in range(ndim)]
    inputs = [(*batch, (*head, "c"), *images), ((*head, "c"), ("o",), *kernels)]
    inputs += [] if bias is None else [((*head, "o"),)]
    more = {"linear": ({0, 2}, {1, 2}), "added": (2,)} if bias is not None else {"linear": ({0}, {1})}

    def localize(values, shapes):
        channels = shapes[0][place]
        parts = {} if channels == groups * sizes["o"] else {"groups": max(channels // sizes["o"], 1)}
        changed = {"input_size": tuple(shapes[0])} if "input_size" in parameters else {}
        if is_classic and parts:
            local_in = weight.shape[0] * parts["groups"] // groups
            changed |= {"in_channel": local_in, "out_channel": channels if ndim == 3 else local_in}
        return again(values, changed | parts)

    output = (*batch, (*head, "o"), *tails)
    return Signature(tuple(inputs), (output,), sizes, {"c": "sum"}, frozenset(whole), localize=localize, **more)


def _transposed_shape(given, image, kernel, ndim):
    """Sizes of the dims of the result."""
    if "input_size" in given:
        return tuple(given["input_size"])[-ndim:]
    stride, dilation = per_dim(given["stride"], ndim), per_dim(given["dilation"], ndim)
    more, mode = per_dim(given["output_padding"], ndim), given.get("pad_mode", "pad")
    if mode == "same":
        return tuple(size * step for size, step in zip(image, stride))
    pads = _pads(mode, given.get("padding", given.get("pad")), image)
    parts = zip(image, kernel, stride, dilation, more, pads)
    return tuple((size - 1) * step + d * (k - 1) + 1 + extra - sum(pad) for size, k, step, d, extra, pad in parts)


_BACKWARD = {"input_size": None, "out_channel": None, "kernel_size": None, "pad_mode": "valid", "pad": 0,
             "pad_list": None, "mode": 1, "stride": 1, "dilation": 1, "groups": 1, "data_format": "NCHW"}  # fmt: skip
_BACKWARD_3D = {"in_channel": None} | _CLASSIC | {"data_format": "NCDHW"}
_BACKWARD_3D = dict(list(_BACKWARD_3D.items())[:-1]) | {"output_padding": 0, "data_format": "NCDHW"}
_TRANSPOSED = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def _own_names(parameters):
    return tuple("group" if name == "groups" else name for name in parameters if name not in ("x", "weight"))


register_operator("ConvTranspose2D", saves=UNMEASURED, operations=_operations)(
    partial(_transposed, 2, _CONVOLVED | _TRANSPOSED)
)
register_operator(
    "Conv2DTranspose", "Conv2DBackpropInput", saves=UNMEASURED, operations=_operations,
    attributes=_own_names(_BACKWARD)[1:], source="(x, w, input_size)",
)(partial(_transposed, 2, _CONVOLVED | _BACKWARD))  # fmt: skip
register_operator(
    "Conv3DTranspose", saves=UNMEASURED, operations=_operations, attributes=_own_names(_BACKWARD_3D), source="(x, w)"
)(partial(_transposed, 3, _CONVOLVED | _BACKWARD_3D))


_X = {"x": None, "kernel_size": 1}
_OLD = {"stride": 1, "pad_mode": "valid", "data_format": "NCHW"}
_NEW = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True, "divisor_override": None}
_INDEXED = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
_POOL_3D = {"stride": 1, "pad_mode": "valid", "padding": 0, "ceil_mode": False}
_MEAN_3D = {"count_include_pad": True, "divisor_override": 0, "data_format": "NCDHW"}
# Operator, dims, parameters, whether it takes the largest of a window (else the mean), number of results, its own names
# of its attributes
_POOLS = (
    ("MaxPool", 2, _OLD, True, 1, "kernel_size strides pad_mode data_format"),
    ("AvgPool", 2, _OLD, False, 1, "kernel_size strides pad_mode data_format"),
    ("MaxPool3D", 3, _POOL_3D | {"data_format": "NCDHW"}, True, 1,
     "kernel_size strides pad_mode pad_list ceil_mode data_format"),
    ("AvgPool3D", 3, _POOL_3D | _MEAN_3D, False, 1,
     "kernel_size strides pad_mode pad ceil_mode count_include_pad divisor_override data_format"),
    ("MaxPoolWithArgmaxV2", 2, _INDEXED | {"argmax_type": None}, True, 2,
     "kernel_size strides pads dilation ceil_mode argmax_type"),
    ("MaxPool3DWithArgmax", 3, _INDEXED | {"data_format": "NCDHW", "argmax_type": None}, True, 2,
     "ksize strides pads dilation ceil_mode data_format argmax_type"),
    ("AvgPool1D", 1, dict(list(_NEW.items())[:-1]), False, 1, ""),
    ("AvgPool2D", 2, _NEW, False, 1, ""),
    ("AvgPool3DExt", 3, _NEW, False, 1, ""),
)  # fmt: skip


def _pooled(ndim, parameters, is_largest, results, *args, **named):
    """The largest (and its position in the image), or the mean, of every window: a mean is linear.

    A mean that leaves out what is padded, or windows at the end that are cut off, need their dims whole.
    """
    given, again = bound(parameters, args, named, _ALIASES)
    x = given["x"]
    batch = _batch(x, ndim, given.get("data_format") or "NCHW")
    kernel = per_dim(given["kernel_size"], ndim)
    stride = kernel if given["stride"] in (None, (), []) else per_dim(given["stride"], ndim)
    dilation, mode, image = per_dim(given.get("dilation", 1), ndim), given.get("pad_mode", "pad"), x.shape[-ndim:]
    pads = _pads(mode, given.get("padding", 0), image, kernel, stride, dilation)
    windows = _Windows(image, kernel, stride, dilation, pads, given.get("ceil_mode"), is_largest)
    counts_all = "padding" in parameters and given["count_include_pad"] if not is_largest else True
    if any(map(any, pads)) and not counts_all or (is_largest and not is_float(x.dtype)):
        windows.cut.clear()
    names = (*batch, ("c",), *windows.inputs)
    outputs = ((*batch, ("c",), *windows.outputs),) * results
    sizes = {"c": x.shape[len(batch)]} | windows.sizes | ({"n": x.shape[0]} if batch else {})
    unpadded = {"padding": 0} | ({"ceil_mode": False} if given.get("ceil_mode") else {})
    if str(mode).lower() in ("1", "same"):
        unpadded["pad_mode"] = 2 if isinstance(mode, int) else "valid"

    def localize(values, shapes):
        is_cut = windows.padded and tuple(shapes[0][-ndim:]) != tuple(windows.counts)
        return again(values, unpadded if is_cut else {})

    algorithm = "halo" if not is_largest else "halo_of_largest" if results == 1 else "halo_with_index"
    linear = () if is_largest else ({0},)
    return _windowed(windows, (names,), outputs, sizes, algorithm, len(batch) + 1, {}, localize, linear=linear)


for _name, _ndim, _given, _is_largest, _results, _own in _POOLS:
    _facts = {"attributes": tuple(_own.split()), "source": "" if _name == "AvgPool" else "(x)"} if _own else {}
    _saves = _IN_PLACE if _name in ("MaxPool", "AvgPool") else UNMEASURED
    register_operator(_name, saves=_saves, **_facts)(partial(_pooled, _ndim, _X | _given, _is_largest, _results))
