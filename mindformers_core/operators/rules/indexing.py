"""Rules of operators that look up, order, accumulate or mask by position along a dim."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import as_dim, dim_names, dim_sizes, equation, integers, unary
from mindformers_core.operators.rules.elementwise import keeps_digits
from mindformers_core.operators.saved import INDICES, INPUTS, INPUTS_AS_THEY_ARE, NOTHING, SECOND_RESULT
from mindformers_core.operators.signature import LocalCall, Signature, TensorMeta, spelled, tensors_in

# operators that give as many results as the values ask for: a capture has no shape for them, the eager engine runs them
BY_VALUES = ("CTCGreedyDecoder", "MaskedSelect", "NonZero", "NonZeroExt", "SparseSegmentMean", "Unique", "Unique2")
BY_VALUES += ("UniqueConsecutive", "UniqueDim")
register_operator(*BY_VALUES, gather=True)
_AS_IT_IS = LocalCall()


def _lookup(params, indices, dim, batch_dims=0, algorithm="gather"):
    """Rows of `params` along `dim` by number. A shard finds zero for rows that it doesn't hold, and shards add up."""
    place, batch = as_dim(dim, params.ndim), batch_dims + indices.ndim * (batch_dims < 0)
    if not 0 <= batch <= min(place, indices.ndim) or params.shape[:batch] != indices.shape[:batch]:
        where = f"indices {indices.shape} in dim {place} of {params.shape}"
        raise ValueError(f"batch_dims={batch_dims} doesn't fit a lookup of {where}")
    check_indices(indices)
    rows = dim_names(params)
    looked_up = (*rows[:batch], *dim_names(indices, "i")[batch:])
    output = (*rows[:place], *looked_up[batch:], *rows[place + 1 :])
    sizes = dim_sizes(params) | dim_sizes(indices, "i")
    more = _summed(params, rows[place], algorithm)
    return Signature((rows, looked_up), (output,), sizes, local=LocalCall((params, indices, dim, batch_dims)), **more)


def check_indices(indices):
    """Raise `TypeError` for anything but a tensor of integers."""
    if not isinstance(indices, TensorMeta) or "int" not in indices.dtype:
        raise TypeError(f"indices are an integer tensor, not {indices!r}")


def _summed(x, factors, algorithm, whole=()):
    """The entries of a `Signature` for the factors of a lookup in `x`: absent rows are masked, and shards are summed.

    `algorithm` is None where a part can't do it, as for Booleans; `whole` are further factors that are whole.
    """
    linear = ({0},)
    if algorithm is None or x.dtype == "bool":
        return {"whole": frozenset((*factors, *whole)), "linear": linear}
    reduced, distributed = dict.fromkeys(factors, "sum"), dict.fromkeys(factors, algorithm)
    return {"reduced": reduced, "distributed": distributed, "whole": frozenset(whole), "linear": linear}


_LOOKUP = {"saves": INDICES, "reads_a_part": True, "algorithms": ("gather",)}


@register_operator("SparseGatherV2", reads_a_part=True, algorithms=("gather",))
@register_operator("DeprecatedGather", source=".gather", **_LOOKUP)
@register_operator("Gather", **_LOOKUP)
def gather(params, input_indices, axis, batch_dims=0):
    """`params` at `input_indices` along `axis`."""
    return _lookup(params, input_indices, axis, batch_dims)


def positional(*arguments):
    """The local call with these arguments, in the places where an algorithm finds them."""
    return LocalCall(localize=lambda args, shapes: arguments)


@register_operator("IndexSelect", "DeprecatedIndexSelect", source=".index_select", **_LOOKUP)
def index_select(x, dim, index):
    """`x` at the positions of a 1-D `index` along `dim`."""
    if index.ndim != 1:
        raise ValueError(f"index_select takes a 1-D index, not {index!r}")
    return _lookup(x, index, dim)


@register_operator("Take", "DeprecatedTake", reads_a_part=True, source=".take")
def take(x, indices, axis=None, mode="clip"):
    """`x` at `indices` along `axis`, by NumPy's rules for indices out of range, so with all of the dim available."""
    if axis is None:
        return equation(f"{' '.join(dim_sizes(x, 'D'))}, ... -> ...", x, indices, linear=({0},))
    return _lookup(x, indices, axis, algorithm=None)


@register_operator("GatherD", saves=INPUTS, reads_a_part=True, algorithms=("gather_elements",))
def gather_elements(x, dim, index):
    """`out[i][j] = x[i][index[i][j]]` for `dim` 1: the other dims go together where they have the same size."""
    place = as_dim(dim, x.ndim)
    found, sizes, whole = elements(x, place, index)
    more = _summed(x, [f"d{place}"], "gather_elements", whole)
    return Signature((dim_names(x), found), (found,), sizes, local=positional(x, dim, index), **more)


def elements(x, place, index):
    """The factors of an index of the elements of `x` along dim `place`, their and its sizes, and those that are whole.

    Other dims go together with those of `x` where they have the same size.
    """
    if index.ndim != x.ndim:
        raise ValueError(f"index {index.shape} needs as many dims as the tensor {x.shape}")
    found, sizes, whole = list(dim_names(x)), dim_sizes(x), set()
    for other, size in enumerate(index.shape):
        if other != place and size > x.shape[other]:
            raise ValueError(f"index {index.shape} is larger than {x.shape} in dim {other}")
        if other == place or size != x.shape[other]:
            found[other] = (f"i{other}",)
            sizes[f"i{other}"] = size
            whole |= {f"d{other}", f"i{other}"} if other != place else set()
    check_indices(index)
    return tuple(found), sizes, whole


@register_operator("GatherNd", saves=INDICES, reads_a_part=True, algorithms=("gather_nd",))
def gather_nd(x, indices):
    """`x` at coordinates, of which the last dim of `indices` holds as many as there are."""
    depth = indices.shape[-1] if indices.ndim else 0
    if not 1 <= depth <= x.ndim:
        raise ValueError(f"indices {indices.shape} hold coordinates of {depth} dims, but the tensor is {x.shape}")
    names, found = dim_names(x), dim_names(indices, "i")
    more = _summed(x, [f"d{dim}" for dim in range(depth)], "gather_nd", found[-1])
    return Signature((names, found), ((*found[:-1], *names[depth:]),), dim_sizes(x) | dim_sizes(indices, "i"), **more)


@register_operator("Embedding", reads_a_part=True, algorithms=("embedding",))
def embedding(indices, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False):
    """Rows of `weight` by number. With a padding row, whose gradient is left out, the vocabulary is whole."""
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError("max_norm and scale_grad_by_freq are not available for a distributed embedding")
    check_indices(indices)
    rows = "v" if padding_idx is None else "V"
    return equation(f"..., {rows} h -> ... h", indices, weight, linear=({1},), distributed={rows: "embedding"})


@register_operator("OneHot", saves=NOTHING)
@register_operator("OneHotExt")
def one_hot(indices, depth, on_value=1, off_value=0, axis=-1):
    """A new dim at `axis`, in which position `indices` is on."""
    if integers((depth,), "a depth")[0] < 0:
        raise ValueError("the number of classes must be given: it can't follow from distributed indices")
    check_indices(indices)
    names = dim_names(indices)
    place = as_dim(axis, indices.ndim + 1)
    values = tuple(dim_names(value, "v") for value in tensors_in((on_value, off_value)))
    output = (*names[:place], ("depth",), *names[place:])
    sizes = dim_sizes(indices) | {"depth": depth}
    return Signature((names, *values), (output,), sizes)


@register_operator("TopK", saves=SECOND_RESULT, algorithms=("top_k",))
def top_k(x, k, dim=-1, local=_AS_IT_IS):
    """The `k` largest along `dim`, and their positions: those of all parts are compared where it is cut."""
    place = as_dim(dim, x.ndim)
    if not 0 <= integers((k,), "k")[0] <= x.shape[place]:
        raise ValueError(f"k={k} is more than dim {place} of {x.shape} has")
    more = {"distributed": {f"d{place}": "top_k"}} if k else {"whole": (place,)}
    return _taken(x, place, k, True, local=local, **more)


@register_operator("TopkExt", saves=SECOND_RESULT, source=".topk", algorithms=("top_k",))
def top_k_method(x, k, dim=-1, largest=True, sorted=True):
    """`x.topk(k, dim)`, whose arguments may come by name."""
    return top_k(x, k, dim, positional(x, k, dim, largest, sorted))


def _taken(x, place, count, keepdim, **more):
    """The `Signature` of `count` elements along a dim, and their positions."""
    return unary(x, {place: [("taken",)] * keepdim}, 2, {"taken": count} if keepdim else (), **more)


@register_operator("Kthvalue")
def kth_value(x, k, dim=-1, keepdim=False):
    """The `k`-th smallest along `dim`, and its position."""
    place = as_dim(dim, x.ndim)
    if not 1 <= integers((k,), "k")[0] <= x.shape[place]:
        raise ValueError(f"k={k} is no place among the elements of dim {place} of {x.shape}")
    return _taken(x, place, 1, keepdim, whole=(place,))


@register_operator("Sort", saves=INPUTS_AS_THEY_ARE, attributes=("axis",))
@register_operator("SortExt", saves=INPUTS_AS_THEY_ARE, source=".sort")
def sort(x, dim=-1, descending=False, stable=False):
    """Values in order along `dim`, and their positions.

    The dim is whole: a bitonic merge of P parts (Batcher, 1968) sends log2(P) (log2(P) + 1) / 2 parts, a gather P - 1.
    """
    return unary(x, outputs=2, whole=(as_dim(dim, x.ndim),))


@register_operator("ArgSort", saves=INPUTS_AS_THEY_ARE, source=".argsort")
def arg_sort(x, dim=-1, descending=False, stable=False):
    """Positions in order of value along `dim`."""
    return unary(x, whole=(as_dim(dim, x.ndim),))


@register_operator("CumSum", saves=NOTHING, algorithms=("cumsum",))
@register_operator("CumsumExt", "DeprecatedCumsum", saves=NOTHING, source=".cumsum", algorithms=("cumsum",))
def cumulative_sum(x, *args, **named):
    """Sums of all elements up to each along a dim."""
    plain = dict(zip(("dim", "dtype"), args)) | spelled(named, ("dim", "dtype"))
    dtype = plain.get("dtype")
    passes = dtype is None or isinstance(dtype, bool) or keeps_digits(dtype)  # a bool is CumSum's `exclusive`
    order = positional(x, plain.get("dim"), dtype) if named else _AS_IT_IS
    return _scan("cumsum", x, plain.get("dim"), linear=({0},) if passes else (), local=order)


@register_operator("CumProd", algorithms=("cumprod",))
def cumulative_product(x, dim, *_):
    """Products of all elements up to each along `dim`."""
    return _scan("cumprod", x, dim)


@register_operator(
    "CumulativeLogsumexp", operations=4, numbers=(1,), attributes=("exclusive", "reverse"),
    algorithms=("logcumsumexp",),
)  # fmt: skip
def cumulative_log_sum(x, dim, exclusive=False, reverse=False):
    """Logarithms of sums of exponentials of all elements up to each along `dim`; the rarer kinds need it whole."""
    return unary(x, whole=(as_dim(dim, x.ndim),)) if exclusive or reverse else _scan("logcumsumexp", x, dim)


def _scan(algorithm, x, dim, outputs=1, **more):
    """The `Signature` of a scan: totals of the parts are exchanged where its dim is cut."""
    return unary(x, outputs=outputs, distributed={f"d{as_dim(dim, x.ndim)}": algorithm}, **more)


# the extreme of all elements up to each along a dim, and its position
register_operator("Cummax", algorithms=("cummax",))(lambda x, dim: _scan("cummax", x, dim, 2))
register_operator("Cummin", "CumminExt", algorithms=("cummin",))(lambda x, dim: _scan("cummin", x, dim, 2))


@register_operator("ReverseSequence", attributes=("seq_dim", "batch_dim"))
def reversed_sequences(x, lengths, seq_dim, batch_dim=0):
    """The first elements of every sequence in the opposite order, as many as `lengths` says."""
    names, place = dim_names(x), as_dim(seq_dim, x.ndim)
    inputs = names, (names[as_dim(batch_dim, x.ndim)],)
    return Signature(inputs, (names,), dim_sizes(x), whole=frozenset(names[place]), linear=({0},))
