"""Rules of softmax and log-softmax, which can be cut along the dim that they normalise."""

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import as_dims, dim_names, dim_sizes, plain_names
from mindformers_core.operators.saved import RESULT, UNMEASURED
from mindformers_core.operators.signature import Signature

__all__ = []


@register_operator("Softmax", saves=RESULT, operations=5)  # maximum, subtract, exp, sum, divide
def softmax(x, dim=-1, **named):
    """Softmax over one dim, or whole over several."""
    return _normalise("softmax", x, dim, (), named)


@register_operator("LogSoftmax", saves=RESULT, operations=5)
@register_operator("LogSoftmaxExt", saves=UNMEASURED, operations=5)
def log_softmax(x, dim=-1, *more, **named):
    """Log-softmax over one dim; `LogSoftmaxExt` has a dtype argument too, which it computes in."""
    return _normalise("log_softmax", x, dim, more, named)


def _normalise(algorithm, x, dim, more, named):
    plain = plain_names(named)
    dim = plain.get("dim", dim)
    if dim is None:
        raise ValueError("a softmax needs its dim")
    if "dtype" in plain:
        more = (plain["dtype"],)
    names = dim_names(x)
    factors = [names[place][0] for place in as_dims(dim, x.ndim)]
    localize = (lambda args, shapes: (args[0], dim, *more)) if named else None
    cut = {"distributed": {factors[0]: algorithm}} if len(factors) == 1 else {"whole": frozenset(factors)}
    return Signature((names,), (names,), dim_sizes(x), localize=localize, **cut)
