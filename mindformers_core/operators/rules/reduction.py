"""Rules of reductions: a table of operators and their operations, and one rule for all."""

import math
from functools import partial
from math import prod

from mindformers_core.operators import saved
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import correction_given, dim_given, float_reduction
from mindformers_core.operators.rules.dims import as_dim, as_dims, equation, plain_names, unary
from mindformers_core.operators.rules.elementwise import keeps_digits
from mindformers_core.operators.signature import tensors_in

_PLAIN = ("dim", "keepdim", "dtype")
_SPREAD = ("dim", "correction", "keepdim")
_SPREAD_BY_METHOD = ("dim", "ddof", "keepdim")
_NORM = ("ord", "dim", "keepdim", "dtype")
_MEDIAN = ("global_median", "dim", "keepdim", "ignore_nan")
_INDEX = ("dim", "keepdim")
_EXTREMES = ("dim", "keepdim", "initial", "where", "return_indices")


# Saved internal tensors. Of a variance: the differences from the mean, and their powers.
_VARIANCE = saved.SavedByOperator(internal=lambda operands, results: [operands[0].nbytes] * 2)
_DEVIATION = saved.SavedByOperator(
    outputs=(0,), internal=lambda operands, results: [*[operands[0].nbytes] * 2, results[0].nbytes]
)
# The position of each extreme, in int64.
_EXTREME = saved.SavedByOperator(outputs=(0,), internal=lambda operands, results: [prod(results[0].shape) * 8])
# Maxima, exponentials and their sums.
_LOG_SUM_EXP = saved.SavedByOperator(
    "all", internal=lambda operands, results: [results[0].nbytes, operands[0].nbytes, results[0].nbytes]
)
_BOTH = saved.SavedByOperator("all", outputs=(0, 1), as_they_are=True)

_LP_NORM = ("axis", "p", "keep_dims", "epsilon")  # attributes
_METHOD = {"source": ".{}"}  # named after the operation

# Names of operators, the operation of each, their number of outputs, the names of their positional arguments after the
# tensor, what their gradient saves, and their other facts.
_OPERATORS = (
    ("SumExt MeanExt ReduceAll ReduceAny AnyExt", "sum mean all any any", 1, _PLAIN, saved.NOTHING, {}),
    ("ReduceSum", "sum", 1, ("dim", "keepdim", "skip_mode"), saved.NOTHING, {"rewrite": float_reduction("SumExt")}),
    ("ReduceMean", "mean", 1, _PLAIN, saved.NOTHING, {"rewrite": float_reduction("MeanExt")}),
    ("DeprecatedSum", "sum", 1, ("dim", "dtype", "keepdim", "initial"), saved.NOTHING, _METHOD),
    ("DeprecatedMean DeprecatedReduceAll DeprecatedReduceAny", "mean all any", 1, _PLAIN, saved.NOTHING, _METHOD),
    ("ProdExt ReduceMax ReduceMin", "prod max min", 1, _PLAIN, saved.INPUTS_AND_RESULT, {}),
    ("ReduceProd", "prod", 1, _PLAIN, saved.INPUTS_AS_THEY_ARE, {}),
    ("DeprecatedProd", "prod", 1, _PLAIN, saved.INPUTS_AND_RESULT, _METHOD),
    ("Max Min", "max min", 1, (), saved.INPUTS_AND_RESULT, {}),
    ("DeprecatedMax", "extreme_max", 1, _EXTREMES, _EXTREME, {"source": ".max"}),
    ("DeprecatedMin", "extreme_min", 1, _EXTREMES, _EXTREME, {"source": ".min"}),
    ("Any", "any", 1, (), saved.NOTHING, {}),
    ("Argmax Argmin", "argmax argmin", 1, ("dim", "dtype"), saved.NOTHING, {}),
    ("ArgMaxExt ArgMinExt", "argmax argmin", 1, _INDEX, saved.NOTHING, _METHOD),
    ("DeprecatedArgmax DeprecatedArgmin", "argmax argmin", 1, _INDEX, saved.NOTHING, _METHOD | {"rewrite": dim_given}),
    ("ArgMaxWithValue ArgMinWithValue", "max_with_index min_with_index", 2, _INDEX, saved.BOTH_RESULTS, {}),
    ("MaxDim MinDim", "max_dim min_dim", 2, _INDEX, saved.SECOND_RESULT, {}),
    ("Var", "var", 1, _SPREAD, _VARIANCE, _METHOD | {"operations": 4, "rewrite": correction_given}),
    ("Std", "std", 1, _SPREAD, _DEVIATION, _METHOD | {"operations": 4}),
    ("DeprecatedVar", "var", 1, _SPREAD_BY_METHOD, _VARIANCE, _METHOD | {"operations": 4}),
    ("DeprecatedStd", "std", 1, _SPREAD_BY_METHOD, _DEVIATION, _METHOD | {"operations": 4}),
    ("VarMean StdMean", "var_mean std_mean", 2, _SPREAD, saved.UNMEASURED, {"operations": 4}),
    ("ReduceStd", "std_mean", 2, ("dim", "unbiased", "keepdim"), _BOTH, {"operations": 4}),
    ("LogSumExp", "logsumexp", 1, _PLAIN, _LOG_SUM_EXP, _METHOD | {"operations": 4}),
    ("LinalgVectorNorm", "norm", 1, _NORM, saved.UNMEASURED, {}),
    ("LpNormV2", "norm", 1, ("ord", "dim", "keepdim", "epsilon"), saved.UNMEASURED, {}),
    ("LpNorm", "norm", 1, ("dim", "ord", "keepdim", "epsilon"), saved.UNMEASURED, {"attributes": _LP_NORM}),
    ("L2Loss", "terms", 1, (), saved.UNMEASURED, {}),
    ("CountNonZero DeprecatedCountNonzero", "terms terms", 1, _PLAIN, saved.UNMEASURED, {"source": ".count_nonzero"}),
    ("Nansum DeprecatedNansum", "terms terms", 1, _PLAIN, saved.UNMEASURED, {"source": ".nansum"}),
    ("Median", "median", 2, _MEDIAN, saved.UNMEASURED, {"attributes": ("global_median", "axis", "keep_dims")}),
    ("DeprecatedMedian", "median", 2, _INDEX, saved.UNMEASURED, _METHOD),
    ("MedianDim", "median", 2, _INDEX, saved.UNMEASURED, {}),
    ("MedianExt", "median_of_all", 1, (), saved.UNMEASURED, {}),
)
_WHOLE = ("median", "median_of_all")  # they need the elements in order
_ONE_DIM = (
    *("argmax", "argmin", "max_with_index", "min_with_index", "max_dim", "min_dim", "max_pair", "min_pair"),
    *("max_first", "min_first", "median"),
)
_SPREADS = ("var", "std", "var_mean", "std_mean")
_BY_METHOD = ("extreme_max", "extreme_min")  # their call by position would be another operator's


def _reduce(operation, outputs, order, x, *args, **named):
    """The rule of them all: output dims are those of `x` without the reduced ones, or with 1 in their place.

    A mean over a sharded dim is a sum of terms (each shard's mean over the number of shards); extremes, positions and
    truth values need an algorithm, whose result is whole again.
    """
    given = _arguments(order, args, named)
    by_method = operation in _BY_METHOD
    if by_method:
        pair = bool(given.get("return_indices"))
        # the gradient of the extreme along one dim goes to the first position, else all that hold it share it
        kind = "_pair" if pair else "_first" if type(given.get("dim")) is int else ""
        operation, outputs = operation.removeprefix("extreme_") + kind, 1 + pair
    dims = _reduced_dims(operation, given, x.ndim)
    if given.get("skip_mode") and given.get("dim") in (None, (), []):
        dims = ()
    keepdim = bool(given.get("keepdim"))
    output = dict.fromkeys(dims, [()] * keepdim)
    more = _algebra(operation, dims, x.ndim, given, order)
    own = _own_arguments(operation, dims, order, given, by_method)
    if own is not None:
        more["arguments"] = (x, *own, keepdim)
    elif named and more.get("distributed") and operation != "mean":
        last = max(place for place, name in enumerate(order) if name in given)
        values = [given.get(name, False if name == "keepdim" else None) for name in order[: last + 1]]
        more["localize"] = lambda args, shapes: (x, *values)  # by position, where the algorithm finds them
    return unary(x, output, outputs, **more)


def _arguments(order, args, named):
    """The arguments by name."""
    renamed = {"p": "ord", "ddof": "ddof" if "ddof" in order else "correction"}
    named = {renamed.get(name, name): value for name, value in plain_names(named).items()}
    unknown = sorted(set(named) - set(order))
    if unknown or len(args) > len(order):
        raise TypeError(f"got {unknown or args[len(order) :]} besides the arguments {', '.join(order)}")
    given = dict(zip(order, args)) | named
    for name, usual in (("initial", None), ("where", True)):
        if given.get(name) not in (None, usual):
            raise ValueError(f"{name}={given[name]!r} is not available for a distributed tensor")
    return given


def _reduced_dims(operation, given, ndim):
    """The dims counted from the front; for a tensor without dims, 0 and -1 name its one element, as in MindSpore."""
    if ndim == 0 and operation not in ("var", "std") and given.get("dim") in (0, -1, (0,), (-1,), [0], [-1]):
        return ()
    if operation in _ONE_DIM and not given.get("global_median"):
        dim = given.get("dim", -1 if operation == "median" else None)
        return tuple(range(ndim)) if dim is None else (as_dim(dim, ndim),)
    return as_dims(None if given.get("global_median") else given.get("dim"), ndim)


def _own_arguments(operation, dims, order, given, by_method):
    """The arguments of an algorithm that doesn't call the operator, before `keepdim`; None where it does."""
    if operation == "norm":
        return given.get("ord", 2), dims
    if operation in _SPREADS:
        return _correction(operation, order, given), dims
    return (next(iter(dims), None) if operation.endswith(("_pair", "_first")) else dims,) if by_method else None


def _correction(operation, order, given):
    """Of a standard deviation without one, MindSpore's devices take different ones: None."""
    if "unbiased" in order:
        return int(given["unbiased"])
    return given.get("ddof", 0) if "ddof" in order else given.get("correction", 1 if operation == "var" else None)


def _algebra(operation, dims, ndim, given, order):
    """The part of the `Signature` that depends on the operation over `dims`."""
    if operation in _WHOLE or (operation in _ONE_DIM and given.get("dim") is None and ndim > 1):
        return {"whole": dims}  # a position in the flattened tensor is no position in a shard
    by_device = operation in _SPREADS and _correction(operation, order, given) is None
    if by_device or (operation == "norm" and given.get("dtype") is not None):
        return {"whole": dims}
    factors = [f"d{dim}" for dim in dims]
    if operation == "terms" or operation == "norm" and given.get("ord") == 0:
        return {"reduced": dict.fromkeys(factors, "sum")}
    if operation in ("sum", "mean"):
        passes = given.get("dtype") is None or keeps_digits(given["dtype"])
        more = {"reduced": dict.fromkeys(factors, "sum"), "linear": ({0},) if passes else ()}
        return more | ({"distributed": dict.fromkeys(factors, "mean")} if operation == "mean" else {})
    if operation == "norm":
        operation = {math.inf: "norm_max", -math.inf: "norm_min"}.get(given.get("ord"), operation)
    return {"distributed": dict.fromkeys(factors, operation)}


for _names, _operations, _outputs, _order, _saves, _facts in _OPERATORS:
    for _name, _operation in zip(_names.split(), _operations.split()):
        _source = _facts.get("source", "").format(_operation)
        _rule = partial(_reduce, _operation, _outputs, _order)
        register_operator(_name, saves=_saves, **_facts | {"source": _source})(_rule)


@register_operator("Quantile", saves=saved.UNMEASURED, attributes=("dim", "keep_dims"))
def quantile(x, q, dim=None, keep_dims=False):
    """Quantiles along `dim`, in a first dim where `q` is a vector."""
    dims = as_dims(dim, x.ndim)
    names = [f"D{place}" if place in dims else f"d{place}" for place in range(x.ndim)]
    kept = ["1" if place in dims else name for place, name in enumerate(names) if keep_dims or place not in dims]
    points = tensors_in([q])
    several = "Q" * sum(point.ndim for point in points)
    return equation(f"{' '.join(names)}{f', {several}' * len(points)} -> {several} {' '.join(kept)}", x, *points)


@register_operator("InTopK", saves=saved.UNMEASURED)
def in_top_k(predictions, targets, k=1):
    """Whether the target is among the `k` best classes of each row."""
    return equation("n C, n -> n", predictions, targets)


@register_operator("L2Normalize", saves=saved.UNMEASURED, operations=4, attributes=("axis",))
def normalized(x, axis=0):
    """Vectors along `axis`, of length 1."""
    return unary(x, whole=as_dims(axis, x.ndim))


@register_operator("Renorm", saves=saved.UNMEASURED, operations=4, attributes=("dim",))
def renormalized(x, dim):
    """The slices of `dim`, none longer than a limit."""
    return unary(x, whole=set(range(x.ndim)) - {as_dim(dim, x.ndim)})
