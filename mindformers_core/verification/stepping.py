"""What a step computes after its passes, of one rank against one card: gradients, their norm, and updates."""

from functools import lru_cache

import numpy as np
from mindspore import Parameter, Tensor, dtype as mstype, ops

from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import AdamWSettings, LambSettings
from mindformers_core.padding import stored_shape
from mindformers_core.verification.rounding import PEAK

_TOLERANCE = 1e-5  # optimizers take scalars and keep moments in float32,
_ROUNDING = 2**-23  # and compute weights of float64 in float32
_RATE = 1e-3  # the learning rate
_FACTORS = 1.0, -0.5, 0.25  # of the gradients of three updates
_LAMB = LambSettings(weight_decay=0.0)  # which takes norms of whole weights
_LARGE = 2**18 + 3  # elements of a weight beyond those of small sizes


def compare_step(check, observer, step, buckets):
    """Compare the results of a rank's passes and its gradients, and in one dtype its updates; see `simulate`."""
    truth, (results, gradients, clip, optimizer) = check.truth, step
    terms = max((truth.largest("gradient", label) for label in truth.weight_gradients), default=0.0)

    def hold(order, what, path, layout, tensor, value, scale=terms, limits=None):
        at = None, None, None, path, buckets.get(path, "") if what == "reduced gradient" else ""
        check.hold((2, order), observer.rank, what, at, layout, tensor, value, scale, limits=limits)

    for (number, run), pairs in results.items():  # without a number it is of all micro-batches of a run
        passes = [key for key in truth.outputs if key[1:] == (run, observer.replica) and number in (None, key[0])]
        values = (truth.outputs[key][: len(pairs)] for key in passes)  # of a recipe's pass the loss alone
        for (result, layout), *of_passes in zip(pairs, *values, strict=True):
            value = of_passes[0] if len(of_passes) == 1 else np.mean(of_passes, 0)  # of a pipeline's micro-batches
            hold(0, "result", str((number, run)), layout, result, value)
    parameters = {observer.paths[id(parameter)]: parameter for parameter in optimizer.parameters}
    summed = {path: np.zeros(stored_shape(parameter)) for path, parameter in parameters.items()} | truth.step_gradients
    for (path, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        hold(1, "reduced gradient", path, parameter.layout, gradient, summed[path])
    if check.precision.dtype is None:
        return
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in summed.values()))
    (clipped, found), limits = clip(tuple(gradients)), (_TOLERANCE, check.precision.rounding)
    hold(2, "gradient norm", "", None, found, norm, limits=limits)
    large = PEAK / max((np.abs(each).max(initial=0.0) for each in summed.values()), default=1.0) if norm else 1.0
    halves = tuple(ops.cast(gradient * large, mstype.float16) for gradient in gradients)
    hold(2, "norm of float16 gradients", "", None, clip.norm(halves), norm * large, limits=(2**-8, 0.0))
    factor = min(clip.max_norm / (norm + 1e-6), 1.0) if clip.max_norm else 1.0
    for (path, parameter), gradient in zip(parameters.items(), clipped, strict=True):
        hold(3, "clipped gradient", path, parameter.layout, gradient, summed[path] * factor, limits=limits)
    used = truth.parameters.keys() & summed.keys()
    if parameters and parameters.keys() == summed.keys() == used:  # those of one stage
        first = {each.layout: path for path, each in reversed(parameters.items())}  # of each layout stands for others
        _compare_with_one_card(hold, truth, {path: parameters[path] for path in first.values()}, observer.rank, _LAMB)
    if not isinstance(optimizer.settings, AdamWSettings):
        whole = {path: each for path, each in parameters.items() if path in truth.parameters}
        _compare_with_one_card(hold, truth, whole, observer.rank, optimizer.settings)
        return
    _compare_updates(hold, optimizer, list(parameters), clipped)
    if parameters and observer.rank == 0:
        values, gradient = map(Tensor, _large())
        weight = Parameter(values, name="a large weight")
        of_large = GroupedOptimizer((weight,), optimizer.settings)
        _compare_updates(hold, of_large, [weight.name], (gradient,), lambda _, __, *numbers: _large_added(*numbers))


@lru_cache(maxsize=1)
def _large():
    """The values of a large weight, and its gradient."""
    return np.random.default_rng(0).standard_normal((2, _LARGE)).astype(np.float32)


def _added(old, gradient, betas, eps, decay, rate):
    """What three AdamW steps add to a weight (Loshchilov and Hutter, 2019)."""
    weight, moments, found = old.astype(np.float64), [0.0, 0.0], gradient.astype(np.float64)
    for number, factor in enumerate(_FACTORS, 1):
        powers, pairs = (found * factor, np.square(found * factor)), zip(betas, moments)
        moments = [beta * moment + (1 - beta) * power for (beta, moment), power in zip(pairs, powers)]
        first, second = (each / (1 - beta**number) for each, beta in zip(moments, betas))
        weight = weight - rate * (first / (np.sqrt(second) + eps) + decay * weight)
    return weight - old


_large_added = lru_cache(maxsize=2)(lambda *numbers: _added(*_large(), *numbers))


def _compare_updates(hold, optimizer, paths, gradients, added=_added):
    """Compare what three AdamW steps add to a rank's weights with `added`."""
    before, settings = [parameter.asnumpy().copy() for parameter in optimizer.parameters], optimizer.settings
    for number, factor in enumerate(_FACTORS, 1):
        optimizer(tuple(gradient * factor for gradient in gradients), *optimizer.scalars(number, _RATE))
    of_each = zip(paths, optimizer.parameters, gradients, before, optimizer.placed, strict=True)
    for path, parameter, gradient, old, placed in of_each:
        value = added(old, gradient.asnumpy(), settings.betas, settings.eps, placed.decay, placed.rate * _RATE)
        scale, found = np.abs(old).max(initial=0.0), Tensor((parameter.asnumpy() - old).astype(np.float64))
        hold(5, "update", path, None, found, value, scale, (_TOLERANCE * 4, _ROUNDING * len(_FACTORS)))


def _compare_with_one_card(hold, truth, parameters, rank, settings):
    """Compare what three steps of an optimizer add to a rank's parts with what they add on one card to whole weights.

    Gradients are random: the directions of those that are rounding errors alone would differ. The weights are restored
    after LAMB, which is compared in any case.
    """
    draw, before = np.random.default_rng(0), [each.asnumpy().copy() for each in parameters.values()]
    wholes = {path: draw.standard_normal(stored_shape(each)).astype(np.float32) for path, each in parameters.items()}
    parts = [whole[parameters[path].layout.local_slices(whole.shape, rank)] for path, whole in wholes.items()]
    _three_steps(parameters.values(), parts, settings)
    key = settings, tuple(parameters)
    if key not in truth.updates:
        values = {path: truth.parameters[path].asnumpy() for path in parameters}
        weights = [Parameter(Tensor(values[path]), name=each.name) for path, each in parameters.items()]
        _three_steps(weights, wholes.values(), settings)
        truth.updates[key] = {path: each.asnumpy() - values[path] for path, each in zip(values, weights)}
    for (path, parameter), old in zip(parameters.items(), before, strict=True):
        added, scale = Tensor(parameter.asnumpy() - old), np.abs(truth.parameters[path].asnumpy()).max(initial=0.0)
        value = truth.updates[key][path]
        hold(4, f"update by {settings.type}", path, parameter.layout, added, value, scale, (1e-3, _ROUNDING))
        if settings is _LAMB:
            ops.assign(parameter, Tensor(old))


def _three_steps(parameters, gradients, settings):
    optimizer, gradients = GroupedOptimizer(list(parameters), settings), [Tensor(each) for each in gradients]
    for number, factor in enumerate(_FACTORS, 1):
        optimizer(tuple(each * factor for each in gradients), *optimizer.scalars(number, _RATE))
