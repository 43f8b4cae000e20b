"""Random draws that are composed of the four operators with algorithms of their own, see `algorithms.draws`."""

import math

import numpy as np
from mindspore import Tensor, dtype as mstype, ops
from mindspore.ops import auto_generate

from mindformers_core.algorithms.draws import dtype_of
from mindformers_core.lowering.constant_sizes import numbers
from mindformers_core.mindspore_private import draw_state


def _draw(name, *given, state=(), dtype=None):
    """A draw by one of the operators that draw; without a `state`, seed and offset, the generator moves on."""
    return getattr(auto_generate, name)()(*given, *(state or draw_state()), dtype, None)


def _uniform_real(shape, *state):
    return _draw("RandExt", tuple(numbers(shape)), state=state)


def _standard_normal(shape):
    return _draw("Randn", tuple(numbers(shape)))


def _chances(x, *state):
    """A number in [0, 1) for each element of a tensor."""
    return _draw("RandLikeExt", x, state=state, dtype=mstype.float32)


def _uniform_int(shape, low, high):
    draws = _draw("RandInt", 0, 2**31, tuple(numbers(shape)), dtype=mstype.int64)
    low, high = (ops.cast(bound, mstype.int64) if isinstance(bound, Tensor) else bound for bound in (low, high))
    return ops.cast(ops.bitwise_right_shift(draws * (high - low), 31) + low, mstype.int32)


def _log_uniform(shape):
    """The logarithm of a uniform number: an exponential one below 0."""
    return ops.log(1.0 - _uniform_real(shape))


def _cauchy(size, median, sigma):
    return ops.tan((_uniform_real(size) - 0.5) * math.pi) * sigma + median


def _log_normal(x, mean, std):
    return ops.exp(ops.cast(_standard_normal(x.shape) * std + mean, x.dtype))


def _permuted(n, seed=0, offset=0, dtype=mstype.int64):
    return auto_generate.RandpermExt()(n, *draw_state(), dtype_of(dtype))


def _normal_of(mean, std, *rest):
    """`Normal…`, of which `mean` and `std` are numbers or tensors; with two numbers, a size is given."""
    *size, seed, offset = rest
    of = ("Randn", tuple(numbers(size[0]))) if size else ("RandnLike", mean + std)
    return ops.stop_gradient(_draw(*of, state=(seed, offset)) * std + mean)


def _bernoulli(x, chance, *state):
    return ops.cast(ops.less(_chances(x, *state), chance), x.dtype)


def _channels(x, keep_prob, *state):
    """The tensor with whole channels zeroed, and the others scaled; and which elements stay."""
    stays = ops.less(_uniform_real((*x.shape[:2], *(1,) * (x.ndim - 2)), *state), keep_prob)
    factor = ops.cast(stays, x.dtype) * (1.0 / keep_prob if keep_prob else 0.0)
    return x * factor, ops.broadcast_to(stays, x.shape)


def _channels_ext(x, p=0.5, training=True, inplace=False, seed=None, offset=None):
    if inplace:
        raise ValueError("dropout in place is not available for a distributed tensor: use its result")
    return _channels(x, 1.0 - p, seed, offset)[0] if training else x


def _multinomial(x, count, replacement=True, *state):
    """Classes by their weights, those of the last dim; without replacement the first to end of exponential times."""
    if not replacement:
        return ops.cast(ops.topk(ops.log(_chances(x, *state)) / x, count)[1], mstype.int64)
    ends = ops.cumsum(x, -1)
    places = _uniform_real((*x.shape[:-1], count), *state) * ends[..., -1:]
    passed = ops.less_equal(ops.expand_dims(ends, -2), ops.expand_dims(places, -1))
    found = ops.sum(ops.cast(passed, mstype.int32), -1)
    return ops.cast(ops.minimum(found, x.shape[-1] - 1), mstype.int64)


def _truncated_normal(shape, dtype):
    """Normal within two deviations, by the inverse of its distribution."""
    return ops.cast(ops.erfinv((_uniform_real(shape) * 2.0 - 1.0) * math.erf(math.sqrt(2))) * math.sqrt(2), dtype)


def _gamma(shape, alpha, beta=None):
    """Gamma with scale `beta`: Marsaglia and Tsang, "A simple method for generating gamma variables" (2000).

    Of 8 tries, one is accepted with a probability of 1 - 3e-11.
    """
    shape = np.broadcast_shapes(numbers(shape), alpha.shape, () if beta is None else beta.shape)
    alpha, few = ops.cast(alpha, mstype.float32), ops.less(alpha, 1.0)
    least = ops.expand_dims(ops.where(few, alpha + 1.0, alpha) - 1 / 3, -1)
    normal, chance = _standard_normal((*shape, 8)), _log_uniform((*shape, 8))
    cubed = ops.pow(ops.maximum(normal / ops.sqrt(least * 9.0) + 1.0, 1e-10), 3)
    bound = normal * normal * 0.5 + least * (1.0 - cubed + ops.log(cubed))
    accepted = ops.cast(ops.logical_and(ops.less(chance, bound), ops.greater(cubed, 1e-20)), mstype.float32)
    first = accepted * ops.cast(ops.equal(ops.cumsum(accepted, -1), 1.0), mstype.float32)
    result = ops.squeeze(least, -1) * (ops.sum(first * cubed, -1) + 1.0 - ops.sum(first, -1))
    result = ops.where(few, result * ops.exp(_log_uniform(shape) / alpha), result)
    return ops.stop_gradient(result if beta is None else result * beta)


def _poisson(shape, rate, dtype=mstype.int32):
    """Poisson, by the inverse of its distribution: the first number to reach it, of those around a normal one's."""
    shape, chance = np.broadcast_shapes(numbers(shape), rate.shape), 1 - 2.0**-24
    rate = ops.broadcast_to(ops.cast(rate, mstype.float32), shape)
    draws = _uniform_real(shape)
    normal = ops.erfinv(ops.clamp(draws * 2.0 - 1.0, -chance, chance)) * math.sqrt(2)
    first = ops.maximum(ops.floor(rate + ops.sqrt(rate) * normal + (normal * normal - 1.0) / 6.0) - 5.0, 0.0)
    counts = ops.expand_dims(first, -1) + Tensor(np.arange(1, 12), mstype.float32)
    reached = ops.igammac(counts, ops.broadcast_to(ops.expand_dims(rate, -1), counts.shape))
    passed = ops.cast(ops.less_equal(reached, ops.expand_dims(draws, -1)), mstype.float32)
    return ops.stop_gradient(ops.cast(first + ops.sum(passed, -1), dtype))


def _before(of):
    """A draw for each element of a tensor of parameters: their dims follow the drawn shape."""
    return lambda shape, rates, **named: of((*numbers(shape), *rates.shape), rates, **named)


def _choice_with_mask(x, count):
    """Indices of `count` elements that are true, in any order, and which of them were found; others are 0."""
    draws = ops.where(ops.reshape(x, (-1,)), _uniform_real((math.prod(x.shape),)), -1.0)
    number = min(count, draws.shape[0])
    value, place = ops.topk(draws, number)
    found = ops.greater_equal(value, 0.0)
    strides = [math.prod(x.shape[dim + 1 :]) for dim in range(x.ndim)]
    index = ops.stack([place // stride % size for stride, size in zip(strides, x.shape)], 1) * ops.expand_dims(found, 1)
    index, found = ops.cast(index, mstype.int32), ops.cast(found, mstype.int32)
    missing = count - number
    return ops.pad(index, (0, 0, 0, missing)), ops.cast(ops.pad(found, (0, missing)), mstype.bool_)


def _candidates(true_classes, num_sampled, unique, range_max):
    """Classes, and how often each is expected among them: those that are meant, and those that are drawn."""
    found = _permuted(range_max)[:num_sampled] if unique else _uniform_int((num_sampled,), 0, range_max)
    share = num_sampled / range_max
    expected = [Tensor(np.full(shape, share, np.float32)) for shape in (true_classes.shape, (num_sampled,))]
    return ops.cast(found, true_classes.dtype), *expected


# operator -> its composition, and names of a primitive's attributes that it takes besides
DRAWN = {
    **{"UniformReal": _uniform_real, "StandardNormal": _standard_normal, "UniformInt": _uniform_int},
    "StandardLaplace": lambda shape: _log_uniform(shape) - _log_uniform(shape),
    "Cauchy": (_cauchy, "size median sigma"),
    "RandpermV2": _permuted,
    **dict.fromkeys(("NormalFloatFloat", "NormalFloatTensor", "NormalTensorFloat", "NormalTensorTensor"), _normal_of),
    **{"BernoulliExt": lambda x, *state: _bernoulli(x, x, *state), "Bernoulli": _bernoulli},
    **dict.fromkeys(("Dropout2D", "Dropout3D"), (_channels, "keep_prob")),
    "Dropout2dExt": _channels_ext,
    **dict.fromkeys(("Multinomial", "MultinomialExt"), _multinomial),
    "RandomCategorical": lambda logits, count, seed=0: _multinomial(ops.softmax(logits, -1), count),
    "MultinomialWithReplacement": (lambda x, *_, **named: _multinomial(x, *named.values()), "numsamples replacement"),
    "LogNormalReverse": (_log_normal, "mean std"),
    "UniformExt": lambda x, low, high, *state: _draw("RandLikeExt", x, state=state) * (high - low) + low,
    "TruncatedNormal": (_truncated_normal, "dtype"),
    **{"Gamma": _gamma, "RandomGamma": _before(_gamma)},
    **{"Poisson": _poisson, "RandomPoisson": (_before(_poisson), "dtype")},
    "RandomShuffle": lambda x: ops.gather(x, _permuted(x.shape[0]), 0),
    "RandomChoiceWithMask": (_choice_with_mask, "count"),
    "UniformCandidateSampler": (_candidates, "num_sampled unique range_max"),
}
