"""Stages under hsdp() in one process: precision, loss functions, and what can't be."""

import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from support.small_pipelines import Scale, array, pipeline

from mindformers_core.mesh import init_device_mesh
from mindformers_core.passes.step_gradients import StepGradients
from mindformers_core.pipeline import PipelineStage
from mindformers_core.scopes import replaced
from mindformers_core.sharding.parameter_storage import GradientSums, ParameterStorage
from mindformers_core.sharding.sharded_cells import computing_parameters, tree_of
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import LossScale, MixedPrecision, gathered, hsdp, tie_shards

pytestmark = pytest.mark.usefixtures("one_rank")

HALF = MixedPrecision(compute="float16", output="float32")


def cells(**options):
    """Two Cells with the same values at every call, the first of them sharded over a mesh of one."""
    mesh = init_device_mesh((1,), ("dp",))
    made = [Scale(0), Scale(1)]
    for number, cell in enumerate(made):
        for parameter in cell.trainable_params():
            parameter.set_data(Tensor(array(*parameter.shape, seed=number)))
    shard(made[0], mesh)
    return [hsdp(cell, **options) for cell in made]


def loss_of(output, target):
    """Has to be computed in float32: squares are too large for float16."""
    return ops.mean(ops.square((output - target) * 1e3)) / 1e6


def gradients(made, compiled):
    """The loss of a run, and the gradients of all parameters."""
    schedule = pipeline(made, 2, loss_fn=loss_of, compiled=compiled)
    loss = schedule.run(Tensor(array(8, 4)), target=Tensor(array(8, 4, seed=3)))
    return float(loss), [gradient for stage in schedule.stages for gradient in stage.gradients]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_stage_computes_in_half_precision(compiled):
    """Sent, judged and reduced in float32; plain Cells and sharded ones; PyNative and compiled alike."""
    made = cells(mixed_precision=HALF)
    loss, found = gradients(made, compiled)
    true_loss, true = gradients(cells(), False)
    np.testing.assert_allclose(loss, true_loss, 5e-3)
    for one, other in zip(found, true, strict=True):
        assert one.dtype == ms.float32
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), 2e-2, 2e-2 * np.abs(other.asnumpy()).max())
        assert (one.asnumpy() != other.asnumpy()).any()


def test_sums_over_micro_batches_are_in_the_dtype_of_the_reduction():
    """In float16 all after the first would be lost, or be infinite."""

    class Sum(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = ms.Parameter(Tensor(np.ones(1, np.float32)), name="weight")

        def construct(self, x):
            return ops.sum(x * self.weight)

    schedule = pipeline([hsdp(Sum(), mixed_precision=HALF)], 4)
    schedule.run(Tensor(np.array([4 * 3000, 4, 4, 4], np.float32)))
    assert schedule.stages[0].gradients[0].asnumpy() == 3003  # 3000 + 1 is 3000 in float16


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_scale_reaches_all_stages(compiled):
    """What it multiplies the loss by is divided out; a step that overflows is left out."""
    scale = LossScale(amp.DynamicLossScaler(2.0**14, 2, 1000))
    x, target = Tensor(array(8, 4)), Tensor(array(8, 4, seed=3))
    loss, expected = gradients(cells(), compiled)
    schedule = pipeline(cells(), 2, loss_fn=loss_of, compiled=compiled, loss_scale=scale)
    assert float(schedule.run(x, target=target)) == loss
    found = [gradient for stage in schedule.stages for gradient in stage.gradients]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy() * 2.0**14)
    for one, other in zip(scale.unscale(found), expected, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
    for stage in schedule.stages:
        stage.zero_gradients()
    schedule.run(Tensor(np.full((8, 4), np.inf, np.float32)), target=target)
    assert scale.unscale(gradient for stage in schedule.stages for gradient in stage.gradients) is None
    assert (scale.value, scale.skipped) == (2.0**13, 1)
    with pytest.raises(ValueError, match="stage 0 has a loss_scale: only the last one, 1, may have one"):
        PipelineStage(Scale(0), 0, 2, loss_scale=scale)


def test_an_optimizer_of_what_computes_is_found_at_the_first_gradients():
    made = cells(mixed_precision=HALF)
    schedule = pipeline(made, 2, loss_fn=loss_of)
    optimizer = nn.SGD(computing_parameters(made[0]))
    schedule.run(Tensor(array(8, 4)), target=Tensor(array(8, 4, seed=3)))
    with pytest.raises(ValueError, match="SGD holds 'weights.0.weight' of the root Cell .* as it computes"):
        _ = schedule.stages[0].gradients
    del optimizer


def test_calls_in_the_wrong_order():
    made = cells()
    schedule = pipeline([nn.SequentialCell(nn.Dense(4, 4)), Scale(1, True)], 2)
    hsdp(schedule.stages[0].cell)
    with pytest.raises(ValueError, match=r"hsdp\(\) was called with the SequentialCell of stage 0 after its Pipeline"):
        schedule.run(Tensor(array(8, 4)))
    stages = pipeline([*made, Scale(2, True)], 2)
    with gathered(made[0]):
        with pytest.raises(ValueError, match="in the middle of a step or of gathered"):
            stages.run(Tensor(array(8, 4)))
        stages.evaluate(Tensor(array(8, 4)))
        assert tree_of(made[0]).storage.is_open
    next(iter(made[0].trainable_params())).requires_grad = False
    with pytest.raises(ValueError, match="requires_grad of 'weights.0.weight' has changed"):
        PipelineStage(made[0], 0, 3)


def test_whole_gradients_are_freed_as_they_are_reduced():
    """A stage holds none of them while the storage takes its shards bucket by bucket."""
    alive = []

    class Sums(GradientSums):
        def take(self, gradients):
            references = [weakref.ref(gradient) for gradient in gradients]
            gradients.clear()
            alive.extend(reference() for reference in references)

    class Storage(ParameterStorage):
        gradient_sums = Sums

    gradients = StepGradients(nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4)), Storage())
    gradients.begin(training=True)
    gradients.begin_adding()
    gradients.keep(0, tuple(Tensor(np.ones(3)) + 1 for _ in range(4)))
    gradients.add(0)
    assert alive == [None] * 4


def test_a_run_that_failed_in_its_last_backward_pass():
    """It has added to the gradients of the run before: an error asks to begin the step again."""
    schedule = pipeline(cells(accumulate_grad_step=2), 1, loss_fn=loss_of)
    x, named = Tensor(array(8, 4)), {"target": Tensor(array(8, 4, seed=3))}
    with replaced(schedule.stages[0], backward_weight=None), pytest.raises(TypeError, match="step B0@0"):
        schedule.run(x, **named)  # before there are any
    schedule.run(x, **named)
    with replaced(schedule.stages[0], backward_weight=None), pytest.raises(TypeError, match="step B0@0"):
        schedule.run(x, **named)
    for stage in schedule.stages:
        with pytest.raises(ValueError, match="backward pass: call zero_gradients"):
            schedule.run(x, **named)
        with pytest.raises(ValueError, match="backward pass: call zero_gradients"):
            _ = stage.gradients
        stage.zero_gradients()
    for _ in range(2):
        schedule.run(x, **named)
    found, (_, expected) = (
        [gradient for stage in schedule.stages for gradient in stage.gradients],
        gradients(cells(), False),
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), 1e-5)


def test_only_the_root_is_a_stage():
    cell = hsdp(nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4)))
    with pytest.raises(
        ValueError, match=r"called with the root Cell \(SequentialCell\), but this is Cell '1' \(Dense\)"
    ):
        PipelineStage(cell[1], 0, 1)
    with pytest.raises(ValueError, match=r"root Cell \(SequentialCell\), but this is a SequentialCell around it"):
        PipelineStage(nn.SequentialCell(cell), 0, 1)


def test_only_what_is_alike_is_shared():
    made = [hsdp(nn.Dense(4, 4)), hsdp(nn.Dense(4, 8)), hsdp(nn.Dense(4, 4), mixed_precision=HALF)]
    for other in made[1:]:
        with pytest.raises(ValueError, match=r"parameter 'weight' is trained, of shape \(4, 4\), float32, .* but"):
            tie_shards([made[0], other], ["weight"])
    with pytest.raises(ValueError, match=r"isn't under hsdp\(\)"):
        tie_shards([made[0], nn.Dense(4, 4)], ["weight"])
