"""Rules of norms, whole along the dims that they normalise, and of softmax, which can be sharded along its dim."""

from functools import partial

from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rules.dims import as_dim, as_dims, bound, equation, parameters, unary
from mindformers_core.operators.saved import RESULT, UNMEASURED, SavedByOperator
from mindformers_core.operators.signature import LocalCall, Signature, tensors_in


def _normalised(x, start, parameters, statistics, parameter_start=None):
    """`x` normalised over the dims from `start` on, scaled by `parameters` of the dims from `parameter_start` on.

    Outputs are the result and `statistics` tensors of the shape of `x` with the normalised dims 1.
    """
    names = [f"{'N' if dim >= start else 'd'}{dim}" for dim in range(x.ndim)]
    own = names[start if parameter_start is None else parameter_start :]
    inputs = [names, *[own] * len(parameters)]
    outputs = [names, *[[*names[:start], *"1" * (x.ndim - start)]] * statistics]
    text = " -> ".join(", ".join(map(" ".join, side)) for side in (inputs, outputs))
    return equation(text, x, *parameters)


_SAVES = SavedByOperator((0, 1), outputs=(1, 2), as_they_are=True)


@register_operator("LayerNorm", saves=_SAVES, operations=7)  # sum, subtract, square, sum, scale twice, add
def layer_norm(x, gamma, beta, begin_norm_axis=1, begin_params_axis=1, epsilon=1e-7):
    """Layer norm over the dims from `begin_norm_axis` on: the result, mean and variance."""
    start = as_dim(begin_norm_axis, x.ndim)
    return _normalised(x, start, (gamma, beta), 2, as_dim(begin_params_axis, x.ndim))


@register_operator("LayerNormExt", operations=7)
def layer_norm_shape(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Layer norm over the last dims, of `normalized_shape`: the result, mean and reciprocal standard deviation."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or shape != x.shape[-len(shape) :]:
        raise ValueError(f"normalized_shape {shape} is not the end of {x.shape}")
    return _normalised(x, x.ndim - len(shape), tensors_in((weight, bias)), 2)


@register_operator("RmsNorm", operations=4)  # square, sum, scale twice
def rms_norm(x, gamma, epsilon=1e-6):
    """RMS norm over the dims of `gamma`: the result and the reciprocal root mean square."""
    if not 1 <= gamma.ndim <= x.ndim:
        raise ValueError(f"gamma {gamma.shape} doesn't fit the last dims of {x.shape}")
    return _normalised(x, x.ndim - gamma.ndim, (gamma,), 1)


def rms_norm_of_rows(x, gamma, epsilon=1e-6):
    """RMS norm over the last dim: the result alone."""
    return _normalised(x, x.ndim - 1, (gamma,), 0)


@register_operator("GroupNorm", saves=SavedByOperator("all", outputs=(1, 2)), operations=7, algorithms=("group_norm",))
def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
    """Every group of channels normalised: the result, mean and reciprocal standard deviation. Groups are parallel."""
    given = tensors_in((weight, bias))
    text = f"n g*M ...{', g*M' * len(given)} -> n g*M ..., n g, n g"

    def localize(args, shapes):
        return (args[0], shapes[1][1], *args[2:])

    planes = {f"d{dim}": "group_norm" for dim in range(x.ndim - 2)}
    return equation(text, x, *given, sizes={"g": num_groups}, distributed=planes, local=LocalCall(localize=localize))


def channel_factors(x, factor, shift, center):
    """Every channel by its own numbers. The operator `ChannelFactors`."""
    return equation("n c ..., c, c, c -> n c ...", x, factor, shift, center)


def trained_batch_norm(x, scale, bias, epsilon):
    """Every channel normalised over all else: the result, mean and variance. The operator `TrainedBatchNorm`."""
    others = {name: "batch_norm" for name in ("n", *(f"d{dim}" for dim in range(x.ndim - 2)))}
    return equation("n c ..., c, c -> n c ..., c, c", x, scale, bias, distributed=others)


@register_operator("AddRmsNorm", "AddLayerNormV2", operations=8)
def add_norm(x, other, gamma, *others):
    """The norm of a sum over the dims of `gamma`: the result, its statistics, and the sum."""
    scales = tensors_in([gamma, *others[:1]])
    if x.shape != other.shape:
        raise ValueError(f"{x.shape} and {other.shape} can't be added without broadcasting")
    plain = _normalised(x, x.ndim - gamma.ndim, scales, len(scales))
    sums = plain.inputs[0]
    return Signature((sums, *plain.inputs), (*plain.outputs, sums), plain.sizes, whole=plain.whole)


def _softmax(algorithm, *args, **named):
    """Softmax over one dim, or whole over several; its logarithm may have a dtype, which it is computed in."""
    given, again = bound(parameters("x dim=-1 dtype"), args, named)
    if given["dim"] is None:
        raise ValueError("a softmax needs its dim")
    dims = as_dims(given["dim"], given["x"].ndim)
    localize = (lambda values, shapes: again(values, {})) if named else None  # by position, as algorithms take them
    sharded = {"distributed": {f"d{dims[0]}": algorithm}} if len(dims) == 1 else {"whole": dims}
    return unary(given["x"], local=LocalCall(localize=localize), **sharded)


_OPERATIONS = {"operations": 5}  # maximum, subtract, exp, sum, divide
for _name, _saves, _asks in (
    ("Softmax", RESULT, "softmax"), ("LogSoftmax", RESULT, "log_softmax"), ("LogSoftmaxExt", UNMEASURED, "log_softmax")
):  # fmt: skip
    register_operator(_name, saves=_saves, algorithms=(_asks,), **_OPERATIONS)(partial(_softmax, _asks))
