"""`hsdp()` on one rank: what it gives is what MindSpore gives without it."""

import gc
import weakref
from itertools import product

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from support.nightly import daily
from support.small_cells import cell_of
from support.small_zero import Linear, Net, array, both_modes, check, expected, inputs

from mindformers_core.mesh import DeviceMesh
from mindformers_core.pipeline import PipelineStage, Schedule1F1B
from mindformers_core.recompute import recompute
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import LossScale, MixedPrecision, hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")


def sharded(net):
    return shard(net, DeviceMesh((1, 1), ("dp", "tp")))


MADE = {"plain": (Net, "level1"), "sharded": (lambda: sharded(Net()), "level3")}
MODES = False, True  # compiled; of several values some are daily in PyNative, others compiled


@pytest.mark.parametrize(("name", "compiled"), daily([("plain", True), ("sharded", False)], product(MADE, MODES)))
def test_one_rank_just_works(name, compiled):
    make, level = MADE[name]
    loss, gradients = expected(Net(), inputs())
    net = hsdp(make(), optimizer_level=level)
    gradient_of = value_and_grad(net, compiled)
    optimizer, reference = nn.Adam(net.trainable_params(), 0.01), Net()
    alone = nn.Adam(reference.trainable_params(), 0.01)
    check(gradient_of(inputs()), loss, gradients)
    for step in range(3):
        alone(tuple(map(Tensor, expected(reference, inputs(step))[1])))
        optimizer(gradient_of(inputs(step))[1])
    for one, other in zip(net.trainable_params(), reference.trainable_params(), strict=True):
        assert one.name == other.name
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(net(inputs()).to_local().asnumpy(), reference(inputs()).asnumpy(), rtol=1e-5)


class Counted(nn.Cell):
    """A sum of losses, some elements dropped, and their number."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Dense(4, 4), nn.Dropout(p=0.5)

    def construct(self, x):
        y = ops.square(self.drop(self.layer(x)))
        return y.sum(), ops.cast((y > 1).sum(), ms.int32)


@pytest.mark.parametrize(("loss", "compiled"), daily([("sum", False), ("mean", True)], product(("mean", "sum"), MODES)))
def test_one_stage_is_a_pipeline_of_one(loss, compiled):
    """Its runs give the bits of micro-steps; the loss scale, labels of all runs, and what is dropped included."""
    found = []
    for as_stage in (False, True):
        ms.manual_seed(3)
        scale = LossScale(amp.DynamicLossScaler(8.0, 2, 1000))
        net = hsdp(sharded(Counted()).set_train(), accumulate_grad_step=3)
        for number, parameter in enumerate(net.trainable_params()):
            parameter.set_data(Tensor(array(*parameter.shape, seed=number)))
        options = {"compiled": compiled, "loss_scale": scale, "loss": loss}
        gradient_of = None if as_stage else value_and_grad(net, **options)
        schedule = Schedule1F1B(PipelineStage(net, 0, 1, **options), 1) if as_stage else None
        for _ in range(2):
            results = [(schedule.run if as_stage else gradient_of)(Tensor(array(6, 4, seed=run))) for run in range(3)]
            gradients = scale.unscale(schedule.stages[0].gradients) if as_stage else results[-1][1]
            losses = results if as_stage else [each for each, _ in results]
            if as_stage:
                schedule.stages[0].zero_gradients()
            found.append([*(each[0].asnumpy() for each in losses), *(each.asnumpy() for each in gradients)])
    for one, other in zip(found[:2], found[2:], strict=True):
        for tensor, expected_tensor in zip(one, other, strict=True):
            np.testing.assert_array_equal(tensor, expected_tensor)
    assert (found[0][0] != found[1][0]).any()  # another step drops others


class Branching(Net):
    """Looks at the values of a tensor in Python."""

    def construct(self, x):
        y = super().construct(x)
        return y * 2 if float(y.to_local() if hasattr(y, "to_local") else y) > 0 else y


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_what_is_dropped_is_freed(level):
    """Nothing that MindSpore was given to call keeps a Cell; its own compiled functions and optimizers do."""
    net = hsdp(recompute(sharded(Net()), select=["*.first"]), optimizer_level=level, threshold=0)
    gradient_of = value_and_grad(net)
    gradient_of(inputs())
    held = [weakref.ref(each) for each in (net, tree_of(net), net.first.weight)]
    del net, gradient_of
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_a_cell_that_looks_at_values():
    loss, gradients = expected(Branching(), inputs())
    check(value_and_grad(hsdp(sharded(Branching()).eager()))(inputs()), loss, gradients)
    net = hsdp(Branching())
    net.eager()
    check(value_and_grad(net)(inputs()), loss, gradients)


@both_modes
def test_gradients_of_micro_steps_are_averaged_and_come_with_the_last(compiled):
    singles = [expected(Net(), inputs(seed)) for seed in range(6)]
    gradient_of = value_and_grad(hsdp(Net(), accumulate_grad_step=3), compiled)
    for step in range(2):
        for micro_step in range(3):
            loss, gradients = gradient_of(inputs(3 * step + micro_step))
            np.testing.assert_allclose(loss.asnumpy(), singles[3 * step + micro_step][0], rtol=1e-6)
            assert (gradients is None) == (micro_step < 2)
        entries = zip(*(single[1] for single in singles[3 * step : 3 * step + 3]))
        for gradient, ones in zip(gradients, entries, strict=True):
            np.testing.assert_allclose(gradient.asnumpy(), np.mean(ones, axis=0), rtol=1e-5, atol=1e-6)


class Named(Net):
    """Several results, and keyword arguments."""

    def construct(self, x, scale=None, *, shift=0.0):
        loss = super().construct(x)
        loss = loss if scale is None else loss * scale
        return loss + shift, x * 2, ops.argmax(x, 1)


KEYWORDS = {"scale": 3.0}, {"scale": Tensor(2.0), "shift": Tensor(0.5)}


@pytest.mark.parametrize(
    ("kwargs", "compiled"), daily([(KEYWORDS[0], False), (KEYWORDS[1], True)], product(KEYWORDS, MODES))
)
def test_several_results_and_keyword_arguments(kwargs, compiled):
    net = Named()
    gradient_of = ms.value_and_grad(lambda: net(inputs(), **kwargs)[0], None, ms.ParameterTuple(net.trainable_params()))
    loss, gradients = gradient_of()
    results, found = value_and_grad(hsdp(Named()), compiled)(inputs(), **kwargs)
    assert isinstance(results, tuple) and all(type(result) is Tensor for result in results)
    check((results, found), loss.asnumpy(), [gradient.asnumpy() for gradient in gradients])
    np.testing.assert_array_equal(results[1].asnumpy(), inputs().asnumpy() * 2)
    np.testing.assert_array_equal(results[2].asnumpy(), inputs().asnumpy().argmax(1))


class Dropping(Net):
    """Drops three quarters of its input when it is trained."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(p=0.75)

    def construct(self, x):
        return super().construct(self.drop(x)), ops.reduce_sum((self.drop(ops.ones_like(x)) == 0).astype(ms.float32))


@both_modes
def test_training_flags_are_followed(compiled):
    net = hsdp(Dropping())
    gradient_of = value_and_grad(net, compiled)
    x = Tensor(array(64, 8))
    for mode in (False, True, False):
        net.set_train(mode)
        dropped = float(gradient_of(x)[0][1])
        assert (256 < dropped < 512) if mode else dropped == 0
        dropped = float(net(x)[1].to_local())
        assert (256 < dropped < 512) if mode else dropped == 0


def twice():
    """Calls one Cell twice."""
    return cell_of(lambda self, x: self.net(ops.tanh(self.net(x))).square().mean(), net=Linear(None, 1))


@both_modes
def test_a_cell_that_is_called_twice(compiled):
    check(value_and_grad(hsdp(twice()), compiled)(inputs()), *expected(twice(), inputs()))


@both_modes
def test_two_cells_in_one_program(compiled):
    """As the two of a generative adversarial network: the steps of one don't touch the other."""
    generator, judge = hsdp(Net(), accumulate_grad_step=2), hsdp(twice())
    of_generator, of_judge = value_and_grad(generator, compiled), value_and_grad(judge, compiled)
    reference, judged = expected(Net(), inputs()), expected(twice(), inputs())
    for _ in range(2):
        assert of_generator(inputs())[1] is None
        check(of_judge(inputs()), *judged)  # in the middle of the other's step
        check(of_generator(inputs()), *reference)
    judge(inputs()), generator(inputs())


@pytest.mark.parametrize(
    ("gradient", "compiled"), daily([("float16", False), (None, True)], product((None, "float16"), MODES))
)
def test_mixed_precision(gradient, compiled):
    loss, gradients = expected(Net(), inputs())
    precision = MixedPrecision(parameter="float32", compute="float16", gradient=gradient, output="float32")
    net = hsdp(Net(), mixed_precision=precision)
    found = value_and_grad(net, compiled)(inputs())
    assert found[0].dtype == ms.float32 and {entry.dtype for entry in found[1]} == {ms.float32}
    assert {part.dtype for part in net.trainable_params()} == {ms.float32}
    assert {whole.dtype for whole in net.first._params.values()} == {ms.float16}
    check(found, loss, gradients, rtol=5e-3)
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    losses = []
    gradient_of = value_and_grad(net, compiled)
    for _ in range(5):
        loss, gradients = gradient_of(inputs())
        optimizer(gradients)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert abs(float(net(inputs()).to_local()) - losses[-1]) < 0.2 * losses[0]


@both_modes
def test_a_loss_scale(compiled):
    _, gradients = expected(Net(), inputs())
    scale = LossScale(amp.DynamicLossScaler(2**10, 2, 2))
    gradient_of = value_and_grad(hsdp(Net(), accumulate_grad_step=2), compiled, scale)
    spoilt = Tensor(np.full((4, 8), np.inf, np.float32))
    seen = []
    for first, second in ((inputs(), inputs()), (inputs(), spoilt), (spoilt, inputs()), (inputs(), inputs())):
        loss, nothing = gradient_of(first)
        assert nothing is None
        _, found = gradient_of(second)
        seen.append((found is None, scale.value))
    assert seen == [(False, 1024.0), (True, 512.0), (True, 256.0), (False, 256.0)] and scale.skipped == 2
    check((loss, found), loss.asnumpy(), gradients, rtol=1e-5)
