"""`Lamb` on one rank, PyNative and compiled, against LAMB in NumPy's float64."""

from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from support.nightly import daily

from mindformers_core.tensor_parallel import jit
from mindformers_core.zero import Lamb

SHAPES = {"dense.weight": (6, 4), "dense.bias": (4,), "norm.gamma": (4,), "zero": (3, 2), "scalar": ()}
STEPS = 6


def reference(weights, gradients, rate, decay, beta1=0.9, beta2=0.999, eps=1e-6):
    """LAMB for one parameter: `rate` and `decay` for each step; its weights after all of them."""
    weight, m, v = weights.astype(np.float64), 0.0, 0.0
    for number, gradient in enumerate(gradients):
        gradient = gradient.astype(np.float64)
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        step = number + 1
        update = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps) + decay[number] * weight
        norms = np.linalg.norm(weight), np.linalg.norm(update)
        weight = weight - rate[number] * (norms[0] / norms[1] if all(norms) else 1.0) * update
    return weight


def drawn(dtype=np.float32):
    """Weights, one of them zero, and gradients of every step; those of the first are tiny, as far as eps matters."""
    generator = np.random.default_rng(5)
    weights = {name: generator.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    weights["zero"][...] = 0
    sizes = [1e-5, *[1.0] * (STEPS - 1)]
    return weights, [{n: (size * generator.normal(size=s)).astype(dtype) for n, s in SHAPES.items()} for size in sizes]


def made(weights):
    return [ms.Parameter(Tensor(value), name=name) for name, value in weights.items()]


def trained(optimizer, gradients, compiled):
    """The parameters after a step with each of `gradients`, by name."""

    def step(*gradients):
        return optimizer(gradients)

    run = jit(step) if compiled else step
    for values in gradients:
        assert run(*(Tensor(values[parameter.name]) for parameter in optimizer.parameters)) is True
    return {parameter.name: parameter.asnumpy() for parameter in optimizer.parameters}


def compare(found, weights, gradients, rate, decay, rtol=1e-5, **constants):
    """Against the reference; `rate(name, step)` and `decay(name)`, steps from 0."""
    assert found.keys() == weights.keys()
    for name, value in found.items():
        rates, decays = [rate(name, step) for step in range(STEPS)], [decay(name)] * STEPS
        expected = reference(weights[name], [values[name] for values in gradients], rates, decays, **constants)
        np.testing.assert_allclose(value, expected, rtol=rtol, atol=1e-6, err_msg=name)


both_modes = pytest.mark.parametrize("compiled", [False, True], ids=["pynative", "jit"])


@both_modes
def test_lamb_is_the_papers(compiled):
    weights, gradients = drawn()
    optimizer = Lamb(made(weights), 0.05, weight_decay=0.1)
    found = trained(optimizer, gradients, compiled)
    compare(found, weights, gradients, lambda *_: 0.05, lambda name: 0.0 if "gamma" in name else 0.1)
    assert int(optimizer.global_step.asnumpy()[0]) == STEPS


@pytest.mark.parametrize("compiled", daily([True], [False, True]), ids=["pynative", "jit"])
def test_other_constants_no_decay_and_a_schedule(compiled):
    weights, gradients = drawn()
    optimizer = Lamb(made(weights), nn.ExponentialDecayLR(0.1, 0.5, 2), beta1=0.7, beta2=0.9999, eps=1e-3)
    found = trained(optimizer, gradients, compiled)
    constants = {"beta1": 0.7, "beta2": 0.9999, "eps": 1e-3}
    compare(found, weights, gradients, lambda _, step: 0.1 * 0.5 ** (step / 2), lambda _: 0.0, **constants)


@pytest.mark.parametrize("compiled", daily([False], [False, True]), ids=["pynative", "jit"])
def test_groups_have_rates_and_decays_of_their_own(compiled):
    weights, gradients = drawn()
    parameters = made(weights)
    rates = [0.1, 0.08, 0.06, 0.04, 0.02, 0.01]
    groups = [
        {"params": parameters[2:], "lr": rates},
        {"params": parameters[:2], "weight_decay": 0.2},
        {"order_params": parameters},
    ]
    optimizer = Lamb(groups, 0.03, weight_decay=0.05)
    assert [parameter.name for parameter in optimizer.parameters] == list(weights)
    found = trained(optimizer, gradients, compiled)
    first = ("dense.weight", "dense.bias")
    rate = lambda name, step: 0.03 if name in first else rates[step]  # noqa: E731
    compare(found, weights, gradients, rate, lambda name: 0.2 if name in first else 0.05)


ENDS = [*product([0, 999], [0.9, 0.99999], [False, True])]


@pytest.mark.parametrize(("before", "beta2", "compiled"), daily([(0, 0.99999, True), (999, 0.99999, False)], ENDS))
def test_bias_correction_keeps_its_digits(before, beta2, compiled):
    optimizer = Lamb(made({"zero": np.zeros((2,), np.float32)}), 0.5, beta1=0.99, beta2=beta2, eps=1e-12)
    optimizer.global_step.set_data(Tensor([before], ms.int32))  # with moments that are still zero
    found = trained(optimizer, [{"zero": np.array([1.0, -3.0], np.float32)}], compiled)["zero"]
    moment1, moment2 = 0.01 / (1 - 0.99 ** (before + 1)), (1 - beta2) / (1 - beta2 ** (before + 1))
    np.testing.assert_allclose(found, [-0.5 * moment1 / moment2**0.5, 0.5 * moment1 / moment2**0.5], rtol=2e-6)


def test_half_precision_keeps_its_dtype_and_float32_moments():
    weights, gradients = drawn(np.float16)
    optimizer = Lamb(made(weights), 0.01)
    found = trained(optimizer, gradients[1:2], compiled=False)
    assert {value.dtype for value in found.values()} == {np.dtype(np.float16)}
    assert {moment.dtype for moment in (*optimizer.moments1, *optimizer.moments2)} == {ms.float32}
    for name, value in found.items():
        expected = reference(weights[name], [gradients[1][name]], [0.01], [0.0])
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4, err_msg=name)


def test_mindspores_training_cell_takes_it():
    cell = nn.Dense(4, 2, weight_init="ones")
    step = nn.TrainOneStepCell(nn.WithLossCell(cell, nn.MSELoss()), Lamb(cell.trainable_params(), 0.05))
    inputs, labels = Tensor(np.ones((3, 4), np.float32)), Tensor(np.zeros((3, 2), np.float32))
    losses = [float(step(inputs, labels).asnumpy()) for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"beta1": 1.0}, r"beta1=1\.0"), ({"beta2": 0.0}, r"beta2=0\.0"), ({"eps": 0}, "eps=0")],
)
def test_constants_out_of_range_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        Lamb(made(drawn()[0]), **arguments)


def test_what_lamb_does_not_do_is_refused():
    parameters = made(drawn()[0])
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "grad_centralization": True}]
    with pytest.raises(ValueError, match=r"dense\.bias.*grad_centralization"):
        Lamb(groups)


@both_modes
def test_a_missing_gradient_is_an_error(compiled):
    weights, _ = drawn()
    optimizer = Lamb(made(weights))

    def step(gradient):
        return optimizer((gradient,))

    with pytest.raises(ValueError, match="1 gradients for 5 parameters"):
        (jit(step) if compiled else step)(Tensor(weights["dense.weight"]))
