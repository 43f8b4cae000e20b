"""Rules of reductions: a table of operators by what they compute, and one rule for all."""

from functools import partial
from math import prod

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import dim_given, float_reduction
from mindformers_core.operators.rules.dims import as_dim, as_dims, dim_names, plain_names, unary
from mindformers_core.operators.rules.elementwise import keeps_digits
from mindformers_core.operators.saved import (
    BOTH_RESULTS,
    INPUTS_AND_RESULT,
    INPUTS_AS_THEY_ARE,
    NOTHING,
    SECOND_RESULT,
    UNMEASURED,
    SavedByOperator,
)

__all__ = []

_PLAIN = ("dim", "keepdim", "dtype")
_SPREAD = ("dim", "correction", "keepdim")
_INDEX = ("dim", "keepdim")
_EXTREMES = ("dim", "keepdim", "initial", "where", "return_indices")


def _spread(operands, results):
    """Of a variance: the differences from the mean, and their powers."""
    return [operands[0].nbytes] * 2


def _spread_and_variance(operands, results):
    return [*_spread(operands, results), results[0].nbytes]


def _index_of_extreme(operands, results):
    """Where each extreme stands, in int64."""
    return [prod(results[0].shape) * 8]


def _maximum_exponentials_and_sum(operands, results):
    return [results[0].nbytes, operands[0].nbytes, results[0].nbytes]


_VARIANCE = SavedByOperator(internal=_spread)
_DEVIATION = SavedByOperator(outputs=(0,), internal=_spread_and_variance)
_EXTREME = SavedByOperator(outputs=(0,), internal=_index_of_extreme)
_LOG_SUM_EXP = SavedByOperator("all", internal=_maximum_exponentials_and_sum)
_BOTH = SavedByOperator("all", outputs=(0, 1), as_they_are=True)

# What each operator computes, its number of outputs, the names of its positional arguments behind the tensor, what its
# gradient keeps, and what else is known of it.
_OPERATORS = {
    "SumExt": ("sum", 1, _PLAIN, NOTHING, {}),
    "ReduceSum": ("sum", 1, ("dim", "keepdim", "skip_mode"), NOTHING, {"rewrite": float_reduction("SumExt")}),
    "DeprecatedSum": ("sum", 1, ("dim", "dtype", "keepdim", "initial"), NOTHING, {"source": ".sum"}),
    "MeanExt": ("mean", 1, _PLAIN, NOTHING, {}),
    "ReduceMean": ("mean", 1, _PLAIN, NOTHING, {"rewrite": float_reduction("MeanExt")}),
    "DeprecatedMean": ("mean", 1, _PLAIN, NOTHING, {"source": ".mean"}),
    "ProdExt": ("prod", 1, _PLAIN, INPUTS_AND_RESULT, {}),
    "ReduceProd": ("prod", 1, _PLAIN, INPUTS_AS_THEY_ARE, {}),
    "DeprecatedProd": ("prod", 1, _PLAIN, INPUTS_AND_RESULT, {"source": ".prod"}),
    "Max": ("max", 1, (), INPUTS_AND_RESULT, {}),
    "ReduceMax": ("max", 1, _PLAIN, INPUTS_AND_RESULT, {}),
    "DeprecatedMax": ("extreme", 1, _EXTREMES, _EXTREME, {"source": ".max"}),
    "Min": ("min", 1, (), INPUTS_AND_RESULT, {}),
    "ReduceMin": ("min", 1, _PLAIN, INPUTS_AND_RESULT, {}),
    "DeprecatedMin": ("extreme", 1, _EXTREMES, _EXTREME, {"source": ".min"}),
    "ReduceAll": ("all", 1, _PLAIN, NOTHING, {}),
    "DeprecatedReduceAll": ("all", 1, _PLAIN, NOTHING, {"source": ".all"}),
    "Any": ("any", 1, (), NOTHING, {}),
    "AnyExt": ("any", 1, _PLAIN, NOTHING, {}),
    "ReduceAny": ("any", 1, _PLAIN, NOTHING, {}),
    "DeprecatedReduceAny": ("any", 1, _PLAIN, NOTHING, {"source": ".any"}),
    "Argmax": ("argmax", 1, ("dim", "dtype"), NOTHING, {}),
    "ArgMaxExt": ("argmax", 1, _INDEX, NOTHING, {"source": ".argmax"}),
    "DeprecatedArgmax": ("argmax", 1, _INDEX, NOTHING, {"source": ".argmax", "rewrite": dim_given}),
    "Argmin": ("argmin", 1, ("dim", "dtype"), NOTHING, {}),
    "ArgMinExt": ("argmin", 1, _INDEX, NOTHING, {"source": ".argmin"}),
    "DeprecatedArgmin": ("argmin", 1, _INDEX, NOTHING, {"source": ".argmin", "rewrite": dim_given}),
    "ArgMaxWithValue": ("max_with_index", 2, _INDEX, BOTH_RESULTS, {}),
    "ArgMinWithValue": ("min_with_index", 2, _INDEX, BOTH_RESULTS, {}),
    "MaxDim": ("max_dim", 2, _INDEX, SECOND_RESULT, {}),
    "MinDim": ("min_dim", 2, _INDEX, SECOND_RESULT, {}),
    "Var": ("var", 1, _SPREAD, _VARIANCE, {"source": ".var", "operations": 4}),
    "Std": ("std", 1, _SPREAD, _DEVIATION, {"source": ".std", "operations": 4}),
    "DeprecatedVar": ("var", 1, _SPREAD, _VARIANCE, {"source": ".var", "operations": 4}),
    "DeprecatedStd": ("std", 1, _SPREAD, _DEVIATION, {"source": ".std", "operations": 4}),
    "VarMean": ("var", 2, _SPREAD, UNMEASURED, {"operations": 4}),
    "StdMean": ("std", 2, _SPREAD, UNMEASURED, {"operations": 4}),
    "ReduceStd": ("std", 2, ("dim", "unbiased", "keepdim"), _BOTH, {"operations": 4}),
    "LogSumExp": ("logsumexp", 1, _PLAIN, _LOG_SUM_EXP, {"source": ".logsumexp", "operations": 4}),
    "LinalgVectorNorm": ("norm", 1, ("ord", "dim", "keepdim", "dtype"), UNMEASURED, {}),
}
_WHOLE = ("prod", "var", "std", "norm", "extreme")  # "extreme": its call by position would be another operator's
_ONE_DIM = ("argmax", "argmin", "max_with_index", "min_with_index", "max_dim", "min_dim")


def _reduce(operation, outputs, order, x, *args, **named):
    """The rule of them all: output dims are those of `x` without the reduced ones, or with 1 in their place.

    A mean over a cut dim has terms that sum up (each shard's mean over the number of shards); extremes, positions and
    truth values need an algorithm, whose result is whole again.
    """
    given = _arguments(order, args, named)
    dims = _reduced_dims(operation, given, x.ndim)
    if given.get("skip_mode") and given.get("dim") in (None, (), []):
        dims = ()
    names = dim_names(x)
    keepdim = bool(given.get("keepdim"))
    output = [() if dim in dims else names[dim] for dim in range(x.ndim) if keepdim or dim not in dims]
    more = _algebra(operation, dims, x.ndim, given)
    if named and more.get("distributed") and operation != "mean":
        values = [given.get(name, False if name == "keepdim" else None) for name in order[: _last(order, given) + 1]]
        more["localize"] = lambda args, shapes: (x, *values)  # by position, where the algorithm finds them
    return unary(x, output, outputs, **more)


def _arguments(order, args, named):
    """The arguments by name."""
    named = {"correction" if name == "ddof" else name: value for name, value in plain_names(named).items()}
    unknown = sorted(set(named) - set(order))
    if unknown or len(args) > len(order):
        raise TypeError(f"got {unknown or args[len(order) :]} besides the arguments {', '.join(order)}")
    given = dict(zip(order, args)) | named
    for name, usual in (("initial", None), ("where", True), ("return_indices", False)):
        if given.get(name) not in (None, usual):
            raise ValueError(f"{name}={given[name]!r} is not available for a distributed tensor")
    return given


def _last(order, given):
    return max(place for place, name in enumerate(order) if name in given)


def _reduced_dims(operation, given, ndim):
    """The dims counted from the front; for a tensor without dims, 0 and -1 name its one element, as in MindSpore."""
    if ndim == 0 and operation not in ("var", "std") and given.get("dim") in (0, -1, (0,), (-1,), [0], [-1]):
        return ()
    if operation in _ONE_DIM:
        dim = given.get("dim")
        return tuple(range(ndim)) if dim is None else (as_dim(dim, ndim),)
    return as_dims(given.get("dim"), ndim)


def _algebra(operation, dims, ndim, given):
    """The part of the `Signature` that depends on what is computed over `dims`."""
    if operation in _WHOLE or (operation in _ONE_DIM and given.get("dim") is None and ndim > 1):
        return {"whole": dims}  # a position in the flattened tensor is no position in a shard
    factors = [f"d{dim}" for dim in dims]
    if operation in ("sum", "mean"):
        passes = given.get("dtype") is None or keeps_digits(given["dtype"])
        more = {"reduced": dict.fromkeys(factors, "sum"), "linear": ({0},) if passes else ()}
        return more | ({"distributed": dict.fromkeys(factors, "mean")} if operation == "mean" else {})
    return {"distributed": dict.fromkeys(factors, operation)}


for _name, (*_row, _saves, _facts) in _OPERATORS.items():
    register_operator(_name, saves=_saves, **_facts)(partial(_reduce, *_row))
