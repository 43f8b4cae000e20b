"""Rules of scatters, the mirror of lookups: updates go to positions that a tensor of indices holds.

The dims that are written to may be cut: each part takes what falls into it. Where updates are added, they may be cut
along the dims that indices count, too: the parts' results are terms of a sum, in which the tensor stands once.
"""

from dataclasses import replace
from functools import partial

from mindformers_core.operators import saved
from mindformers_core.operators.registry import NO_GRADIENT, register_operator
from mindformers_core.operators.rewrites import dim_before_indices
from mindformers_core.operators.rules.dims import as_dim, dim_names, dim_sizes, integers
from mindformers_core.operators.rules.elementwise import broadcast_shape, tensors_in
from mindformers_core.operators.rules.indexing import check_indices, elements, positional
from mindformers_core.operators.signature import Signature, TensorMeta

_CORRECTED = "mindformers_core.dtensor.corrected."
_ADDS = ("add", "sub", 1)  # by its name, or by the number that MindSpore gives it
_REPLACES = ("none", 0, None)


def _written(x, places, others, sizes, counted, algorithm, how, whole=(), updates=None, **more):
    """The `Signature` of a scatter into `x`.

    Args:
        x: the tensor.
        places: its dims that are written to.
        others: for each other input the factors of its dims.
        sizes: of the factors that `x` lacks.
        counted: factors of the dims along which indices and updates are counted.
        algorithm: its name.
        how: what is done with updates: one of `_ADDS`, of `_REPLACES`, or another word.
        whole: factors that can't be cut.
        updates: index of the input that they are; None for a number.
    """
    names, adds = dim_names(x), how in _ADDS
    return Signature(
        (names, *others),
        (names,),
        dim_sizes(x) | sizes,
        dict.fromkeys(counted, "sum") if adds else {},
        frozenset(whole) | frozenset(() if adds else counted),
        ({0, updates},) if updates and (adds or how in _REPLACES) else (),
        (0,) if adds else (),
        {f"d{dim}": algorithm for dim in places},
        **more,
    )


def _at_coordinates(how, x, indices, updates):
    """`x` with updates at coordinates, of which the last dim of `indices` holds as many as there are."""
    depth, found, counted, sizes = _coordinates(indices, x.ndim)
    if updates.shape != (*indices.shape[:-1], *x.shape[depth:]):
        raise ValueError(f"updates {updates.shape} at coordinates {indices.shape} don't fit {x.shape}")
    others = found, (*found[:-1], *dim_names(x)[depth:])
    return _written(x, range(depth), others, sizes, counted, "scatter_nd", how, found[-1], 2)


def _coordinates(indices, ndim):
    """The number of dims that coordinates have, the factors of `indices`, those that count, and their sizes."""
    check_indices(indices)
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= ndim:
        raise ValueError(f"indices {indices.shape} hold coordinates of {depth} dims, for a tensor of {ndim}")
    found = dim_names(indices, "i")
    return depth, found, [factor for (factor,) in found[:-1]], dim_sizes(indices, "i")


_COPIES = saved.SavedByOperator("integers")  # of indices that are views
_EVERYTHING = saved.SavedByOperator("all", outputs=(0,), as_they_are=True)
_INDEX = saved.SavedByOperator(internal=lambda operands, results: [operands[1].nbytes])  # in another shape
_UPDATES = saved.SavedByOperator((1, 2), as_they_are=True)
# How a scatter at coordinates is called, what it does with updates, and what its gradient saves
_AT_COORDINATES = (
    ("Add", "add", _COPIES),
    ("Sub", "sub", saved.INDICES),
    ("Update", "none", _UPDATES),
    ("Max", "max", _EVERYTHING),
    ("Min", "min", _EVERYTHING),
    ("Mul", "mul", saved.INPUTS_AS_THEY_ARE),
    ("Div", "div", saved.INPUTS_AS_THEY_ARE),
)
for _name, _how, _saves in _AT_COORDINATES:
    register_operator(f"TensorScatter{_name}", saves=_saves)(partial(_at_coordinates, _how))


@register_operator("ScatterNd", saves=saved.INDICES)
def scatter_nd(indices, updates, shape):
    """Updates at coordinates, added up in zeros of a shape, whose dims that are written to are whole."""
    shape = integers((shape,), "a shape")
    depth, found, counted, sizes = _coordinates(indices, len(shape))
    if updates.shape != (*indices.shape[:-1], *shape[depth:]):
        raise ValueError(f"updates {updates.shape} at coordinates {indices.shape} don't fit {shape}")
    output = tuple((f"d{dim}",) for dim in range(len(shape)))
    sizes |= {f"d{dim}": size for dim, size in enumerate(shape)}
    inputs, reduced = (found, (*found[:-1], *output[depth:])), dict.fromkeys(counted, "sum")
    return Signature(
        inputs, (output,), sizes, reduced, frozenset(found[-1]), ({1},),
        localize=lambda args, shapes: (*args[:2], tuple(shapes[0])),
    )  # fmt: skip


@register_operator("ScatterAddExt", saves=saved.UNMEASURED)
def scatter_add(x, dim, index, src):
    """`out[i][index[i][j]] += src[i][j]` for `dim` 1."""
    return _elements(x, dim, index, src, "add")


@register_operator("Scatter", saves=replace(_UPDATES, inputs=(2, 3), outputs=(0,)), source=_CORRECTED + "scattered")
@register_operator("ScatterValue", saves=_COPIES)
@register_operator("DeprecatedScatter", saves=_COPIES, source=".scatter")
def scatter(x, dim=None, index=None, src=None, reduce=0, axis=None):
    """`out[i][index[i][j]] = src[i][j]` for `dim` 1."""
    dim = dim if axis is None else axis
    return _elements(x, dim, index, src, reduce, localize=positional(x, dim, index, src, *[reduce] * (reduce != 0)))


@register_operator("TensorScatterElements", saves=replace(_UPDATES, outputs=(0,)), rewrite=dim_before_indices)
def scatter_elements(x, indices, updates, axis=0, reduce=0):
    """As `scatter`, with the dim behind the tensors."""
    return _elements(x, axis, indices, updates, reduce)


def _elements(x, dim, index, src, how, **more):
    """Updates one by one; other dims than `dim` go together where they have the same size."""
    if how not in (*_ADDS, *_REPLACES):
        raise ValueError(f"a scatter adds or replaces, not {how!r}")
    place = as_dim(dim, x.ndim)
    found, sizes, whole = elements(x, place, index)
    others = [found]
    if isinstance(src, TensorMeta):
        if src.ndim != x.ndim or any(size < taken for size, taken in zip(src.shape, index.shape)):
            raise ValueError(f"an index {index.shape} is larger than its updates {src.shape}")
        longer = [other for other in range(x.ndim) if src.shape[other] != index.shape[other]]
        sizes |= {f"s{other}": src.shape[other] for other in longer}
        others.append(tuple((f"s{other}",) if other in longer else found[other] for other in range(x.ndim)))
        whole |= {factor for other in longer for factor in (f"s{other}", *found[other])}
    counted = found[place][0]
    updates = len(others) if len(others) > 1 else None
    return _written(x, (place,), others, sizes, {counted} - whole, "scatter", how, whole, updates, **more)


@register_operator("IndexAddExt", saves=_INDEX, source=_CORRECTED + "index_added")
def index_add(x, dim, index, source, alpha=1):
    """`x` with slices of `source` added at the positions of a 1-D `index` along `dim`."""
    place, names = as_dim(dim, x.ndim), dim_names(x)
    check_indices(index)
    slices = (*names[:place], ("i0",), *names[place + 1 :])
    if index.ndim != 1 or source.shape != (*x.shape[:place], *index.shape, *x.shape[place + 1 :]):
        raise ValueError(f"a source {source.shape} at {index.shape} positions of dim {place} doesn't fit {x.shape}")
    return _written(x, (place,), ((("i0",),), slices), dim_sizes(index, "i"), {"i0"}, "scatter", "add", (), 2)


@register_operator("IndexFillScalar", "IndexFillTensor", saves=saved.UNMEASURED)
def index_fill(x, dim, index, value):
    """`x` with one value at the positions of a 1-D `index` along `dim`."""
    check_indices(index)
    others, place = ((("i0",),), *((),) * isinstance(value, TensorMeta)), as_dim(dim, x.ndim)
    return _written(x, (place,), others, dim_sizes(index, "i"), {"i0"}, "scatter", "fill")


@register_operator("IndexFill", saves=saved.SavedByOperator((1, 2, 3), as_they_are=True))
def index_fill_where_a_tensor_says(x, dim, index, value):
    """As `index_fill`; the dim is in a tensor, so all are whole."""
    return _whole((x, dim, index, value), ())


@register_operator("MaskedScatter", saves=saved.MASKS)
def masked_scatter(x, mask, source):
    """`x` with the elements of `source`, in order, where a mask is true: all is whole."""
    return _whole((x, mask, source), ({0, 2},))


def _whole(args, linear):
    """The `Signature` of an operator whose result has the shape of the first tensor, and of which no dim can be cut."""
    inputs = tensors_in(args)
    dims = [dim_names(tensor, "defg"[place]) for place, tensor in enumerate(inputs)]
    sizes = {
        name: size for place, tensor in enumerate(inputs) for name, size in dim_sizes(tensor, "defg"[place]).items()
    }
    return Signature(tuple(dims), (dims[0],), sizes, whole=frozenset(sizes), linear=linear)


@register_operator("IndexPut", saves=_EVERYTHING, attributes=("accumulate",))
def index_put(x, values, indices, accumulate=0):
    """`x` with values, which are broadcast, where several tensors of indices, broadcast to each other, point to."""
    for index in indices:
        check_indices(index)
    if not 1 <= len(indices) <= x.ndim:
        raise ValueError(f"{len(indices)} tensors of indices for a tensor of {x.ndim} dims")
    count = len(broadcast_shape([index.shape for index in indices]))
    rest = dim_names(x)[len(indices) :]
    slots = {f"d{place}": name for place, (name,) in enumerate((*((f"i{at}",) for at in range(count)), *rest))}
    shape = (*broadcast_shape([index.shape for index in indices]), *x.shape[len(indices) :])
    if broadcast_shape([shape, values.shape]) != shape:
        raise ValueError(f"values {values.shape} don't broadcast to {shape}")

    def named(tensor, last):
        start = last - tensor.ndim
        return tuple((slots[f"d{d}"],) if size == shape[d] else () for d, size in enumerate(tensor.shape, start))

    others = named(values, len(shape)), *(named(index, count) for index in indices)
    counted = {f"i{at}": shape[at] for at in range(count)}
    how = "add" if accumulate else "none"
    return _written(x, range(len(indices)), others, counted, counted, "index_put", how, (), 1)


_COMBINED = {"Sum": None, "Max": "segment_max", "Min": "segment_min", "Prod": None}


def _segments(how, x, segment_ids, num_segments):
    """The elements of each segment combined; the ids stand for the leading dims of `x`."""
    check_indices(segment_ids)
    if x.shape[: segment_ids.ndim] != segment_ids.shape:
        raise ValueError(f"segment ids {segment_ids.shape} don't fit {x.shape}")
    (count,) = integers((num_segments,), "a number of segments")
    names, ids = dim_names(x), dim_names(segment_ids)
    sizes, counted = dim_sizes(x) | {"segments": count}, frozenset(dim_sizes(segment_ids))
    more = {"reduced": dict.fromkeys(counted, "sum"), "linear": ({0},)} if how == "Sum" else {"whole": counted}
    if _COMBINED[how]:
        more = {"distributed": dict.fromkeys(counted, _COMBINED[how])}
    return Signature((names, ids), ((("segments",), *names[segment_ids.ndim :]),), sizes, **more)


for _how in _COMBINED:
    _saves = saved.INDICES if _how == "Sum" else _EVERYTHING
    register_operator(f"UnsortedSegment{_how}", saves=_saves)(partial(_segments, _how))


@register_operator("HistcExt", saves=saved.UNMEASURED, gradient=NO_GRADIENT)
@register_operator("Histogram", saves=saved.UNMEASURED, gradient=NO_GRADIENT, attributes=("bins", "min", "max"))
def histogram(x, bins=100, min=0, max=0):
    """Counts in bins: of each part, with a range; without one it is that of all elements."""
    names, sizes = dim_names(x), dim_sizes(x)
    more = {"whole": frozenset(sizes)} if min == max == 0 else {"reduced": dict.fromkeys(sizes, "sum")}
    return Signature((names,), ((("bins",),),), sizes | {"bins": bins}, **more)


@register_operator("EmbeddingLookup", saves=saved.UNMEASURED, reads_a_part=True)
def embedding_lookup(params, indices, offset):
    """Rows by number less an offset; zeros where there is none, so that parts' results are terms of a sum."""
    check_indices(indices)
    (offset,), names = integers((offset,), "an offset"), dim_names(params)
    found, sizes = dim_names(indices, "i"), dim_sizes(params) | dim_sizes(indices, "i")
    more = {
        "reduced": {"d0": "sum"},
        "distributed": {"d0": "embedding_lookup"},
        "run": "embedding_lookup",
        "linear": ({0},),
    }
    return Signature((names, found), ((*found, *names[1:]),), sizes, **more)


@register_operator("SearchSorted", saves=saved.NOTHING, gradient=NO_GRADIENT)
def search_sorted(sequence, values, sorter=None, dtype=None, right=False):
    """How many elements of the last dim are smaller: a sum over the parts of a sequence that is in order."""
    if sequence.ndim > 1 and sequence.shape[:-1] != values.shape[:-1]:
        raise ValueError(f"values {values.shape} don't fit sequences {sequence.shape}")
    names, wanted = dim_names(values), (*dim_names(values)[: sequence.ndim - 1], ("sequence",))
    sizes = dim_sizes(values) | {"sequence": sequence.shape[-1]}
    if sorter is None:
        return Signature((wanted, names), (names,), sizes, {"sequence": "sum"})
    return Signature((wanted, names, wanted), (names,), sizes, whole=frozenset({"sequence"}))
