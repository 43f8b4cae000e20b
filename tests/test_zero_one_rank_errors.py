"""What can't be done with a Cell under `hsdp()` while it trains: errors at the call, and nothing is left behind."""

import gc
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.nightly import daily
from support.small_zero import Linear, Net, array, check, expected, inputs

from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.zero import MixedPrecision, gathered, hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_gradient_that_mindspore_takes_of_a_call():
    net = hsdp(Net())
    gradient_of = value_and_grad(net)
    expected_one = expected(Net(), inputs())
    weights = ms.ParameterTuple(net.trainable_params())

    def forward(x):
        return net(x).to_local()

    for take in (
        ms.value_and_grad(net, None, weights),
        ms.grad(net, None, weights),
        ms.grad(net),
        ms.grad(net.first),
        ms.value_and_grad(forward, None, weights),
        ms.grad(forward),
    ):
        with pytest.raises(
            ValueError, match=r"the root Cell \(Net\) is under hsdp\(\), so a gradient .*value_and_grad"
        ):
            take(inputs())
        check(gradient_of(inputs()), *expected_one)  # the error has left nothing behind
        net(inputs())
    with gathered(net), pytest.raises(ValueError, match="is under hsdp"):
        ms.grad(net)(inputs())
    check(gradient_of(inputs()), *expected_one)


@pytest.mark.parametrize("compile_with", [jit, ms.jit], ids=["jit", "ms.jit"])
def test_calls_in_compiled_functions(compile_with):
    net = hsdp(Net())
    weights = ms.ParameterTuple(net.trainable_params())
    net(inputs())

    def forward(x):
        return net(x)

    gradient_of = ms.value_and_grad(forward, None, weights)

    def step(x):
        return gradient_of(x)

    for function in (forward, step):
        with pytest.raises(ValueError, match=r"the root Cell \(Net\) is under hsdp\(\), .* compiled=True\)"):
            compile_with(function)(inputs())
    check(value_and_grad(net, compiled=True)(inputs()), *expected(Net(), inputs()))


class Gives(Net):
    """Gives what a function makes of the loss."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, x):
        return self.function(super().construct(x))


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda loss: loss.reshape(1), ValueError, r"the loss, .* it gave float32 \[1\]"),
        (lambda loss: ops.ones((4, 8)) * loss, ValueError, r"it gave float32 \[4, 8\]"),
        (lambda loss: loss.astype(ms.int32), ValueError, r"it gave int32 \[\]"),
        (lambda loss: None, TypeError, "output 0 of Gives is None"),
        (lambda loss: (loss, "a"), TypeError, "output 1 of Gives is 'a' of type str"),
        (lambda loss: {"loss": loss}, TypeError, "output 0 of Gives is {'loss'"),
    ],
)
def test_what_is_no_loss(function, error, text):
    net = hsdp(Gives(function))
    gradient_of = value_and_grad(net)
    with pytest.raises(error, match=text):
        gradient_of(inputs())
    check(value_and_grad(hsdp(Net()))(inputs()), *expected(Net(), inputs()))


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_are_frozen_or_thawed_after_hsdp(frozen):
    net = Net()
    net.first.weight.requires_grad = frozen
    hsdp(net)
    gradient_of = value_and_grad(net)
    assert len(gradient_of(inputs())[1]) == (6 if frozen else 5) == len(net.trainable_params())
    dict(net.parameters_and_names())["first.weight"].requires_grad = not frozen
    text = rf"requires_grad of 'first.weight' .*changed to {not frozen} since hsdp\(\)"
    with pytest.raises(ValueError, match=text):
        gradient_of(inputs())


def test_a_parameter_that_is_replaced_after_hsdp():
    net = hsdp(Net())
    gradient_of = value_and_grad(net)
    net.first.weight = Parameter(Tensor(array(8, 8)), name="weight")
    for function in (gradient_of, net):
        with pytest.raises(ValueError, match=r"'first.weight' of the root Cell \(Net\) isn't the one .*\(8, 8\)"):
            function(inputs())


def test_attributes_are_followed_and_cells_cannot_come():
    class Scaled(Net):
        scale = 1.0

        def construct(self, x):
            return super().construct(x) * self.scale

    net = hsdp(Scaled())
    gradient_of = value_and_grad(net)
    loss = float(gradient_of(inputs())[0])
    net.scale = 3.0
    np.testing.assert_allclose(float(gradient_of(inputs())[0]), 3 * loss, rtol=1e-6)
    with pytest.raises(ValueError, match=r"Cell 'third' \(Linear\) has come since shard.* 'weight' has no layout"):
        net.third = Linear(None, 0)


@pytest.mark.parametrize(
    ("compute", "compiled"), daily([(None, False), ("float16", True)], product((None, "float16"), (False, True)))
)
def test_recompute(compute, compiled):
    precision = MixedPrecision(compute=compute)
    loss, gradients = value_and_grad(hsdp(Net(), mixed_precision=precision))(inputs())
    gradients = [gradient.asnumpy() for gradient in gradients]
    net = Net()
    net.first.recompute()
    check(value_and_grad(hsdp(net, mixed_precision=precision), compiled)(inputs()), loss.asnumpy(), gradients, 1e-3)
    net = hsdp(Net(), mixed_precision=precision)
    net.first.recompute()
    if compute is None:
        check(value_and_grad(net, compiled)(inputs()), loss.asnumpy(), gradients)
        return
    with pytest.raises(
        ValueError, match=r"recompute\(\) of a Linear in the root Cell \(Net\) was called after hsdp\(\)"
    ):
        value_and_grad(net, compiled)(inputs())


def test_steps_and_gathered_do_not_overlap():
    net = hsdp(Net(), accumulate_grad_step=2)
    gradient_of, other = value_and_grad(net), value_and_grad(net)
    text = r"the root Cell \(Net\) is in the middle of a step or of gathered\(\): .*accumulate_grad_step \(2\)"
    with gathered(net):
        for attempt in (lambda: gradient_of(inputs()), lambda: gathered(net).__enter__()):
            with pytest.raises(ValueError, match=text):
                attempt()
        net(inputs())
    assert gradient_of(inputs())[1] is None
    for attempt in (lambda: other(inputs()), lambda: gathered(net).__enter__()):
        with pytest.raises(ValueError, match=text):
            attempt()
    net(inputs())
    check(gradient_of(inputs()), *expected(Net(), inputs()))
    assert other(inputs())[1] is None


def test_an_error_in_a_micro_step_forgets_the_step():
    net = hsdp(Net(), accumulate_grad_step=2)
    gradient_of = value_and_grad(net)
    gradient_of(inputs(1))
    with pytest.raises(Exception, match="MatMul"):
        gradient_of(Tensor(array(4, 7)))
    found = [gradient_of(inputs())[1] for _ in range(3)]
    if found[0] is not None:  # shapes are looked at before anything runs: the step goes on
        found = found[1:] + [gradient_of(inputs())[1]]
    check((gradient_of(inputs())[0], found[1]), *expected(Net(), inputs()))


def test_an_error_in_another_gradient_leaves_ours_alone():
    class Fails(nn.Cell):
        def construct(self, x):
            raise ValueError("fails")

    gradient_of = value_and_grad(hsdp(Net()))
    with pytest.raises(ValueError, match="fails"):
        ms.grad(Fails())(inputs())
    check(gradient_of(inputs()), *expected(Net(), inputs()))


@pytest.mark.parametrize("of_a_function", [False, True], ids=["Cell", "function"])
def test_an_error_before_another_gradients_recording_leaves_ours_alone(of_a_function):
    """Of a sharded Cell whose program can't be made, which is told before MindSpore begins to record."""
    net = recompute(shard(Net(), init_device_mesh((1,), ("dp",)), seed=0), select=["wrong"])
    gradient_of = value_and_grad(hsdp(Net()))
    recorded = (lambda x: net(x)) if of_a_function else net
    with pytest.raises(ValueError, match="'wrong' matches no Cell or operator"):
        ms.value_and_grad(recorded, None, net.trainable_params())(inputs())
    check(gradient_of(inputs()), *expected(Net(), inputs()))


def test_an_optimizer_of_the_weights_that_compute_is_found_at_the_first_gradients():
    net = hsdp(Net(), mixed_precision=MixedPrecision(compute="float16"))
    optimizer = nn.Adam(list(net.first._params.values()))
    gradient_of = value_and_grad(net)
    with pytest.raises(ValueError, match=r"Adam holds 'first.weight' of the root Cell \(Net\) as it computes"):
        gradient_of(inputs())
    del optimizer
    gc.collect()
    gradient_of(inputs())
