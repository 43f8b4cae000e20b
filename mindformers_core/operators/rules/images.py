"""Rules of operators that resize, pad, cut up or sample images: batch and channels are parallel, planes are whole.

Planes that are resized by a whole number without looking at neighbours stay cut, too.
"""

from functools import partial
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import bound, dim_names, equation, parameters, per_dim, unary
from mindformers_core.operators.saved import INPUTS, INPUTS_AS_THEY_ARE, NOTHING, UNMEASURED, SavedByOperator
from mindformers_core.operators.signature import LocalCall, Signature, tensors_in, whole_signature
from mindformers_core.operators.words import word

_LINEAR = ({0},)
_NAMES = {"output_size": "size", "input": "x", "input_x": "x", "image": "x"}


def _resized(ndim, known, is_alone, results, *args, **named):
    """The last dims of `x` in another size, which is given or follows from scales: linear, but for the largest.

    A dim stays cut where no part needs its neighbours, by whole numbers only: `is_alone` is "means" of equal windows,
    down, "repeats" of nearest neighbours, which are exact by powers of two up, and by any number down, or "".
    """
    given, again = bound(known, args, named, _NAMES)
    x, size, scales = given["x"], given["size"], given.get("scales")
    old, lead = x.shape[-ndim:], x.ndim - ndim
    scaled = [length * scale for length, scale in zip(old, scales or ())]
    wanted = (size,) * ndim if isinstance(size, int) else tuple(map(int, scaled)) if size is None else tuple(size)
    shape = [length if new in (None, -1) else new for length, new in zip(old, wanted, strict=True)]
    special = given.get("align_corners") or given.get("half_pixel_centers") or (scales and scaled != shape)
    if lead < 1 or min(shape) < 1:
        raise ValueError(f"an image {x.shape} can't be resized to {wanted}")
    source, target = list(dim_names(x)[:lead]), list(dim_names(x)[:lead])
    sizes = {f"d{dim}": length for dim, length in enumerate(x.shape[:lead])}
    for dim, (length, new) in enumerate(zip(old, shape), lead):
        few, ratio = min(length, new), max(length, new) // min(length, new)
        parts = few * ratio == max(length, new) and not special and is_alone != ""
        parts = parts and (new <= length or is_alone == "repeats" and ratio & (ratio - 1) == 0)
        sizes |= {f"d{dim}": few, f"s{dim}": ratio} if parts else {f"i{dim}": length, f"o{dim}": new}
        both = (f"d{dim}", f"s{dim}")
        source.append((f"i{dim}",) if not parts else both[: 1 + (length >= new)])
        target.append((f"o{dim}",) if not parts else both[: 1 + (length <= new)])

    def localize(values, shapes):
        local = tuple(shapes[0][-ndim:])
        same = list(local) == shape
        return again(
            values, {} if same else {"size": local[0] if isinstance(size, int) and ndim == 1 else local, "scales": None}
        )

    more = {"whole": frozenset(name for name in sizes if name[0] != "d"), "linear": _LINEAR if results == 1 else ()}
    return Signature((tuple(source),), (tuple(target),) * results, sizes, local=LocalCall(localize=localize), **more)


_PIXELS, _CORNERS = "x size align_corners half_pixel_centers", "x size scales align_corners"
_CLASSIC = {"attributes": ("output_size",), "source": "(x)"}
_PLANES = (  # names, dims, parameters, when a dim stays cut, number of results, what the gradient keeps, and facts
    *((f"UpsampleNearest{ndim}D", ndim, "x size scales", "repeats", 1, INPUTS, {}) for ndim in (1, 2, 3)),
    ("UpsampleLinear1D", 1, _CORNERS, "", 1, UNMEASURED, {"operations": 3}),
    ("UpsampleBilinear2D UpsampleBicubic2D", 2, _CORNERS, "", 1, UNMEASURED, {"operations": 8}),
    ("UpsampleTrilinear3D", 3, _CORNERS, "", 1, INPUTS, {"operations": 16}),
    ("ResizeNearestNeighbor", 2, _PIXELS, "repeats", 1, NOTHING, {}),
    ("ResizeNearestNeighborV2", 2, _PIXELS, "repeats", 1, INPUTS_AS_THEY_ARE, {"numbers": (1,)}),
    ("ResizeBilinearV2 ResizeBicubic", 2, _PIXELS, "", 1, INPUTS_AS_THEY_ARE, {"numbers": (1,), "operations": 8}),
    ("ResizeLinear1D", 1, "x size coordinate_transformation_mode", "", 1, INPUTS_AS_THEY_ARE, {"operations": 3}),
    ("AdaptiveAvgPool1D", 1, "x size", "means", 1, UNMEASURED, {}),
    *((f"AdaptiveAvgPool{ndim}DExt", ndim, "x size", "means", 1, UNMEASURED, {}) for ndim in (2, 3)),
    *((f"AdaptiveAvgPool{ndim}D", ndim, "x size", "means", 1, NOTHING, _CLASSIC) for ndim in (2, 3)),
    ("AdaptiveMaxPool1D", 1, "x size", "", 2, UNMEASURED, {}),
    ("AdaptiveMaxPool2D", 2, "x size", "", 2, SavedByOperator("all", outputs=(1,)), {}),
)
for _names, _ndim, _text, _is_alone, _results, _saves, _facts in _PLANES:
    _rule = partial(_resized, _ndim, parameters(_text), _is_alone, _results)
    register_operator(*_names.split(), saves=_saves, **_facts)(_rule)


def _flat(flat, deep, sizes=lambda x, *_: {}, linear=True):
    """A rule: the equation `flat` for images of two dims, `deep` for three; `sizes` of other factors by arguments."""

    def rule(x, *args, **named):
        tensors, rest = [x, *tensors_in(args)], [value for value in args if not hasattr(value, "shape")]
        dims = flat if x.ndim <= len(flat.partition(",")[0].partition("->")[0].split()) else deep
        return equation(dims, *tensors, sizes=sizes(x, *rest, **named), linear=_LINEAR if linear else ())

    return rule


def _windows_in(x, kernel_size, dilation=1, padding=0, stride=1, image=None):
    """Places in a window, and windows."""
    parts = [per_dim(value, 2) for value in (kernel_size, stride, dilation, padding)]
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in zip(image or x.shape[2:], *parts)]
    return {"K": prod(parts[0]), "L": prod(counts)}


def _unfolded(x, ksizes, strides=1, dilations=1, pads=0):
    return _windows_in(x, ksizes, dilations, pads, strides)


def _folded(x, size, *windows, **named):
    found = _windows_in(x, *windows, image=size, **named)
    return found | {"c": x.shape[1] // found["K"]} | dict(zip("HW", size))


def _patches(x, sizes, strides, rates, padding):
    """`padding` is "same" or "valid", or its number, 1 or 2."""
    sides = zip(x.shape[2:], sizes, strides, rates)
    counts = [
        -(-n // s) if word("pad_mode", padding) == "same" else (n - r * (k - 1) - 1) // s + 1 for n, k, s, r in sides
    ]
    return {"K": prod(sizes) * x.shape[1]} | dict(zip("PQ", counts))


def _unpooled(x, ksize, strides=0, pads=0, output_shape=()):
    if output_shape:
        raise ValueError("an unpooling with an output_shape names the whole batch: leave it out")
    ndim = x.ndim - 2
    parts = zip(x.shape[2:], *(per_dim(value, ndim) for value in (ksize, strides or ksize, pads)))
    return dict(zip("OPQ"[3 - ndim :], [(size - 1) * s - 2 * p + k for size, k, s, p in parts]))


def _drawn_windows(x, ksize, output_shape, data_format=None):
    return dict(zip("OPQ"[5 - x.ndim :], per_dim(output_shape, x.ndim - 2)))


_DEFORMED = "n C H W, n T P Q -> n C P*K Q*L"
_SAMPLED = "n c H W, n p q T -> n c p q", "n c D H W, n o p q T -> n c o p q"
_UNPOOLING = "n c H W, n c H W -> n c P Q", "n c D H W, n c D H W -> n c O P Q"
_DRAWN = "n c H W, n c S -> n c P Q, n c P Q", "n c D H W, n c S -> n c O P Q, n c O P Q"
_DRAWN_POOL = _flat(*_DRAWN, _drawn_windows, False)
# Operators, their rule, own names of attributes that it takes, source, what the gradient keeps, operations an element
_EQUATIONS = (
    ("GridSampler2D GridSampler3D", _flat(*_SAMPLED), "", "", INPUTS, 8),
    ("ROIAlign",
     _flat("N c H W, r F -> r c P Q", "",
           lambda x, pooled_height, pooled_width, *_: dict(P=pooled_height, Q=pooled_width)),
     "pooled_height pooled_width", "(x, rois)", SavedByOperator((1,), as_they_are=True), 8),
    ("CropAndResize", _flat("N H W c, r F, r -> r P Q c", "", lambda x, size, *_: dict(zip("PQ", size)), False),
     "", "(x, boxes, box_indices, crop_size)", INPUTS_AS_THEY_ARE, 8),
    ("LRN", _flat("n C h w -> n C h w", "", linear=False), "", "(x)",
     SavedByOperator("all", outputs=(0,), as_they_are=True), 7),
    ("ChannelShuffle", _flat("n C h w -> n C h w", ""), "", "(x)", UNMEASURED, 0),
    ("Im2Col", _flat("n c H W -> n c K L", "", _unfolded), "ksizes strides dilations pads", "(x)",
     INPUTS_AS_THEY_ARE, 0),
    ("ExtractImagePatches", _flat("n C H W -> n K P Q", "", _patches), "", "", UNMEASURED, 0),
    ("Im2ColExt", _flat("n c H W -> n c*K L", "", _windows_in), "", "", UNMEASURED, 0),
    ("Col2ImExt", _flat("n c*K L -> n c H W", "", _folded), "", "", UNMEASURED, 1),
    ("MaxUnpool2D MaxUnpool3D", _flat(*_UNPOOLING, _unpooled), "ksize strides pads output_shape", "(x, argmax)",
     INPUTS_AS_THEY_ARE, 0),
    ("FractionalMaxPoolWithFixedKsize", _DRAWN_POOL, "ksize output_shape", "(x, samples)", UNMEASURED, 1),
    ("FractionalMaxPool3DWithFixedKsize", _DRAWN_POOL, "ksize output_shape", "(x, samples)",
     SavedByOperator((0,), outputs=(1,), as_they_are=True), 1),
    ("BoundingBoxEncode BoundingBoxDecode", _flat("r F, r F -> r F", "", linear=False), "", "(x, y)", UNMEASURED, 4),
    ("CheckValid", _flat("a F, M -> a", "", linear=False), "", "(x, y)", UNMEASURED, 4),
    ("DeformableOffsets", _flat(_DEFORMED, "", lambda x, ksize: dict(zip("KL", ksize)), False), "ksize", "",
     UNMEASURED, 8),
    ("MaxUnpool2DExt", _flat(_UNPOOLING[0], "", _unpooled), "", "", UNMEASURED, 0),
    ("UniqueWithPad", lambda x, pad: whole_signature(tensors_in((x, pad)), (x.shape, x.shape)), "", "(x, pad)",
     UNMEASURED, 4),
    ("IOU", _flat("a F, b F -> b a", "", linear=False), "", "(x, y)", UNMEASURED, 10),
    ("RotatedIou", _flat("n F a, n F b -> n a b", "", linear=False), "", "", UNMEASURED, 100),
    ("MultiScaleDeformableAttn", _flat("n K h c, L T, L, n q h L P T, n q h L P -> n q h*c", "", linear=False),
     "", "", UNMEASURED, 8),
)  # fmt: skip
for _names, _rule, _own, _source, _saves, _count in _EQUATIONS:
    _facts = {"attributes": tuple(_own.split()), "source": _source, "operations": _count}
    register_operator(*_names.split(), saves=_saves, **_facts)(_rule)


@register_operator("AffineGrid", saves=NOTHING, operations=6, source="(x, output_size)")
def affine_grid(theta, size, *align_corners):
    """The places of the pixels of images of this size."""
    sizes = dict(zip("nCPQ" if len(size) == 4 else "nCOPQ", size)) | {"T": len(size) - 2}
    output = "n P Q T" if len(size) == 4 else "n O P Q T"
    localize = lambda args, shapes: (args[0], (shapes[0][0], *size[1:]), *args[2:])  # noqa: E731
    return equation(f"n R S -> {output}", theta, sizes=sizes, linear=_LINEAR, local=LocalCall(localize=localize))


@register_operator("PReLU", saves=INPUTS, operations=2)
def prelu(x, weight):
    """A slope for every channel, or one for all."""
    return equation("..., 1 -> ..." if weight.shape == (1,) else "n c ..., c -> n c ...", x, weight)


def _blocks(is_back, x, block_shape, *given, **named):
    """Blocks of the last dims become a batch, or come from it, with paddings or crops: channels are parallel."""
    (borders,) = *given, *named.values()
    block, first = per_dim(block_shape, len(borders)), x.ndim - len(borders)
    parts = list(zip(x.shape[first:], block, map(sum, borders)))
    shape = [size * b - end if is_back else (size + end) // b for size, b, end in parts]
    sizes = {f"o{dim}": size for dim, size in enumerate(shape)}
    sizes["batch"] = x.shape[0] // prod(block) if is_back else x.shape[0] * prod(block)
    output = (("batch",), *dim_names(x)[1:first], *((f"o{dim}",) for dim in range(len(shape))))
    return unary(x, output, sizes=sizes, whole=(0, *range(first, x.ndim)), linear=_LINEAR)


for _name, _is_back, _borders in (("SpaceToBatchND", False, "paddings"), ("BatchToSpaceND", True, "crops")):
    _facts = {"attributes": ("block_shape", _borders), "source": "(x)", "saves": NOTHING}
    register_operator(_name, **_facts)(partial(_blocks, _is_back))
