"""Rules of reductions: a table of operators and their operations, and one rule for all."""

from functools import partial
from math import prod

from mindformers_core.operators import saved
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import dim_given, float_reduction
from mindformers_core.operators.rules.dims import as_dim, as_dims, dim_names, plain_names, unary
from mindformers_core.operators.rules.elementwise import keeps_digits

_PLAIN = ("dim", "keepdim", "dtype")
_SPREAD = ("dim", "correction", "keepdim")
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
    ("DeprecatedMax", "extreme", 1, _EXTREMES, _EXTREME, {"source": ".max"}),
    ("DeprecatedMin", "extreme", 1, _EXTREMES, _EXTREME, {"source": ".min"}),
    ("Any", "any", 1, (), saved.NOTHING, {}),
    ("Argmax Argmin", "argmax argmin", 1, ("dim", "dtype"), saved.NOTHING, {}),
    ("ArgMaxExt ArgMinExt", "argmax argmin", 1, _INDEX, saved.NOTHING, _METHOD),
    ("DeprecatedArgmax DeprecatedArgmin", "argmax argmin", 1, _INDEX, saved.NOTHING, _METHOD | {"rewrite": dim_given}),
    ("ArgMaxWithValue ArgMinWithValue", "max_with_index min_with_index", 2, _INDEX, saved.BOTH_RESULTS, {}),
    ("MaxDim MinDim", "max_dim min_dim", 2, _INDEX, saved.SECOND_RESULT, {}),
    ("Var DeprecatedVar", "var var", 1, _SPREAD, _VARIANCE, _METHOD | {"operations": 4}),
    ("Std DeprecatedStd", "std std", 1, _SPREAD, _DEVIATION, _METHOD | {"operations": 4}),
    ("VarMean StdMean", "var std", 2, _SPREAD, saved.UNMEASURED, {"operations": 4}),
    ("ReduceStd", "std", 2, ("dim", "unbiased", "keepdim"), _BOTH, {"operations": 4}),
    ("LogSumExp", "logsumexp", 1, _PLAIN, _LOG_SUM_EXP, _METHOD | {"operations": 4}),
    ("LinalgVectorNorm", "norm", 1, ("ord", "dim", "keepdim", "dtype"), saved.UNMEASURED, {}),
)
_WHOLE = ("prod", "var", "std", "norm", "extreme")  # "extreme": its call by position would be another operator's
_ONE_DIM = ("argmax", "argmin", "max_with_index", "min_with_index", "max_dim", "min_dim")


def _reduce(operation, outputs, order, x, *args, **named):
    """The rule of them all: output dims are those of `x` without the reduced ones, or with 1 in their place.

    A mean over a sharded dim is a sum of terms (each shard's mean over the number of shards); extremes, positions and
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
        last = max(place for place, name in enumerate(order) if name in given)
        values = [given.get(name, False if name == "keepdim" else None) for name in order[: last + 1]]
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


def _reduced_dims(operation, given, ndim):
    """The dims counted from the front; for a tensor without dims, 0 and -1 name its one element, as in MindSpore."""
    if ndim == 0 and operation not in ("var", "std") and given.get("dim") in (0, -1, (0,), (-1,), [0], [-1]):
        return ()
    if operation in _ONE_DIM:
        dim = given.get("dim")
        return tuple(range(ndim)) if dim is None else (as_dim(dim, ndim),)
    return as_dims(given.get("dim"), ndim)


def _algebra(operation, dims, ndim, given):
    """The part of the `Signature` that depends on the operation over `dims`."""
    if operation in _WHOLE or (operation in _ONE_DIM and given.get("dim") is None and ndim > 1):
        return {"whole": dims}  # a position in the flattened tensor is no position in a shard
    factors = [f"d{dim}" for dim in dims]
    if operation in ("sum", "mean"):
        passes = given.get("dtype") is None or keeps_digits(given["dtype"])
        more = {"reduced": dict.fromkeys(factors, "sum"), "linear": ({0},) if passes else ()}
        return more | ({"distributed": dict.fromkeys(factors, "mean")} if operation == "mean" else {})
    return {"distributed": dict.fromkeys(factors, operation)}


for _names, _operations, _outputs, _order, _saves, _facts in _OPERATORS:
    for _name, _operation in zip(_names.split(), _operations.split()):
        _source = _facts.get("source", "").format(_operation)
        _rule = partial(_reduce, _operation, _outputs, _order)
        register_operator(_name, saves=_saves, **_facts | {"source": _source})(_rule)
