"""Operators that change a tensor in place, as functions of its value: the tensor then has the result, a new version.

A write of a Parameter is state of its Cell: the value is written, in the layout that the Parameter has.
"""

from mindspore import Parameter, Tensor, dtype as mstype, mint, ops
from mindspore.ops import auto_generate

from mindformers_core.lowering.aliases import check_memory
from mindformers_core.lowering.indexing import with_items


def _rows(function):
    """A scatter of rows: indices of any shape, one a row."""
    return lambda x, indices, updates: function(x, ops.expand_dims(indices, -1), updates)


def _replaced(x, value, *_):
    return value


def scatter_update(x, indices, updates):
    """`x` with updates at coordinates."""
    return ops.TensorScatterUpdate()(x, indices, updates)


def _written_at(x, dim, index, value):
    """After `x[..., index, ...] = value`, with `index` at a dim."""
    return with_items(x, (*(slice(None),) * (dim % x.ndim), index), value)


def _index_put(x, indices, values, accumulate=False):
    index = tuple(slice(None) if each is None else each for each in indices)
    return with_items(x, index, values, accumulate)


def _put(x, index, source, accumulate=False):
    flat, index, source = (ops.reshape(each, (-1,)) for each in (x, index, source))
    return ops.reshape(with_items(flat, index, source, accumulate), x.shape)


def _scatter(x, dim, index, source, reduce=None):
    """`reduce` is None, "add", or their number."""
    if reduce not in (None, 0, 1, "none", "add"):
        raise ValueError(f"scatter_(reduce={reduce!r}) is not available: take the product of x and a scatter into ones")
    source = source if isinstance(source, Tensor) else ops.full(index.shape, source, dtype=x.dtype)
    source = source[tuple(slice(0, size) for size in index.shape)]
    return ops.tensor_scatter_elements(x, index, source, dim, "add" if reduce in (1, "add") else "none")


def _fill_diagonal(x, value, wrap=False):
    """The diagonal of a matrix, which `wrap` lets begin anew below a square one; of a cube its longest."""
    places = range(0, x.shape[0] * x.shape[1] if wrap else min(x.shape) * x.shape[1], x.shape[1] + 1)
    rows, columns = ([place // x.shape[1] for place in places], [place % x.shape[1] for place in places])
    return with_items(x, (rows, *(columns,) * (x.ndim - 1)), value)


def _divided(x, other, rounding_mode=None):
    """`rounding_mode` is a name, or its number."""
    mode = {0: "floor", 1: "trunc"}.get(rounding_mode, rounding_mode)
    return mint.div(x, other, rounding_mode=mode)


def _drawn(operator, transform):
    """A draw of the tensor's shape, with seed and offset as the last two arguments."""

    def draw(x, *args):
        *bounds, seed, offset = args
        return transform(getattr(auto_generate, operator)()(x, seed, offset, mstype.float32, None), *bounds)

    return draw


def _random_integers(x, low, high, seed, offset):
    """From `low` to below `high`; default: all that the dtype holds exactly, up to 2**31."""
    digits = {"float16": 11, "bfloat16": 8, "float32": 24, "int8": 7, "uint8": 8, "int16": 15}
    high = 2 ** digits.get(str(x.dtype).lower(), 31) if high is None else int(high)
    return auto_generate.RandIntLike()(x, int(low or 0), high, seed, offset, mstype.int64, None)


# operator -> the new value, by the old one and the operator's other arguments
_ARITHMETIC = {
    "Div": mint.div, "Divs": mint.div, "DivMod": _divided, "DivMods": _divided, "FloorDivide": ops.floor_div,
    "FloorDivides": ops.floor_div, "Mul": mint.mul, "Muls": mint.mul, "AddExt": mint.add, "AddsExt": mint.add,
    "SubExt": mint.sub, "SubScalar": mint.sub, "RemainderTensorScalar": mint.remainder,
    "RemainderTensorTensor": mint.remainder,
    "Addr": lambda x, a, b, beta=1, alpha=1: ops.addr(x, a, b, beta=beta, alpha=alpha),
    "Addmm": lambda x, a, b, beta=1, alpha=1: mint.addmm(x, a, b, beta=beta, alpha=alpha),
    "Elu": mint.nn.functional.elu, "Erfinv": mint.erfinv, "Exp": mint.exp, "Floor": mint.floor, "Log": mint.log,
    "ReLU": mint.nn.functional.relu, "SiLU": mint.nn.functional.silu, "Sigmoid": mint.sigmoid, "Sign": mint.sign,
    "Tanh": mint.tanh, "Hardtanh": mint.nn.functional.hardtanh, "Threshold": mint.nn.functional.threshold,
    "ClampScalar": mint.clamp, "ClampTensor": mint.clamp, "StopGradient": ops.stop_gradient,
}  # fmt: skip
_FILLED = {
    **dict.fromkeys(("Copy", "FillTensor"), _replaced),
    "Zero": ops.zeros_like,
    "FillScalar": ops.full_like,
    "FillDiagonal": _fill_diagonal,
    **dict.fromkeys(("MaskedFillScalar", "MaskedFillTensor"), ops.masked_fill),
    "MaskedScatter": lambda x, mask, source: x.masked_scatter(mask, source),
}
_INDEXED = {
    "IndexAdd": _rows(ops.tensor_scatter_add),
    "IndexAddExt": lambda x, dim, index, source, alpha=1: x.index_add(dim, index, source, alpha=alpha),
    **dict.fromkeys(("IndexCopy", "IndexFillScalar", "IndexFillTensor"), _written_at),
    "IndexPut": _index_put,
    "Put": _put,
    "ScatterAdd": lambda x, dim, index, source: _scatter(x, dim, index, source, "add"),
    **dict.fromkeys(("ScatterSrc", "ScatterSrcReduce", "ScatterValue", "ScatterValueReduce"), _scatter),
}
_DRAWS = {
    "Uniform": _drawn("RandLikeExt", lambda draws, low, high: draws * (high - low) + low),
    "Normal": _drawn("RandnLike", lambda draws, mean, std: draws * std + mean),
    "Exponential": _drawn("RandLikeExt", lambda draws, rate: ops.log(1.0 - draws) * (-1.0 / rate)),
    **dict.fromkeys(("BernoulliScalar", "BernoulliTensor"), _drawn("RandLikeExt", ops.less)),
    "Random": _random_integers,
}
_SCATTERS = {
    "Update": scatter_update,
    **{name: getattr(ops, f"tensor_scatter_{name.lower()}") for name in ("Add", "Sub", "Mul", "Div", "Max", "Min")},
}
_IN_PLACE = {
    "Assign": _replaced,
    "AssignAdd": lambda x, value: x + value,
    "AssignSub": lambda x, value: x - value,
    **{f"ScatterNd{name}": function for name, function in _SCATTERS.items()},
    **{f"Scatter{name}": _rows(function) for name, function in _SCATTERS.items()},
    **{f"Inplace{name}": f for table in (_ARITHMETIC, _FILLED, _INDEXED, _DRAWS) for name, f in table.items()},
}
DRAWS_IN_PLACE = frozenset(f"Inplace{name}" for name in _DRAWS)


def is_in_place(name):
    """Whether an operator changes a tensor in place."""
    return name.startswith("Inplace") or name in _IN_PLACE


def written(name, args, kwargs):
    """The tensor that an operator changes in place, after it got its new value; None for any other operator."""
    function, tensor = _IN_PLACE.get(name), args[0]
    if function is None or not hasattr(type(tensor), "overwrite") and name not in DRAWS_IN_PLACE:
        return None
    value = function(*args, **kwargs)
    if not hasattr(type(tensor), "overwrite"):
        check_memory(tensor)
        return tensor.copy_(ops.cast(value, tensor.dtype))
    if isinstance(vars(value).get("original", vars(value).get("_local")), Parameter):
        value = value * 1  # the tensor doesn't become the Parameter
    if value.shape != args[0].shape:
        value = ops.broadcast_to(value, args[0].shape)
    args[0].overwrite(value if value.dtype == args[0].dtype else ops.cast(value, args[0].dtype))
    return args[0]
