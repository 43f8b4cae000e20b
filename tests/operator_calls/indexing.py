"""Lookups, scatters, sorted and running results."""

import numpy as np

from operator_calls.call import CUBE, SCALAR, Call, X, Y, bools, f, increasing, ints


def _gather(x, input_indices, axis, batch_dims=0):
    if batch_dims:
        return np.stack([_gather(a, b, axis - 1, batch_dims - 1) for a, b in zip(x, input_indices)])
    return np.take(x, input_indices, axis)


def _gather_elements(x, dim, index):
    where = list(np.ix_(*[range(size) for size in index.shape]))
    where[dim] = index
    return x[tuple(where)]


def _one_hot(indices, depth, on, off, axis=-1):
    hot = np.where(indices[..., None] == np.arange(depth), on, off)
    return np.moveaxis(hot, -1, axis)


def _top_k(x, k, dim=-1, *_):
    order = np.take(np.argsort(-x, dim, kind="stable"), range(k), dim)
    return np.take_along_axis(x, order, dim), order


def _take(x, axis, index):
    return np.take(x, index, axis)


COLUMNS = np.random.default_rng(4).permuted(np.tile(np.arange(8), (4, 1)), axis=1)[:, :6]
PLACES = np.array([[0, 1], [1, 7], [2, 3], [3, 0], [3, 5], [0, 6]])
SEGMENTS = np.array([[0, 1, 1, 2, 2, 2], [0, 1, 0, 1, 2, 1]] * 2)

_UFUNCS = {
    "Add": np.add, "Sub": np.subtract, "Max": np.maximum, "Min": np.minimum, "Mul": np.multiply, "Div": np.divide,
}  # fmt: skip


def at(how, x, where, updates):
    """`x` with the updates at `where`, one after the other."""
    result = np.array(x)
    if how in _UFUNCS:
        _UFUNCS[how].at(result, where, updates)
    else:
        result[where] = updates
    return result


def along(dim, index):
    """The place of every element of an index of elements."""
    where = list(np.ix_(*map(range, index.shape)))
    where[dim % index.ndim] = index
    return tuple(where)


def elements(x, dim, index, src, how=0):
    """`mint.scatter`."""
    src = src[tuple(map(slice, index.shape))] if isinstance(src, np.ndarray) else src
    return at("Add" if how in (1, "add") else "", x, along(dim, index), src)


def slices(x, dim, index, source, alpha=1):
    """`index_add`."""
    return at("Add", x, (slice(None),) * dim + (index,), alpha * source)


def filled(x, dim, index, value):
    return at("", x, (slice(None),) * int(dim) + (index,), value)


def masked_scatter(x, mask, source):
    result = np.array(x)
    result[np.broadcast_to(mask, x.shape)] = source.ravel()[: np.broadcast_to(mask, x.shape).sum()]
    return result


def segments(reduce, first):
    def function(x, ids, count):
        result = np.full((count, *x.shape[ids.ndim :]), first)
        reduce.at(result, ids, x)
        return result

    return function


def histogram(x, bins=100, min=0, max=0):
    return np.histogram(x, bins, (x.min(), x.max()) if min == max else (min, max))[0]


def lookup(params, indices, offset):
    rows = indices - offset
    return np.where(((rows >= 0) & (rows < len(params)))[..., None], params[rows.clip(0, len(params) - 1)], 0)


def search_sorted(sequence, values, sorter=None, dtype=None, right=False):
    rows = np.broadcast_to(sequence, (*values.shape[:-1], sequence.shape[-1]))
    return (
        (rows[..., None, :] <= values[..., None]).sum(-1) if right else (rows[..., None, :] < values[..., None]).sum(-1)
    )


def counted(x, weights=None, minlength=0):
    return np.bincount(x, weights, minlength)


CALLS = [
    Call("Gather", [X, ints(8, 2, 4), 1, 0], _gather),
    Call("Gather", [Y, ints(4, 2, 4), 1, 1], _gather),
    Call("DeprecatedGather", [X], _gather, {"input_indices": ints(4, 8), "axis": 0}),
    Call("IndexSelect", [Y, 1, ints(4, 8)], lambda x, dim, index: np.take(x, index, dim)),
    Call("DeprecatedTake", [X, ints(32, 4)], np.take),
    Call("GatherD", [X, 1, ints(8, 4, 2)], _gather_elements),
    Call("GatherD", [X, 0, ints(4, 4, 4)], _gather_elements),
    Call("GatherD", [X], _gather_elements, {"dim": 1, "index": ints(8, 4, 8)}),
    Call("GatherNd", [Y, ints(2, 8, 2)], lambda x, at: x[tuple(np.moveaxis(at, -1, 0))]),
    Call("Embedding", [ints(8, 2, 4), f(8, 4), None, None, 2.0, False], lambda i, w, *_: w[i], runs="meta"),
    Call("Embedding", [ints(8, 2, 4), f(8, 4), 0], lambda i, w, *_: w[i], runs="meta"),
    Call("OneHot", [ints(4, 2, 4), 4, SCALAR, np.array(0.5), -1], _one_hot),
    Call("OneHot", [ints(4, 2, 4), 4, SCALAR, np.array(0.5), 1], _one_hot),
    Call("TopK", [X, 3], _top_k),
    Call("TopkExt", [X, 2], _top_k, {"dim": 0}),
    Call("Sort", [X], lambda x, axis: (np.sort(x, axis), np.argsort(x, axis)), {"axis": 0}),
    Call("ArgSort", [X, 1], np.argsort),
    Call("CumSum", [X, 1, False, False], lambda x, dim, *_: x.cumsum(dim)),
    Call("CumsumExt", [X], lambda x, dim, *_: x.cumsum(dim), {"dim": 0}),
    Call("CumProd", [X, 1, False, False], lambda x, dim, *_: x.cumprod(dim)),
]
OTHERS = [
    Call("DeprecatedIndexSelect", [X], _take, {"axis": 1, "index": ints(8, 2)}),
    Call("DeprecatedTake", [X, ints(4, 3), 1], np.take),
    Call("DeprecatedCumsum", [X], lambda x, axis: x.cumsum(axis), {"axis": 1}),
    Call("CumSum", [X, 1, False, True], lambda x, *_: x[:, ::-1].cumsum(1)[:, ::-1]),
    Call("SortExt", [X, 1, True], lambda x, *_: (-np.sort(-x, 1), np.argsort(-x, 1))),
    Call("OneHotExt", [ints(4, 2, 4), 4, np.int64(1), np.int64(0), -1], lambda x, *_: np.eye(4)[x], runs="meta"),
    Call("Take", [X, ints(32, 4)], np.take, runs="meta"),
    *(
        Call(f"TensorScatter{name}", [CUBE, PLACES, f(6, 2)], lambda x, i, u, name=name: at(name, x, tuple(i.T), u))
        for name in ("Update", *_UFUNCS)
    ),
    Call("TensorScatterAdd", [X, ints(4, 2, 6, 1), f(2, 6, 8)], lambda x, i, u: at("Add", x, i[..., 0], u)),
    Call("ScatterNd", [ints(4, 6, 2), f(6, 2), (4, 8, 2)], lambda i, u, s: at("Add", np.zeros(s), tuple(i.T), u)),
    Call("ScatterAddExt", [X, 1, ints(8, 4, 6), f(4, 6)], lambda x, d, i, u: elements(x, d, i, u, "add"), runs="meta"),
    Call("ScatterAddExt", [X, 0, ints(4, 6, 8), f(8, 8)], lambda x, d, i, u: elements(x, d, i, u, "add"), runs="meta"),
    Call("Scatter", [X, 1, COLUMNS, f(4, 6), 0], elements),
    Call("Scatter", [X, -1, ints(8, 4, 6), f(4, 6)], lambda *a, reduce: elements(*a, reduce), {"reduce": "add"}),
    Call("ScatterValue", [X, 1, COLUMNS, 2.5, 0], elements),
    Call(
        "DeprecatedScatter",
        [X],
        lambda x, axis, index, src: elements(x, axis, index, src),
        {"axis": 1, "index": COLUMNS, "src": f(4, 6)},
    ),
    Call("TensorScatterElements", [X, COLUMNS, f(4, 6), 1, "none"], lambda x, i, u, d, how: elements(x, d, i, u, how)),
    Call("TensorScatterElements", [X, ints(4, 6, 8), f(6, 8), 0, "add"], lambda x, i, u, d, h: elements(x, d, i, u, h)),
    Call("IndexAddExt", [X, 1, ints(8, 6), f(4, 6)], slices),
    Call("IndexAddExt", [CUBE, 0, ints(4, 6), f(6, 8, 2), 2], slices),
    Call("IndexFillScalar", [X, 1, ints(8, 4), 2.0], filled, runs="meta"),
    Call("IndexFillTensor", [X, 0, ints(4, 2), np.float64(2)], filled, runs="meta"),
    Call("IndexFill", [X, np.int32(1), ints(8, 4), np.float64(2)], filled),
    Call("MaskedScatter", [X, bools(4, 8), f(32)], masked_scatter),
    Call("IndexPut", [X, f(6), (PLACES[:, 0], PLACES[:, 1]), 0], lambda x, u, i, _: at("", x, i, u)),
    Call("IndexPut", [X, f(6), (ints(4, 6), ints(8, 6)), 1], lambda x, u, i, _: at("Add", x, i, u)),
    Call("UnsortedSegmentSum", [f(4, 6, 2), SEGMENTS, 4], segments(np.add, 0.0)),
    Call("UnsortedSegmentMax", [f(4, 6, 2), SEGMENTS, 3], segments(np.maximum, -np.inf)),
    Call("UnsortedSegmentMin", [f(4, 6, 2), SEGMENTS, 3], segments(np.minimum, np.inf)),
    Call("UnsortedSegmentProd", [f(4, 6, 2), SEGMENTS, 4], segments(np.multiply, 1.0)),
    *(
        Call(name, [X, 4, *ends], histogram, runs=runs, gradient="it has none")
        for name, runs in (("HistcExt", "meta"), ("Histogram", "CPU"))
        for ends in ((-2.0, 2.0), (0.0, 0.0))
    ),
    Call("EmbeddingLookup", [f(6, 4), ints(8, 4, 2), 1], lookup, gradient="it is sparse"),
    Call("SearchSorted", [increasing(4, 8), X], search_sorted),
    Call("SearchSorted", [increasing(4, 8), X, None, 35, True], search_sorted),
    Call("SearchSorted", [increasing(8), X], search_sorted),
    Call("SparseGatherV2", [X, ints(8, 2, 4), 1], lambda x, i, axis: np.take(x, i, axis), runs="meta"),
    Call("BincountExt", [ints(4, 8), None, 4], counted, runs=""),
    Call("BincountExt", [ints(4, 8), f(8), 4], counted, runs=""),
]
