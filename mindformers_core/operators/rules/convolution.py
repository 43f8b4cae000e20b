"""Rules of convolutions and pooling over n dims: a cut dim sends the borders of its parts, where windows reach over.

Batch and channels are parallel. A dim of which every part makes an equal part of the result, whose size is that of the
dim over the stride, is the factor `o0`, `o1`, … of both, with the stride as its minor factor.
"""

from functools import partial
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import bound, parameters, per_dim
from mindformers_core.operators.saved import INPUTS_AS_THEY_ARE, NOTHING, UNMEASURED, SavedByOperator
from mindformers_core.operators.signature import LocalCall, Signature, is_float
from mindformers_core.operators.words import WORDS, word

_ALIASES = {"group": "groups", "ksize": "kernel_size", "strides": "stride", "input": "x"}
_ALIASES |= dict.fromkeys(("pads", "pad_list", "pad"), "padding")


class _Windows:
    """The windows of an operator along the dims of an image.

    Attributes:
        counts: of windows, for every dim.
        long, short: factors of the dims of the image, and of the windows.
        sizes: of these factors.
        cut: the factors that can be sharded.
        halos: as of a `LocalCall`, by place among the dims.
        padded: whether an algorithm is needed where a dim is cut: there is a halo, or padding at the image's edges.
    """

    def __init__(self, image, settings, ceil=False, uneven=False):
        self.counts, self.long, self.short, self.sizes, self.cut, self.halos = [], [], [], {}, [], {}
        for place, (size, (length, step, spread, (before, behind))) in enumerate(zip(image, zip(*settings))):
            reach, names = spread * (length - 1), (f"o{place}", f"i{place}")
            rest = size + before + behind - reach - 1
            count = floor = rest // step + 1
            if rest < 0:
                raise ValueError(f"windows of {tuple(settings[0])} don't fit into {tuple(image)}")
            count += bool(ceil and rest % step and count * step < size + before)
            parts = count * step == size and before <= reach and (count == floor or uneven)
            self.cut += names[:1] * parts
            self.sizes |= {names[0]: count, names[1]: step if parts else size}
            end = max(behind, (count - 1) * step + reach + 1 - size - before)
            self.halos[place] = before, max(reach - before - step + 1, 0) * parts, end
            self.counts.append(count)
            self.long.append(names if parts else names[1:])
            self.short.append(names[:1])
        self.padded = any(map(any, self.halos.values()))

    def signature(self, first, inputs, outputs, sizes, algorithm, localize, unpadded, **more):
        """The `Signature`: dims, from `first` on, that need borders are cut by an algorithm, `unpadded` by itself."""
        halos = {first + place: halo for place, halo in self.halos.items()}
        if self.padded or algorithm == "halo_with_index":
            more["distributed"] = dict.fromkeys(self.cut, algorithm)

        def localized(values, shapes):
            cut = self.padded and list(shapes[0][first:]) != self.counts
            return localize(values, shapes[0], unpadded if cut and more.get("distributed") else {})

        whole = frozenset(sizes | self.sizes) - {"n", "g", "c", "o", *self.cut} | more.pop("whole", set())
        return Signature(
            inputs, outputs, sizes | self.sizes, whole=whole, local=LocalCall(None, localized, halos), **more
        )


def _pads(mode, pad, image, kernel, stride, dilation):
    """Pairs (before, behind) of a padding: by its mode, or one number a dim, or two."""
    mode = word("pad_mode", mode).lower()
    if mode == "same":
        reach = [spread * (length - 1) + 1 for length, spread in zip(kernel, dilation)]
        missing = [max((-(-n // step) - 1) * step + r - n, 0) for n, step, r in zip(image, stride, reach)]
        return [(amount // 2, amount - amount // 2) for amount in missing]
    if mode not in (known := WORDS["pad_mode"].values()):
        raise ValueError(f"a padding {mode!r} is not one of {', '.join(known)}")
    pad = (0,) if mode == "valid" else (pad,) if isinstance(pad, int) else tuple(pad)
    if len(pad) == 2 * len(image):
        return list(zip(pad[::2], pad[1::2]))
    return [(pad[dim % len(pad)],) * 2 for dim in range(len(image))]


def _batch(x, ndim, data_format):
    """Factors of the batch's dim, which an image may lack."""
    if word("data_format", data_format) not in ("NCHW", "NCDHW") or x.ndim not in (ndim + 1, ndim + 2):
        raise ValueError(f"an image is (batch, channels, {ndim} dims), not {x.shape}, {data_format}")
    return (("n",),) * (x.ndim - ndim - 1)


def _convolution(ndim, known, is_transposed, *args, **named):
    """`x` (batch, channels in, dims) by `weight` (channels out, channels in / groups, dims): a sum over windows.

    Channels in are summed; groups are the parallel part of the channels. A transposed one has a weight (channels in,
    channels out / groups, dims), makes an image of its windows, and is cut where they don't overlap.
    """
    given, again = bound(known, args, named, _ALIASES)
    x, weight, bias, groups = given["x"], given["weight"], given.get("bias"), given["groups"]
    batch, is_classic = _batch(x, ndim, given.get("data_format", 0)), "data_format" in given
    place, head = len(batch), ("g",) * (groups > 1)
    first, second = "co" if is_transposed else "oc"
    sizes = {"n": x.shape[0], "g": groups, first: weight.shape[0] // groups, second: weight.shape[1]}
    fits = weight.ndim == ndim + 2 and x.shape[place] == sizes["c"] * groups and not weight.shape[0] % groups
    if not fits or (bias is not None and bias.shape != (sizes["o"] * groups,)):
        raise ValueError(f"a weight {weight.shape} in {groups} groups doesn't fit an image {x.shape}")
    kernel, padding = weight.shape[2:], given.get("padding", given.get("pad"))
    settings = [kernel, per_dim(given["stride"], ndim), per_dim(given["dilation"], ndim)]
    mode = padding if isinstance(padding, str) else given.get("pad_mode", "pad")
    image = _result(given, mode, padding, x.shape[-ndim:], settings) if is_transposed else x.shape[-ndim:]
    windows = _Windows(image, [*settings, _pads(mode, padding, image, *settings)])
    if is_transposed and tuple(windows.counts) != x.shape[-ndim:]:
        raise ValueError(f"an image {x.shape} isn't what windows of {tuple(kernel)} make of {tuple(image)}")
    if is_transposed and windows.padded:
        windows.cut.clear()
    kernels = {f"k{dim}": size for dim, size in enumerate(kernel)}
    used = {"c", "o", *head, *"n"[: len(batch)]}
    sizes = {name: size for name, size in sizes.items() if name in used} | kernels
    ins, outs = (*batch, (*head, "c")), (*batch, (*head, "o"))
    tails = (windows.short, windows.long) if is_transposed else (windows.long, windows.short)
    weights = (*head, first), (second,), *((name,) for name in kernels)
    inputs = ((*ins, *tails[0]), weights, *(((outs[-1],),) * (bias is not None)))
    more = {"linear": ({0, 2}, {1, 2}), "added": (2,)} if bias is not None else {"linear": ({0}, {1})}

    def localize(values, shape, unpadded):
        groups = max(shape[place] // sizes["o"], 1)
        counts = {"in_channel": sizes["c"] * groups, "out_channel": shape[place], "groups": groups}
        if "input_size" in given:  # its channels out are those of the convolution that it is the gradient of
            counts |= {"input_size": tuple(shape), "out_channel": sizes["c"] * groups}
        return again(values, unpadded | counts)

    more |= {"reduced": {"c": "sum"}, "whole": {"c"} if is_transposed and is_classic else set()}  # its number is given
    unpadded = {"padding": "valid" if isinstance(padding, str) else 0, "pad_mode": "valid", "pad": 0}
    return windows.signature(place + 1, inputs, ((*outs, *tails[1]),), sizes, "halo", localize, unpadded, **more)


def _result(given, mode, padding, image, settings):
    """Sizes of the dims of a transposed convolution's result."""
    if "input_size" in given:
        return tuple(given["input_size"])[-len(image) :]
    kernel, stride, dilation = settings
    if mode == "same":
        return tuple(size * step for size, step in zip(image, stride))
    parts = zip(image, kernel, stride, dilation, per_dim(given["output_padding"], len(image)))
    sizes = [(size - 1) * step + spread * (k - 1) + 1 + more for size, k, step, spread, more in parts]
    return tuple(size - sum(pad) for size, pad in zip(sizes, _pads(mode, padding, image, *settings)))


_CLASSIC = "out_channel kernel_size mode=1 pad_mode pad=0 stride=1 dilation=1 groups=1"
_FORMAT = {n: {"pad_mode": "valid", "data_format": layout} for n, layout in ((2, "NCHW"), (3, "NCDHW"))}
_EXT = parameters("x weight bias stride=1 padding=0 dilation=1 groups=1")
_TRANSPOSED = parameters("x weight bias stride=1 padding=0 output_padding=0 groups=1 dilation=1")
_BACKWARD = "input_size out_channel kernel_size pad_mode pad=0 pad_list mode=1 stride=1 dilation=1 groups=1 data_format"
_OTHER = SavedByOperator(inputs_by_need={0: (1,), 1: (0,)}, as_they_are=True)
_3D = parameters(f"x weight in_channel {_CLASSIC} output_padding=0 data_format", **_FORMAT[3])
_CONVOLUTIONS = (  # names, dims, parameters, whether transposed, source, what the gradient keeps
    *((f"Conv{n}DExt Conv{n}DPadding", n, _EXT, False, "", UNMEASURED) for n in (1, 2, 3)),
    *((f"Conv{n}D", n, parameters(f"x weight {_CLASSIC} data_format", **_FORMAT[n]), False, "(x, w)", _OTHER)
      for n in (2, 3)),
    ("ConvTranspose2D", 2, _TRANSPOSED, True, "", UNMEASURED),
    ("Conv2DTranspose Conv2DBackpropInput", 2, parameters(f"x weight {_BACKWARD}", **_FORMAT[2]), True, "(x, w, size)",
     INPUTS_AS_THEY_ARE),
    ("Conv3DTranspose", 3, _3D, True, "(x, w)", _OTHER),
)  # fmt: skip
for _names, _ndim, _given, _is_transposed, _source, _saves in _CONVOLUTIONS:
    _own = ["group" if name == "groups" else name for name in _given if name not in ("x", "weight", "input_size")]
    _facts = {"attributes": tuple(_own), "source": _source} if _source else {}
    _facts |= {"saves": _saves, "operations": lambda sizes: 2 * prod(sizes[name] for name in sizes if name[0] != "i")}
    _rule = partial(_convolution, _ndim, _given, _is_transposed)
    register_operator(*_names.split(), algorithms=("halo",), **_facts)(_rule)


def _pooling_algorithm(is_largest, results):
    return "halo" if not is_largest else "halo_of_largest" if results == 1 else "halo_with_index"


def _pooled(ndim, known, is_largest, results, *args, **named):
    """The largest (and its position in the image), or the mean, of every window: a mean is linear.

    A mean that leaves out what is padded, or windows at the end that are cut off, need their dims whole.
    """
    given, again = bound(known, args, named, _ALIASES)
    x, mode, image = given["x"], given.get("pad_mode", "pad"), given["x"].shape[-ndim:]
    batch, kernel = _batch(x, ndim, given.get("data_format", 0)), per_dim(given["kernel_size"], ndim)
    settings = [kernel, per_dim(given["stride"] or kernel, ndim), per_dim(given.get("dilation", 1), ndim)]
    pads = _pads(mode, given.get("padding", 0), image, *settings)
    windows = _Windows(image, [*settings, pads], given.get("ceil_mode"), is_largest)
    if any(map(any, pads)) and not (is_float(x.dtype) if is_largest else given.get("count_include_pad")):
        windows.cut.clear()
    sizes = {"c": x.shape[len(batch)]} | ({"n": x.shape[0]} if batch else {})
    unpadded = {"padding": 0} | ({"ceil_mode": False} if given.get("ceil_mode") else {})
    if word("pad_mode", mode).lower() == "same":
        unpadded["pad_mode"] = 2 if isinstance(mode, int) else "valid"
    algorithm = _pooling_algorithm(is_largest, results)
    names, outputs = (*batch, ("c",), *windows.long), ((*batch, ("c",), *windows.short),) * results
    more = {"linear": () if is_largest else ({0},)}
    localize = lambda values, shape, changed: again(values, changed)  # noqa: E731
    return windows.signature(len(batch) + 1, (names,), outputs, sizes, algorithm, localize, unpadded, **more)


_OLD = "x kernel_size=1 stride=1 pad_mode"
_NEW = "x kernel_size stride padding=0 ceil_mode count_include_pad=1"
_INDEXED = "x kernel_size stride padding=0 dilation=1 ceil_mode"
_POOLS = (  # operator, dims, parameters, whether it takes the largest, number of results, own names of its attributes
    ("MaxPool", 2, f"{_OLD} data_format", True, 1, "kernel_size strides pad_mode data_format"),
    ("AvgPool", 2, f"{_OLD} data_format", False, 1, "kernel_size strides pad_mode data_format"),
    ("MaxPool3D", 3, f"{_OLD} padding=0 ceil_mode data_format", True, 1,
     "kernel_size strides pad_mode pad_list ceil_mode data_format"),
    ("AvgPool3D", 3, f"{_OLD} padding=0 ceil_mode count_include_pad=1 divisor_override=0 data_format", False, 1,
     "kernel_size strides pad_mode pad ceil_mode count_include_pad divisor_override data_format"),
    ("MaxPoolWithArgmaxV2", 2, f"{_INDEXED} argmax_type", True, 2,
     "kernel_size strides pads dilation ceil_mode argmax_type"),
    ("MaxPool3DWithArgmax", 3, f"{_INDEXED} data_format argmax_type", True, 2,
     "ksize strides pads dilation ceil_mode data_format argmax_type"),
    ("AvgPool1D", 1, _NEW, False, 1, ""),
    ("AvgPool2D", 2, f"{_NEW} divisor_override", False, 1, ""),
    ("AvgPool3DExt", 3, f"{_NEW} divisor_override", False, 1, ""),
)  # fmt: skip
_KEPT = {count: SavedByOperator("all", outputs=(count - 1,), as_they_are=True) for count in (1, 2)}
for _name, _ndim, _given, _is_largest, _results, _own in _POOLS:
    _given = parameters(_given)
    _given |= {name: value for name, value in _FORMAT.get(_ndim, {}).items() if name in _given}
    _facts = {"attributes": tuple(_own.split()), "source": "" if _name == "AvgPool" else "(x)"} if _own else {}
    _saves = _KEPT[_results] if _is_largest or _name == "AvgPool" else NOTHING if _own else UNMEASURED
    _facts |= {"saves": _saves, "algorithms": (_pooling_algorithm(_is_largest, _results),)}
    register_operator(_name, **_facts)(partial(_pooled, _ndim, _given, _is_largest, _results))
