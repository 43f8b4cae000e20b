"""Rules of reductions: a table of operators by what they compute, and one rule for all."""

from functools import partial

from mindformers_core.operators.dims import as_dim, as_dims, dim_names, dim_sizes, plain_names
from mindformers_core.operators.elementwise import keeps_digits
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.signature import Signature

__all__ = []

_PLAIN = ("dim", "keepdim", "dtype")
_SPREAD = ("dim", "correction", "keepdim")
_INDEX = ("dim", "keepdim")

# What each operator computes, its number of outputs, and the names of its positional arguments behind the tensor.
_OPERATORS = {
    "SumExt": ("sum", 1, _PLAIN),
    "ReduceSum": ("sum", 1, ("dim", "keepdim", "skip_mode")),
    "DeprecatedSum": ("sum", 1, ("dim", "dtype", "keepdim", "initial")),
    "MeanExt": ("mean", 1, _PLAIN),
    "ReduceMean": ("mean", 1, _PLAIN),
    "DeprecatedMean": ("mean", 1, _PLAIN),
    "ProdExt": ("prod", 1, _PLAIN),
    "ReduceProd": ("prod", 1, _PLAIN),
    "DeprecatedProd": ("prod", 1, _PLAIN),
    "Max": ("max", 1, ()),
    "ReduceMax": ("max", 1, _PLAIN),
    "DeprecatedMax": ("extreme", 1, ("dim", "keepdim", "initial", "where", "return_indices")),
    "Min": ("min", 1, ()),
    "ReduceMin": ("min", 1, _PLAIN),
    "DeprecatedMin": ("extreme", 1, ("dim", "keepdim", "initial", "where", "return_indices")),
    "ReduceAll": ("all", 1, _PLAIN),
    "DeprecatedReduceAll": ("all", 1, _PLAIN),
    "Any": ("any", 1, ()),
    "AnyExt": ("any", 1, _PLAIN),
    "ReduceAny": ("any", 1, _PLAIN),
    "DeprecatedReduceAny": ("any", 1, _PLAIN),
    "Argmax": ("argmax", 1, ("dim", "dtype")),
    "ArgMaxExt": ("argmax", 1, _INDEX),
    "DeprecatedArgmax": ("argmax", 1, _INDEX),
    "Argmin": ("argmin", 1, ("dim", "dtype")),
    "ArgMinExt": ("argmin", 1, _INDEX),
    "DeprecatedArgmin": ("argmin", 1, _INDEX),
    "ArgMaxWithValue": ("max_with_index", 2, _INDEX),
    "ArgMinWithValue": ("min_with_index", 2, _INDEX),
    "MaxDim": ("max_dim", 2, _INDEX),
    "MinDim": ("min_dim", 2, _INDEX),
    "Var": ("var", 1, _SPREAD),
    "Std": ("std", 1, _SPREAD),
    "DeprecatedVar": ("var", 1, _SPREAD),
    "DeprecatedStd": ("std", 1, _SPREAD),
    "VarMean": ("var", 2, _SPREAD),
    "StdMean": ("std", 2, _SPREAD),
    "ReduceStd": ("std", 2, ("dim", "unbiased", "keepdim")),
    "LogSumExp": ("logsumexp", 1, _PLAIN),
    "LinalgVectorNorm": ("norm", 1, ("ord", "dim", "keepdim", "dtype")),
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
    output = tuple(() if dim in dims else names[dim] for dim in range(x.ndim) if keepdim or dim not in dims)
    factors = [names[dim][0] for dim in dims]
    more = _algebra(operation, factors, x.ndim, given)
    if named and more.get("distributed") and operation != "mean":
        values = [given.get(name, False if name == "keepdim" else None) for name in order[: _last(order, given) + 1]]
        more["localize"] = lambda args, shapes: (x, *values)  # by position, where the algorithm finds them
    return Signature((names,), (output,) * outputs, dim_sizes(x), **more)


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


def _algebra(operation, factors, ndim, given):
    """The part of the `Signature` that depends on what is computed over `factors`."""
    if operation in _WHOLE or (operation in _ONE_DIM and given.get("dim") is None and ndim > 1):
        return {"whole": frozenset(factors)}  # a position in the flattened tensor is no position in a shard
    if operation in ("sum", "mean"):
        passes = given.get("dtype") is None or keeps_digits(given["dtype"])
        more = {"reduced": dict.fromkeys(factors, "sum"), "linear": ({0},) if passes else ()}
        return more | ({"distributed": dict.fromkeys(factors, "mean")} if operation == "mean" else {})
    return {"distributed": dict.fromkeys(factors, operation)}


for _name, _row in _OPERATORS.items():
    register_operator(_name)(partial(_reduce, *_row))
