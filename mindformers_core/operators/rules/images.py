"""Rules of operators that resize, pad, cut up or sample images: batch and channels are parallel, planes are whole.

Planes that are resized by a whole number without looking at neighbours stay cut, too.
"""

from functools import partial
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import bound, dim_names, integers, per_dim, unary
from mindformers_core.operators.rules.elementwise import tensors_in
from mindformers_core.operators.saved import UNMEASURED
from mindformers_core.operators.signature import Signature

_LINEAR = ({0},)


def _planes(x, shape, is_alone, localize=None, outputs=1, linear=_LINEAR):
    """The last dims of `x` resized to `shape`; a dim stays cut where `is_alone(size, new size)`."""
    lead = x.ndim - len(shape)
    if lead < 1:
        raise ValueError(f"an image {x.shape} has no {len(shape)} dims behind its channels")
    source, target = list(dim_names(x)[:lead]), list(dim_names(x)[:lead])
    sizes, whole = {f"d{dim}": size for dim, size in enumerate(x.shape[:lead])}, set()
    for dim, (size, new) in enumerate(zip(x.shape[lead:], shape), lead):
        ratio = max(size, new) // max(min(size, new), 1)
        if min(size, new) > 0 and ratio * min(size, new) == max(size, new) and is_alone(size, new):
            sizes |= {f"d{dim}": min(size, new), f"s{dim}": ratio}
            long, short = (f"d{dim}", f"s{dim}") if ratio > 1 else (f"d{dim}",), (f"d{dim}",)
            source.append(long if size >= new else short)
            target.append(long if size <= new else short)
        else:
            sizes |= {f"i{dim}": size, f"o{dim}": new}
            source.append((f"i{dim}",))
            target.append((f"o{dim}",))
    whole = frozenset(name for name in sizes if name[0] != "d")
    more = {"whole": whole, "linear": linear, "localize": localize}
    return Signature((tuple(source),), (tuple(target),) * outputs, sizes, **more)


def _never(size, new):
    return False


def _by_repeating(size, new):
    """Nearest neighbours: exact by powers of two up, and by any number down."""
    return new <= size or (new // size) & (new // size - 1) == 0


_SIZE = {"x": None, "size": None, "align_corners": False, "half_pixel_centers": False}
_NEAREST = {"x": None, "size": None, "scales": None}
_SCALED = _NEAREST | {"align_corners": False}
_NAMES = {"output_size": "size", "input": "x", "input_x": "x", "image": "x"}


def _resized(ndim, parameters, is_alone, *args, **named):
    """Linear in the image; the size is given, or follows from scales."""
    given, again = bound(parameters, args, named, _NAMES)
    x, scales = given["x"], given.get("scales")
    if given["size"] is None:
        shape = tuple(int(size * scale) for size, scale in zip(x.shape[-ndim:], scales))
    else:
        shape = integers((per_dim(given["size"], ndim),), "a size")
    if given.get("align_corners") or given.get("half_pixel_centers") or (given["size"] and scales):
        is_alone = _never

    def localize(values, shapes):
        local = tuple(shapes[0][-ndim:])
        return again(values, {"size": local, "scales": None} if local != shape else {})

    return _planes(x, shape, is_alone, localize)


for _ndim in (1, 2, 3):
    _facts = {"saves": UNMEASURED, "operations": 2**_ndim}
    register_operator(f"UpsampleNearest{_ndim}D", **_facts)(partial(_resized, _ndim, _NEAREST, _by_repeating))
    _kinds = {1: ("UpsampleLinear1D",), 2: ("UpsampleBilinear2D", "UpsampleBicubic2D"), 3: ("UpsampleTrilinear3D",)}
    register_operator(*_kinds[_ndim], **_facts)(partial(_resized, _ndim, _SCALED, _never))
register_operator("ResizeNearestNeighbor", "ResizeNearestNeighborV2", saves=UNMEASURED, numbers=(1,))(
    partial(_resized, 2, _SIZE, _by_repeating)
)
register_operator("ResizeBilinearV2", "ResizeBicubic", saves=UNMEASURED, operations=8, numbers=(1,))(
    partial(_resized, 2, _SIZE, _never)
)
register_operator("ResizeLinear1D", saves=UNMEASURED, operations=3)(
    partial(_resized, 1, {"x": None, "size": None, "coordinate_transformation_mode": None}, _never)
)


def _adaptive(ndim, parameters, is_largest, *args, **named):
    """The mean or the largest, with its position, of windows that cover the image: means of equal windows stay cut."""
    given, again = bound(parameters, args, named, _NAMES)
    x, size = given["x"], given["size"]
    wanted = (size,) * ndim if isinstance(size, int) or size is None else tuple(size)
    shape = tuple(old if new in (None, -1) else new for old, new in zip(x.shape[-ndim:], wanted, strict=True))

    def localize(values, shapes):
        local = tuple(shapes[0][-ndim:])
        return again(values, {"size": local if ndim > 1 else local[0]} if local != shape else {})

    if is_largest:
        return _planes(x, shape, _never, outputs=2, linear=())
    return _planes(x, shape, lambda old, new: new <= old, localize)


_POOLED = {"x": None, "size": None}
for _name, _ndim in (("AdaptiveAvgPool1D", 1), ("AdaptiveAvgPool2DExt", 2), ("AdaptiveAvgPool3DExt", 3)):
    register_operator(_name, saves=UNMEASURED)(partial(_adaptive, _ndim, _POOLED, False))
for _name, _ndim in (("AdaptiveAvgPool2D", 2), ("AdaptiveAvgPool3D", 3)):
    _facts = {"attributes": ("output_size",), "source": "(x)"}
    register_operator(_name, saves=UNMEASURED, **_facts)(partial(_adaptive, _ndim, _POOLED, False))
for _name, _ndim in (("AdaptiveMaxPool1D", 1), ("AdaptiveMaxPool2D", 2)):
    register_operator(_name, saves=UNMEASURED)(partial(_adaptive, _ndim, _POOLED, True))


@register_operator("ReflectionPad1D", "ReflectionPad2D", "ReflectionPad3D", saves=UNMEASURED)
@register_operator("ReplicationPad1D", "ReplicationPad2D", "ReplicationPad3D", saves=UNMEASURED)
def padded_by_itself(x, padding):
    """`x` with its own elements around it: pairs (before, behind) from the last dim on."""
    padding = integers((padding,), "a padding")
    pairs = list(zip(padding[::2], padding[1::2]))[::-1]
    return _padded(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs)


@register_operator("Pad", attributes=("paddings",), source="(x)", saves=UNMEASURED)
def pad_all_dims(x, paddings):
    """`x` with zeros around it: a pair (before, behind) for every dim."""
    return _padded(x, paddings)


def _padded(x, pairs):
    names, whole = list(dim_names(x)), [dim for dim, pair in enumerate(pairs) if any(pair)]
    for dim in whole:
        names[dim] = (f"padded{dim}",)
    sizes = {f"padded{dim}": x.shape[dim] + sum(pairs[dim]) for dim in whole}
    return unary(x, names, sizes=sizes, whole=whole, linear=_LINEAR)


def _along(equation, tensors, sizes=(), **more):
    """The `Signature` of an equation "n c H W, n p q -> n c P": capitals are whole; `sizes` of what no input has."""
    left, _, right = equation.partition("->")
    inputs, outputs = ([[*part.split()] for part in side.split(",")] for side in (left, right))
    known = dict(sizes)
    for dims, tensor in zip(inputs, tensors, strict=True):
        if len(dims) != tensor.ndim:
            raise ValueError(f"a tensor {tensor.shape} doesn't have the dims {' '.join(dims)}")
        for name, size in zip(dims, tensor.shape):
            if known.setdefault(name, size) != size:
                raise ValueError(f"shapes {[tensor.shape for tensor in tensors]} don't fit {equation}")
    used = {name for dims in (*inputs, *outputs) for name in dims}
    factors = [[tuple((name,) for name in dims) for dims in side] for side in (inputs, outputs)]
    whole = frozenset(name for name in used if name.isupper())
    return Signature(*map(tuple, factors), {name: known[name] for name in used}, whole=whole, **more)


@register_operator("GridSampler2D", "GridSampler3D", saves=UNMEASURED, operations=8)
def grid_sample(x, grid, *modes):
    """An image at given places: linear in it."""
    if x.ndim == 4:
        return _along("n c H W, n p q T -> n c p q", (x, grid), linear=_LINEAR)
    return _along("n c D H W, n o p q T -> n c o p q", (x, grid), linear=_LINEAR)


@register_operator("AffineGrid", saves=UNMEASURED, operations=6, source="(x, output_size)")
def affine_grid(theta, size, *align_corners):
    """The places of the pixels of images of this size."""
    given = dict(zip("nCPQ" if len(size) == 4 else "nCOPQ", size))
    output = "n P Q T" if len(size) == 4 else "n O P Q T"
    sizes = given | {"T": len(size) - 2}

    def localize(args, shapes):
        return (args[0], (shapes[0][0], *size[1:]), *args[2:])

    return _along(f"n R S -> {output}", (theta,), sizes, linear=_LINEAR, localize=localize)


@register_operator(
    "ROIAlign", attributes=("pooled_height", "pooled_width"), source="(x, rois)", saves=UNMEASURED, operations=8
)
def roi_align(x, rois, pooled_height, pooled_width, *others):
    """Regions of images, which are whole: regions name their image by its place in the batch."""
    sizes = {"P": pooled_height, "Q": pooled_width}
    return _along("N c H W, r F -> r c P Q", (x, rois), sizes, linear=_LINEAR)


@register_operator("CropAndResize", source="(x, boxes, box_indices, crop_size)", saves=UNMEASURED, operations=8)
def crop_and_resize(x, boxes, box_indices, crop_size, *others):
    """Regions of images with channels last."""
    return _along("N H W c, r F, r -> r P Q c", (x, boxes, box_indices), dict(zip("PQ", crop_size)))


@register_operator("LRN", "ChannelShuffle", source="(x)", saves=UNMEASURED, operations=7)
def across_channels(x):
    """Neighbouring channels together, or channels in another order."""
    return unary(x, whole=(1,))


@register_operator("PReLU", saves=UNMEASURED, operations=2)
def prelu(x, weight):
    """A slope for every channel, or one for all."""
    channels = ("d1",) if x.ndim > 1 else ()
    if weight.shape not in ((x.shape[1] if x.ndim > 1 else 1,), (1,)):
        raise ValueError(f"slopes {weight.shape} don't fit the channels of {x.shape}")
    plain = unary(x)
    return Signature((*plain.inputs, (() if weight.shape == (1,) else channels,)), plain.outputs, plain.sizes)


def _blocks(x, block_shape, borders, is_back):
    """Blocks of the last dims to the batch, or back: channels are parallel."""
    block = per_dim(block_shape, len(borders))
    first, names = x.ndim - len(block), dim_names(x)
    count = prod(block)
    ends = [sum(pair) for pair in borders]
    shape = [size * b - end if is_back else (size + end) // b for size, b, end in zip(x.shape[first:], block, ends)]
    sizes = {f"o{dim}": size for dim, size in enumerate(shape)}
    sizes["batch"] = x.shape[0] // count if is_back else x.shape[0] * count
    output = (("batch",), *names[1:first], *((f"o{dim}",) for dim in range(len(shape))))
    return unary(x, output, sizes=sizes, whole=(0, *range(first, x.ndim)), linear=_LINEAR)


@register_operator("SpaceToBatchND", attributes=("block_shape", "paddings"), source="(x)", saves=UNMEASURED)
def space_to_batch(x, block_shape, paddings):
    """Blocks of the planes become a batch."""
    return _blocks(x, block_shape, paddings, False)


@register_operator("BatchToSpaceND", attributes=("block_shape", "crops"), source="(x)", saves=UNMEASURED)
def batch_to_space(x, block_shape, crops):
    """A batch becomes blocks of planes."""
    return _blocks(x, block_shape, crops, True)


@register_operator("Im2Col", attributes=("ksizes", "strides", "dilations", "pads"), source="(x)", saves=UNMEASURED)
def unfolded(x, ksizes, strides=1, dilations=1, pads=0):
    """The windows of every channel: (batch, channels, places in a window, windows)."""
    kernel, count = _counted(x.shape[2:], ksizes, strides, dilations, pads)
    return _along("n c H W -> n c K L", (x,), {"K": kernel, "L": count}, linear=_LINEAR)


@register_operator("Im2ColExt", saves=UNMEASURED)
def unfolded_together(x, kernel_size, dilation=1, padding=0, stride=1):
    """As `unfolded`, with channels and the places in a window in one dim, channels first."""
    kernel, count = _counted(x.shape[2:], kernel_size, stride, dilation, padding)
    plain = _along("n c H W -> n c K L", (x,), {"K": kernel, "L": count}, linear=_LINEAR)
    return Signature(plain.inputs, ((("n",), ("c", "K"), ("L",)),), plain.sizes, whole=plain.whole, linear=_LINEAR)


@register_operator("Col2ImExt", saves=UNMEASURED)
def folded(x, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """The sum of windows at their places in an image."""
    kernel, count = _counted(output_size, kernel_size, stride, dilation, padding)
    if x.ndim != 3 or x.shape[2] != count or x.shape[1] % kernel:
        raise ValueError(f"windows {x.shape} don't fill an image of {tuple(output_size)}")
    sizes = {"n": x.shape[0], "c": x.shape[1] // kernel, "K": kernel, "L": count} | dict(zip("HW", output_size))
    inputs, output = (("n",), ("c", "K"), ("L",)), (("n",), ("c",), ("H",), ("W",))
    return Signature((inputs,), (output,), sizes, whole=frozenset("KLHW"), linear=_LINEAR)


def _counted(image, kernel, stride, dilation, padding):
    """Places in a window, and windows."""
    kernel, parts = per_dim(kernel, 2), (per_dim(value, 2) for value in (stride, dilation, padding))
    counts = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in zip(image, kernel, *parts)]
    return prod(kernel), prod(counts)


@register_operator(
    "MaxUnpool2D", "MaxUnpool3D", attributes=("ksize", "strides", "pads", "output_shape"), source="(x, argmax)",
    saves=UNMEASURED,
)  # fmt: skip
def unpooled(x, indices, ksize, strides=0, pads=0, output_shape=()):
    """The largest elements at their places again: linear."""
    ndim = x.ndim - 2
    kernel, stride, pad = (per_dim(value, ndim) for value in (ksize, strides or ksize, pads))
    shape = [(n - 1) * s - 2 * p + k for n, k, s, p in zip(x.shape[2:], kernel, stride, pad)]
    if output_shape:
        raise ValueError("an unpooling with an output_shape names the whole batch: leave it out")
    inner, outer = ("H W", "P Q") if ndim == 2 else ("D H W", "O P Q")
    sizes = dict(zip(outer.split(), shape))
    return _along(f"n c {inner}, n c {inner} -> n c {outer}", (x, indices), sizes, linear=_LINEAR)


@register_operator(
    "FractionalMaxPoolWithFixedKsize", "FractionalMaxPool3DWithFixedKsize", attributes=("output_shape",),
    source="(x, samples)", saves=UNMEASURED,
)  # fmt: skip
def fractional_max_pool(x, samples, output_shape):
    """The largest, and their positions, of windows at places that are drawn."""
    inner, outer = ("H W", "P Q") if x.ndim == 4 else ("D H W", "O P Q")
    sizes = dict(zip(outer.split(), per_dim(output_shape, x.ndim - 2)))
    return _along(f"n c {inner}, n c S -> n c {outer}, n c {outer}", (x, samples), sizes)


@register_operator("BoundingBoxEncode", "BoundingBoxDecode", source="(x, y)", saves=UNMEASURED, operations=4)
def boxes(anchors, others):
    """Boxes against anchors, row by row."""
    return _along("r F, r F -> r F", (anchors, others))


@register_operator("IOU", source="(x, y)", saves=UNMEASURED, operations=10)
def box_overlaps(anchors, others):
    """The overlap of each of the second boxes with each of the first."""
    return _along("a F, b F -> b a", tensors_in((anchors, others)))
