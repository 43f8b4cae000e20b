"""Rules of scatters, the mirror of lookups: updates go to positions that a tensor of indices holds.

The dims that are written to may be cut: each part takes what falls into it. Where updates are added, they may be cut
along the dims that indices count, too: the parts' results are terms of a sum, in which the tensor stands once.
"""

from dataclasses import replace
from functools import partial

from mindformers_core.operators import saved
from mindformers_core.operators.registry import NO_GRADIENT, register_operator
from mindformers_core.operators.rewrites import dim_before_indices
from mindformers_core.operators.rules.dims import as_dim, broadcast_shape, dim_names, dim_sizes, equation, integers
from mindformers_core.operators.rules.indexing import check_indices, elements, positional
from mindformers_core.operators.signature import LocalCall, Signature, TensorMeta, tensors_in, whole_signature
from mindformers_core.operators.words import word

_ADDS, _REPLACES = ("add", "sub"), ("none", None)  # what is done with updates
_EVERYTHING = saved.SavedByOperator("all", outputs=(0,), as_they_are=True)
_COPIES = saved.SavedByOperator("integers")  # of indices that are views
_UPDATES = saved.SavedByOperator((1, 2), as_they_are=True)


def _written(x, places, others, sizes, counted, algorithm, how, whole=(), updates=None, **more):
    """The `Signature` of a scatter into the dims `places`; updates are number `updates` of the inputs, or a number."""
    names, adds = dim_names(x), how in _ADDS
    return Signature(
        (names, *others), (names,), dim_sizes(x) | sizes, dict.fromkeys(counted, "sum") if adds else {},
        frozenset(whole) | frozenset(() if adds else counted),
        ({0, updates},) if updates and (adds or how in _REPLACES) else (), (0,) if adds else (),
        {f"d{dim}": algorithm for dim in places}, **more,
    )  # fmt: skip


def _coordinates(indices, updates, shape):
    """The number of dims that coordinates have, the factors of indices and updates, and the sizes of the former."""
    check_indices(indices)
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= len(shape) or updates.shape != (*indices.shape[:-1], *shape[depth:]):
        where = f"{depth}-dim coordinates {indices.shape}"
        raise ValueError(f"updates {updates.shape} at {where} don't fit {tuple(shape)}")
    found = dim_names(indices, "i")
    behind = tuple((f"d{dim}",) for dim in range(depth, len(shape)))
    return depth, (found, (*found[:-1], *behind)), dim_sizes(indices, "i")


def _at_coordinates(how, x, indices, updates):
    """`x` with updates at coordinates, of which the last dim of `indices` holds as many as there are."""
    depth, others, sizes = _coordinates(indices, updates, x.shape)
    *counted, last = sizes
    return _written(x, range(depth), others, sizes, counted, "scatter_nd", how, (last,), 2)


_SAVES = {"Add": _COPIES, "Sub": saved.INDICES, "Update": _UPDATES, "Max": _EVERYTHING, "Min": _EVERYTHING}
for _name in ("Add", "Sub", "Update", "Max", "Min", "Mul", "Div"):
    _rule = partial(_at_coordinates, "none" if _name == "Update" else _name.lower())
    _facts = {"saves": _SAVES.get(_name, saved.INPUTS_AS_THEY_ARE), "algorithms": ("scatter_nd",)}
    register_operator(f"TensorScatter{_name}", **_facts)(_rule)


@register_operator("ScatterNd", saves=saved.INDICES)
def scatter_nd(indices, updates, shape):
    """Updates at coordinates, added up in zeros of a shape, whose dims that are written to are whole."""
    shape = integers((shape,), "a shape")
    _, inputs, sizes = _coordinates(indices, updates, shape)
    *counted, last = sizes
    made = {f"d{dim}": size for dim, size in enumerate(shape)}
    return Signature(
        inputs, (tuple((name,) for name in made),), sizes | made, dict.fromkeys(counted, "sum"), frozenset({last}),
        ({1},), local=LocalCall(localize=lambda args, shapes: (*args[:2], tuple(shapes[0]))),
    )  # fmt: skip


_ALONG = {"algorithms": ("scatter",)}


@register_operator("ScatterAddExt", **_ALONG)
def scatter_add(x, dim, index, src):
    """`out[i][index[i][j]] += src[i][j]` for `dim` 1."""
    return _elements(x, dim, index, src, "add")


@register_operator("Scatter", saves=replace(_UPDATES, inputs=(2, 3), outputs=(0,)), **_ALONG)
@register_operator("ScatterValue", saves=_COPIES, **_ALONG)
@register_operator("DeprecatedScatter", saves=_COPIES, source=".scatter", **_ALONG)
def scatter(x, dim, index, src, reduce=0):
    """`out[i][index[i][j]] = src[i][j]` for `dim` 1."""
    return _elements(x, dim, index, src, reduce, local=positional(x, dim, index, src, *[reduce] * (reduce != 0)))


@register_operator("TensorScatterElements", saves=replace(_UPDATES, outputs=(0,)), rewrite=dim_before_indices, **_ALONG)
def scatter_elements(x, indices, updates, axis=0, reduce=0):
    """As `scatter`, with the dim behind the tensors."""
    return _elements(x, axis, indices, updates, reduce)


def _elements(x, dim, index, src, how, **more):
    """Updates one by one; other dims than `dim` go together where they have the same size."""
    how = word("reduce", how)
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


_INDEX = saved.SavedByOperator(internal=lambda operands, results: [operands[1].nbytes])  # in another shape


@register_operator("IndexAddExt", saves=_INDEX, **_ALONG)
def index_add(x, dim, index, source, alpha=1):
    """`x` with slices of `source` added at the positions of a 1-D `index` along `dim`."""
    place, names = as_dim(dim, x.ndim), dim_names(x)
    check_indices(index)
    slices = (*names[:place], ("i0",), *names[place + 1 :])
    if index.ndim != 1 or source.shape != (*x.shape[:place], *index.shape, *x.shape[place + 1 :]):
        raise ValueError(f"a source {source.shape} at {index.shape} positions of dim {place} doesn't fit {x.shape}")
    return _written(x, (place,), ((("i0",),), slices), dim_sizes(index, "i"), {"i0"}, "scatter", "add", (), 2)


@register_operator("IndexFillScalar", "IndexFillTensor", **_ALONG)
def index_fill(x, dim, index, value):
    """`x` with one value at the positions of a 1-D `index` along `dim`."""
    check_indices(index)
    others, place = ((("i0",),), *((),) * isinstance(value, TensorMeta)), as_dim(dim, x.ndim)
    return _written(x, (place,), others, dim_sizes(index, "i"), {"i0"}, "scatter", "fill")


@register_operator("IndexFill", saves=saved.SavedByOperator((1, 2, 3), as_they_are=True))
def index_fill_where_a_tensor_says(x, dim, index, value):
    """As `index_fill`; the dim is in a tensor, so all are whole."""
    return whole_signature(tensors_in((x, dim, index, value)), (x.shape,))


@register_operator("MaskedScatter", saves=saved.MASKS)
def masked_scatter(x, mask, source):
    """`x` with the elements of `source`, in order, where a mask is true: all is whole."""
    return whole_signature((x, mask, source), (x.shape,), ({0, 2},))


@register_operator("IndexPut", saves=_EVERYTHING, attributes=("accumulate",), algorithms=("index_put",))
def index_put(x, values, indices, accumulate=0):
    """`x` with values, which are broadcast, where several tensors of indices, broadcast to each other, point to."""
    for index in indices:
        check_indices(index)
    depth, found = len(indices), broadcast_shape([index.shape for index in indices])
    shape = (*found, *x.shape[depth:])
    if not 1 <= depth <= x.ndim or broadcast_shape([shape, values.shape]) != shape:
        raise ValueError(f"{depth} indices and values {values.shape}, which don't broadcast to {shape}, for {x.shape}")
    counted = {f"i{place}": size for place, size in enumerate(found)}
    slots = (*((name,) for name in counted), *dim_names(x)[depth:])

    def named(tensor, end):
        places = range(end - tensor.ndim, end)
        return tuple(slots[place] if size == shape[place] else () for place, size in zip(places, tensor.shape))

    others = named(values, len(shape)), *(named(index, len(found)) for index in indices)
    return _written(x, range(depth), others, counted, counted, "index_put", "add" if accumulate else "none", (), 1)


def _segments(how, x, segment_ids, num_segments):
    """The elements of each segment combined; the ids stand for the leading dims of `x`."""
    check_indices(segment_ids)
    if x.shape[: segment_ids.ndim] != segment_ids.shape:
        raise ValueError(f"segment ids {segment_ids.shape} don't fit {x.shape}")
    (count,), names = integers((num_segments,), "a number of segments"), dim_names(x)
    counted = dim_sizes(segment_ids)
    more = {
        "Sum": {"reduced": dict.fromkeys(counted, "sum"), "linear": ({0},)},
        "Prod": {"whole": frozenset(counted)},
    }.get(how, {"distributed": dict.fromkeys(counted, f"segment_{how.lower()}")})
    inputs, output = (names, dim_names(segment_ids)), (("segments",), *names[segment_ids.ndim :])
    return Signature(inputs, (output,), dim_sizes(x) | {"segments": count}, **more)


for _name in ("Sum", "Max", "Min", "Prod"):
    _saves = saved.INDICES if _name == "Sum" else _EVERYTHING
    _asks = (f"segment_{_name.lower()}",) * (_name in ("Max", "Min"))
    register_operator(f"UnsortedSegment{_name}", saves=_saves, algorithms=_asks)(partial(_segments, _name))


@register_operator("HistcExt", gradient=NO_GRADIENT)
@register_operator("Histogram", gradient=NO_GRADIENT, attributes=("bins", "min", "max"))
def histogram(x, bins=100, min=0, max=0):
    """Counts in bins: of each part, with a range; without one it is that of all elements."""
    names = dim_sizes(x, "D" if min == max == 0 else "d")
    return equation(f"{' '.join(names)} -> bins", x, sizes={"bins": bins})


@register_operator("BincountExt", gradient=NO_GRADIENT)
def bincount(x, weights=None, minlength=0):
    """Counts of numbers below `minlength`, or sums of their weights: of each part."""
    if not minlength:
        raise ValueError("the number of results depends on the values: give minlength, above all of them")
    tensors = tensors_in([x, weights])
    return equation(f"{', '.join('n' * len(tensors))} -> bins", *tensors, sizes={"bins": minlength})


@register_operator("EmbeddingLookup", reads_a_part=True, algorithms=("embedding_lookup",))
def embedding_lookup(params, indices, offset):
    """Rows by number less an offset; zeros where there is none, so that parts' results are terms of a sum."""
    check_indices(indices)
    (offset,), names = integers((offset,), "an offset"), dim_names(params)
    found, sizes = dim_names(indices, "i"), dim_sizes(params) | dim_sizes(indices, "i")
    outputs, algorithms = ((*found, *names[1:]),), {"d0": "embedding_lookup"}
    return Signature((names, found), outputs, sizes, {"d0": "sum"}, linear=({0},), distributed=algorithms)


@register_operator("SearchSorted", saves=saved.NOTHING, gradient=NO_GRADIENT)
def search_sorted(sequence, values, sorter=None, dtype=None, right=False):
    """How many elements of the last dim are smaller: a sum over the parts of a sequence that is in order."""
    length, wanted = "s" if sorter is None else "S", "... v" if sequence.ndim > 1 else "..."
    rows = f"... {length}" if sequence.ndim > 1 else length
    return equation(
        f"{rows}, {wanted}{f', {rows}' * (sorter is not None)} -> {wanted}", *tensors_in([sequence, values, sorter])
    )
