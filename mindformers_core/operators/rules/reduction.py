"""Rules of reductions: a table of operators and their operations, and one rule for all."""

import math
from functools import partial
from math import prod

from mindformers_core.operators import saved
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import correction_given, dim_given, float_reduction
from mindformers_core.operators.rules.dims import as_dim, as_dims, bound, equation, parameters, unary
from mindformers_core.operators.rules.elementwise import keeps_digits
from mindformers_core.operators.signature import LocalCall, tensors_in

_PLAIN, _INDEX, _LAST = "dim keepdim=False dtype", "dim keepdim=False", "dim=-1 keepdim=False"
_SPREAD, _NORM = "dim correction keepdim=False", "ord=2 dim keepdim=False dtype"
_EXTREMES = "dim keepdim=False initial where return_indices"
_NAMES = {"p": "ord", "ddof": "correction", "unbiased": "correction"}  # other names of one argument


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
_MEDIAN = ("global_median", "axis", "keep_dims")
_METHOD = {"source": ".{}"}  # named after the operation
_FOUR = _METHOD | {"operations": 4}  # an element

# Names of operators, the operation of each, their number of outputs, their arguments after the tensor,
# what their gradient saves, and their other facts.
_OPERATORS = (
    ("SumExt MeanExt ReduceAll ReduceAny AnyExt", "sum mean all any any", 1, _PLAIN, saved.NOTHING, {}),
    ("ReduceSum", "sum", 1, "dim keepdim=False skip_mode", saved.NOTHING, {"rewrite": float_reduction("SumExt")}),
    ("ReduceMean", "mean", 1, _PLAIN, saved.NOTHING, {"rewrite": float_reduction("MeanExt")}),
    ("DeprecatedSum", "sum", 1, "dim dtype keepdim=False initial", saved.NOTHING, _METHOD),
    ("DeprecatedMean DeprecatedReduceAll DeprecatedReduceAny", "mean all any", 1, _PLAIN, saved.NOTHING, _METHOD),
    ("ProdExt ReduceMax ReduceMin", "prod max min", 1, _PLAIN, saved.INPUTS_AND_RESULT, {}),
    ("ReduceProd", "prod", 1, _PLAIN, saved.INPUTS_AS_THEY_ARE, {}),
    ("DeprecatedProd", "prod", 1, _PLAIN, saved.INPUTS_AND_RESULT, _METHOD),
    ("Max Min", "max min", 1, "", saved.INPUTS_AND_RESULT, {}),
    ("DeprecatedMax", "extreme_max", 1, _EXTREMES, _EXTREME, {"source": ".max"}),
    ("DeprecatedMin", "extreme_min", 1, _EXTREMES, _EXTREME, {"source": ".min"}),
    ("Any", "any", 1, "", saved.NOTHING, {}),
    ("Argmax Argmin", "argmax argmin", 1, "dim dtype", saved.NOTHING, {}),
    ("ArgMaxExt ArgMinExt", "argmax argmin", 1, _INDEX, saved.NOTHING, _METHOD),
    ("DeprecatedArgmax DeprecatedArgmin", "argmax argmin", 1, _INDEX, saved.NOTHING, _METHOD | {"rewrite": dim_given}),
    ("ArgMaxWithValue ArgMinWithValue", "max_with_index min_with_index", 2, _INDEX, saved.BOTH_RESULTS, {}),
    ("MaxDim MinDim", "max_dim min_dim", 2, _INDEX, saved.SECOND_RESULT, {}),
    ("Var", "var", 1, "dim correction=1 keepdim=False", _VARIANCE, _FOUR | {"rewrite": correction_given}),
    ("Std", "std", 1, _SPREAD, _DEVIATION, _FOUR),
    ("DeprecatedVar", "var", 1, "dim correction=0 keepdim=False", _VARIANCE, _FOUR),
    ("DeprecatedStd", "std", 1, "dim correction=0 keepdim=False", _DEVIATION, _FOUR),
    ("VarMean StdMean", "var_mean std_mean", 2, _SPREAD, saved.UNMEASURED, {"operations": 4}),
    ("ReduceStd", "std_mean", 2, _SPREAD, _BOTH, {"operations": 4}),
    ("LogSumExp", "logsumexp", 1, _PLAIN, _LOG_SUM_EXP, _FOUR),
    ("LinalgVectorNorm", "norm", 1, _NORM, saved.UNMEASURED, {}),
    ("LpNormV2", "norm", 1, "ord=2 dim keepdim=False epsilon", saved.UNMEASURED, {}),
    ("LpNorm", "norm", 1, "dim ord=2 keepdim=False epsilon", saved.UNMEASURED, {"attributes": _LP_NORM}),
    ("L2Loss", "terms", 1, "", saved.UNMEASURED, {}),
    ("CountNonZero DeprecatedCountNonzero", "terms terms", 1, _PLAIN, saved.UNMEASURED, {"source": ".count_nonzero"}),
    ("Nansum DeprecatedNansum", "terms terms", 1, _PLAIN, saved.UNMEASURED, {"source": ".nansum"}),
    ("Median", "median", 2, f"global_median {_LAST} ignore_nan", saved.UNMEASURED, {"attributes": _MEDIAN}),
    ("DeprecatedMedian", "median", 2, _LAST, saved.UNMEASURED, _METHOD),
    ("MedianDim", "median", 2, _LAST, saved.UNMEASURED, {}),
    ("MedianExt", "median_of_all", 1, "", saved.UNMEASURED, {}),
)
_ONE_DIM = "argmax argmin max_with_index min_with_index max_dim min_dim max_pair min_pair max_first min_first median"
_SPREADS = ("var", "std", "var_mean", "std_mean")
_ALGORITHMS = {  # of operations whose algorithms aren't named like them
    **dict.fromkeys(("sum", "terms", "median", "median_of_all"), ""), "norm": "norm norm_max norm_min",
    **{f"extreme_{op}": f"{op} {op}_pair {op}_first" for op in ("max", "min")},
}  # fmt: skip


def _reduce(operation, outputs, known, x, *args, **named):
    """The rule of them all: output dims are those of `x` without the reduced ones, or with 1 in their place.

    A mean over a sharded dim is a sum of terms (each shard's mean over the number of shards); extremes, positions and
    truth values need an algorithm, whose result is whole again.
    """
    given, again = bound({"x": None} | known, (x, *args), named, _NAMES)
    for name, usual in (("initial", None), ("where", True)):
        if given.get(name) not in (None, usual):
            raise ValueError(f"{name}={given[name]!r} is not available for a distributed tensor")
    by_method = operation.startswith("extreme_")  # whose call by position would be another operator's
    if by_method:
        pair = bool(given["return_indices"])
        # the gradient of the extreme along one dim goes to the first position, else all that hold it share it
        kind = "_pair" if pair else "_first" if type(given["dim"]) is int else ""
        operation, outputs = operation.removeprefix("extreme_") + kind, 1 + pair
    dims = _reduced_dims(operation, given, x.ndim)
    keepdim = bool(given.get("keepdim"))
    more = _algebra(operation, dims, x.ndim, given)
    if operation == "norm":
        more["local"] = LocalCall((x, given["ord"], dims, keepdim))
    elif operation in _SPREADS:
        more["local"] = LocalCall((x, int(given["correction"] or 0), dims, keepdim))
    elif by_method:
        along = next(iter(dims), None) if kind else dims
        more["local"] = LocalCall((x, along, keepdim))
    elif named and more.get("distributed") and operation != "mean":
        more["local"] = LocalCall(localize=lambda values, shapes: again(values, {}))  # by position, as algorithms do
    return unary(x, dict.fromkeys(dims, [()] * keepdim), outputs, **more)


def _reduced_dims(operation, given, ndim):
    """The dims counted from the front; for a tensor without dims, 0 and -1 name its one element, as in MindSpore."""
    dim = None if given.get("global_median") else given.get("dim")
    if ndim == 0 and operation not in ("var", "std") and dim in (0, -1, (0,), (-1,), [0], [-1]):
        return ()
    if given.get("skip_mode") and dim in (None, (), []):
        return ()
    return as_dims(dim if operation not in _ONE_DIM.split() or dim is None else as_dim(dim, ndim), ndim)


def _algebra(operation, dims, ndim, given):
    """The part of the `Signature` that depends on the operation over `dims`."""
    if operation.startswith("median") or (operation in _ONE_DIM.split() and given.get("dim") is None and ndim > 1):
        return {"whole": dims}  # the order of all elements, and a position among them, are not those of a shard
    by_device = operation in _SPREADS and given["correction"] is None  # MindSpore's devices take different ones
    if by_device or (operation == "norm" and given.get("dtype") is not None):
        return {"whole": dims}
    factors = [f"d{dim}" for dim in dims]
    if operation == "terms" or operation == "norm" and given["ord"] == 0:
        return {"reduced": dict.fromkeys(factors, "sum")}
    if operation in ("sum", "mean"):
        passes = given.get("dtype") is None or keeps_digits(given["dtype"])
        more = {"reduced": dict.fromkeys(factors, "sum"), "linear": ({0},) if passes else ()}
        return more | ({"distributed": dict.fromkeys(factors, "mean")} if operation == "mean" else {})
    if operation == "norm":
        operation = {math.inf: "norm_max", -math.inf: "norm_min"}.get(given["ord"], operation)
    return {"distributed": dict.fromkeys(factors, operation)}


for _names, _operations, _outputs, _text, _saves, _facts in _OPERATORS:
    for _name, _operation in zip(_names.split(), _operations.split()):
        _source = _facts.get("source", "").format(_operation)
        _rule = partial(_reduce, _operation, _outputs, parameters(_text))
        _asks = tuple(_ALGORITHMS.get(_operation, _operation).split())
        register_operator(_name, saves=_saves, algorithms=_asks, **_facts | {"source": _source})(_rule)


@register_operator("Quantile", attributes=("dim", "keep_dims"))
def quantile(x, q, dim=None, keep_dims=False):
    """Quantiles along `dim`, in a first dim where `q` is a vector."""
    dims = as_dims(dim, x.ndim)
    names = [f"D{place}" if place in dims else f"d{place}" for place in range(x.ndim)]
    kept = ["1" if place in dims else name for place, name in enumerate(names) if keep_dims or place not in dims]
    points = tensors_in([q])
    several = "Q" * sum(point.ndim for point in points)
    return equation(f"{' '.join(names)}{f', {several}' * len(points)} -> {several} {' '.join(kept)}", x, *points)


@register_operator("InTopK")
def in_top_k(predictions, targets, k=1):
    """Whether the target is among the `k` best classes of each row."""
    return equation("n C, n -> n", predictions, targets)


@register_operator("L2Normalize", operations=4, attributes=("axis",))
def normalized(x, axis=0):
    """Vectors along `axis`, of length 1."""
    return unary(x, whole=as_dims(axis, x.ndim))


@register_operator("Renorm", operations=4, attributes=("dim",))
def renormalized(x, dim):
    """The slices of `dim`, none longer than a limit."""
    return unary(x, whole=set(range(x.ndim)) - {as_dim(dim, x.ndim)})
