"""Operators that reduce dims to one element, or to its place."""

import numpy as np

from operator_calls.call import SCALAR, Call, X, Y, bools, ints


def _reduction(reduce):
    def function(x, dim=None, keepdim=False, *_, **named):
        dim, keepdim = named.get("dim", named.get("axis", dim)), named.get("keepdim", named.get("keepdims", keepdim))
        dims = None if dim in (None, ()) else tuple(dim) if isinstance(dim, (tuple, list)) else dim
        return reduce(x, axis=dims, keepdims=keepdim)

    return function


def _with_extreme(extreme, arg, index_first):
    def function(x, dim, keepdim=False, **named):
        keepdim = named.get("keepdim", keepdim)
        pair = arg(x, dim, keepdims=keepdim), extreme(x, dim, keepdims=keepdim)
        return pair if index_first else pair[::-1]

    return function


def _spread(x, dim, correction=1, keepdim=False):
    return x.std(dim, ddof=correction, keepdims=keepdim)


CALLS = [
    Call("SumExt", [X], _reduction(np.sum)),
    Call("SumExt", [Y, (0, -1), True], _reduction(np.sum)),
    Call("SumExt", [X], lambda x, dtype: x.astype(np.float16).astype(float).sum(), {"dtype": 42}),
    Call("ReduceSum", [Y, (), False, False], _reduction(np.sum)),
    Call("ReduceSum", [X, (), False, True], lambda x, *_: x, broken="its result is memory that was never written"),
    Call("DeprecatedSum", [X], _reduction(np.sum), {"axis": 1, "keepdims": True}),
    Call("DeprecatedSum", [X, 1, None, True], lambda x, dim, dtype, keepdim: x.sum(dim, keepdims=keepdim)),
    Call("MeanExt", [X, -1, True], _reduction(np.mean)),
    Call("ReduceMean", [Y, (), False], _reduction(np.mean)),
    Call("ProdExt", [X, 1], _reduction(np.prod)),
    Call("Max", [X], _reduction(np.max)),
    Call("ReduceMax", [Y, 1, True], _reduction(np.max)),
    Call("ReduceMin", [Y, (1, 2), False], _reduction(np.min)),
    Call("DeprecatedMax", [X], _reduction(np.max), {"axis": 1}),
    Call("ReduceAll", [bools(4, 8), 1], _reduction(np.all)),
    Call("Any", [bools(4, 8)], _reduction(np.any)),
    Call("Argmax", [X, -1, 34], lambda x, dim, _: x.argmax(dim)),
    Call("ArgMinExt", [X, None, False], lambda x, *_: x.argmin()),
    Call("DeprecatedArgmax", [X], _reduction(np.argmax), {"axis": 1, "keepdims": True}),
    Call("ArgMaxWithValue", [Y, 1, False], _with_extreme(np.max, np.argmax, True)),
    Call("ArgMinWithValue", [X, 0, True], _with_extreme(np.min, np.argmin, True)),
    Call("MaxDim", [X, 0], _with_extreme(np.max, np.argmax, False)),
    Call("MinDim", [Y, 2], _with_extreme(np.min, np.argmin, False), {"keepdim": True}),
    Call("Std", [Y], _reduction(np.std), {"dim": 1, "correction": 0, "keepdim": True}),
    Call("DeprecatedVar", [X, 1], _reduction(np.var)),
    Call("ReduceStd", [X, (1,), False, False], lambda x, dim, *_: (x.std(dim), x.mean(dim))),
    Call("LogSumExp", [X, 1], _reduction(lambda x, axis, keepdims: np.log(np.exp(x).sum(axis, keepdims=keepdims)))),
    Call("LinalgVectorNorm", [X, 2.0, 1, False, None], lambda x, order, dim, *_: np.sqrt((x**2).sum(dim)), runs="meta"),
    *[Call(name, [SCALAR, dim], lambda x, _: x) for name in ("SumExt", "MeanExt", "ReduceMax") for dim in (-1, (0,))],
    Call("MaxDim", [SCALAR, -1], lambda x, _: (x, np.int64(0))),
]
OTHERS = [
    Call("AnyExt", [bools(4, 8), 1], _reduction(np.any)),
    Call("ReduceAny", [bools(4, 8), (1,), True], lambda x, *_: x.any(1, keepdims=True)),
    Call("DeprecatedReduceAll", [bools(4, 8)], _reduction(np.all), {"axis": 1}),
    Call("DeprecatedReduceAny", [bools(4, 8)], _reduction(np.any), {"axis": 1}),
    Call("ArgMaxExt", [X, 1], _reduction(np.argmax)),
    Call("Argmin", [X, 1, 34], lambda x, dim, _: x.argmin(dim)),
    Call("DeprecatedArgmin", [X, 1], _reduction(np.argmin)),
    Call("DeprecatedMean", [X], _reduction(np.mean), {"axis": (0, 1)}),
    Call("ReduceSum", [ints(9, 4, 8), (0,), True, False], lambda x, *_: x.sum(0, keepdims=True)),
    Call("ReduceSum", [Y, (0, 2), True, False], lambda x, *_: x.sum((0, 2), keepdims=True)),
    Call("DeprecatedMin", [X], _reduction(np.min), {"axis": 1}),
    Call("DeprecatedProd", [X, 1], _reduction(np.prod)),
    Call("ReduceProd", [X, 1, False], _reduction(np.prod)),
    Call("DeprecatedStd", [X, 1, 1, True], _spread),
    Call("Var", [X, 1, 0], lambda x, dim, _: x.var(dim)),
    Call("SumExt", [X, -1, True, None], lambda x, *_: x.sum(-1, keepdims=True)),
]
