"""The pipeline's runtime in one process, which holds all stages: micro-batches, gradients, results, errors."""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.small_cells import cell_of
from support.small_pipelines import Counted, Scale, Squares, Through, array, pipeline

from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline import (
    MetaStep,
    MetaStepType,
    PipelineScheduleMulti,
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBH1,
    ScheduleZBV,
)
from mindformers_core.pipeline.schedules.micro_batches import split_micro_batches
from mindformers_core.tensor_parallel import shard

sys.path.insert(0, str(Path(__file__).parent / "ranks"))
import pipeline_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")


def check(schedule, *args, rtol=1e-5, **kwargs):
    """The loss, compared with that of the Cells one after the other; gradients are compared as well."""
    cells = [stage.cell for stage in schedule.stages]
    weights = [parameter for stage in schedule.stages for parameter in stage.parameters]

    def whole(*inputs):
        for cell in cells:
            inputs = cell(*inputs)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return inputs[0]

    loss = schedule.run(*args, **kwargs)
    true_loss, true = ms.value_and_grad(whole, None, weights)(*args)
    np.testing.assert_allclose(float(loss[0] if isinstance(loss, tuple) else loss), float(true_loss), rtol)
    found = [gradient for stage in schedule.stages for gradient in stage.gradients]
    for parameter, gradient, expected in zip(weights, found, true, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), expected.asnumpy(), rtol, 1e-7, parameter.name)
    return loss


# Micro-batches.


def test_batches_are_split_by_dim():
    x, y, flag = Tensor(array(4, 6)), Tensor(array(3, 4)), object()
    pieces = split_micro_batches((x, y, flag), {"z": x, "w": y}, 2, (0, 1, None), {"z": -1, "w": None})
    assert len(pieces) == 2
    (first, second, third), named = pieces[1]
    assert (first.asnumpy() == x.asnumpy()[2:]).all() and (second.asnumpy() == y.asnumpy()[:, 2:]).all()
    assert third is flag and named["w"] is y and (named["z"].asnumpy() == x.asnumpy()[:, 3:]).all()
    (by_default,), named = split_micro_batches((x,), {"scalar": Tensor(2.0)}, 2)[0]
    assert (by_default.asnumpy() == x.asnumpy()[:2]).all() and float(named["scalar"]) == 2


@pytest.mark.parametrize(
    ("args", "dims", "message"),
    [
        ((Tensor(array(4, 6)),), (0, 1), r"args_batch_dim \(0, 1\) has 2 entries, but there are 1 positional"),
        ((Tensor(array(4, 6)),), (2,), r"argument 0 has the shape \(4, 6\): it has no dim 2"),
        ((Tensor(array(5, 6)),), None, r"argument 0 of shape \(5, 6\) can't be split into 2 .* dim 0 has the size 5"),
        ((3.5,), (0,), "argument 0 is float 3.5: it has no dim 0"),
    ],
)
def test_batches_that_cannot_be_split(args, dims, message):
    with pytest.raises(ValueError, match=message):
        split_micro_batches(args, {}, 2, dims)


def test_another_number_of_micro_batches_is_refused():
    with pytest.raises(ValueError, match="schedule for 4 micro-batches, not for 3"):
        pipeline([Scale(0), Scale(1, True)]).run_microbatches([((Tensor(array(2, 4)),), {})] * 3)


# Forward and backward.


@pytest.mark.parametrize("kind", [ScheduleLoopedBFS, ScheduleInterleaved1F1B, ScheduleZBV])
def test_every_forward_pass_runs_once(kind):
    cells = [Counted(0), Counted(1, True)]
    schedule = pipeline(cells, kind=kind)
    schedule.run(Tensor(array(8, 4)))
    assert [cell.calls for cell in cells] == [4, 4]
    schedule.evaluate(Tensor(array(8, 4)))
    assert [cell.calls for cell in cells] == [8, 8]
    check(schedule := pipeline(cells, kind=kind), Tensor(array(8, 4)))


class Tables(nn.Cell):
    """The first stage takes no tensor: it has its own; each call gives something else."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(array(2, 4)), name="weight")
        self.calls = 0

    def construct(self, x=None):
        self.calls += 1
        return self.weight * self.calls if x is None else self.weight * x * self.calls


@pytest.mark.parametrize("args", [(), (Tensor(array(2, 4, seed=5)),)])
def test_micro_batches_that_share_all_inputs_are_told_apart(args):
    cells = [Tables(), Squares()]
    schedule = pipeline(cells, 3, args_batch_dim=(None,) * len(args))
    schedule.run(*args)
    weight, factor = array(2, 4), args[0].asnumpy() if args else 1.0
    expected = np.mean([2 * weight * (call * factor) ** 2 for call in (1, 2, 3)], 0)
    np.testing.assert_allclose(schedule.stages[0].gradients[0].asnumpy(), expected, 1e-5)


def test_order_of_backward_passes_is_free():
    """Last forward first backward, and the other way round, with a table that has it so."""
    for turn in (1, -1):

        class Own(PipelineScheduleMulti):
            def construct_exec_order(self, turn=turn):
                forward = [MetaStep(i, MetaStepType.FWD, s) for i in range(3) for s in (0, 1)]
                backward = [MetaStep(i, MetaStepType.BWD, s) for i in (0, 1, 2)[::turn] for s in (1, 0)]
                self.exec_order[0] = forward + backward

        check(pipeline([Scale(0), Scale(1, True)], 3, Own), Tensor(array(6, 4)))


def many(self, x):
    """Hands on tensors of several dtypes, one of them untouched, and has a frozen and an unused parameter."""
    return x, ops.cast(x > 0, ms.int32), x > 0.5, ops.matmul(x, self.weight) * self.frozen, ops.cast(x, ms.float16)


def judge(self, x, signs, mask, y, half):
    """Takes them; the loss, and two more results."""
    z = self.head(x * signs + ops.where(mask, y, 2 * y) + ops.cast(half, ms.float32))
    return ops.mean(z * z), z, ops.sum(signs)


@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_of_many_kinds_pass(compiled):
    frozen = Parameter(Tensor(array(4)), name="frozen", requires_grad=False)
    used = {"unused": Parameter(Tensor(array(4)), name="unused"), "weight": Parameter(Tensor(array(4, 4)), name="used")}
    cells = [cell_of(many, frozen=frozen, **used), cell_of(judge, head=nn.Dense(4, 1))]
    schedule = pipeline(cells, 2, compiled=compiled, output_concat_dim=1)
    x = Tensor(array(4, 4))
    loss, z, count = check(schedule, x)
    assert z.shape == (2, 2) and float(count) == (x.asnumpy() > 0).sum() / 2
    names = [parameter.name for parameter in schedule.stages[0].parameters]
    assert names == ["unused", "used"] and not schedule.stages[0].gradients[0].asnumpy().any()


@pytest.mark.parametrize("compiled", [False, True])
def test_stages_without_parameters(compiled):
    schedule = pipeline([Through(), Scale(1), Through(), Squares()], 2, compiled=compiled)
    loss = schedule.run(Tensor(array(4, 4)))
    weights = schedule.stages[1].parameters
    true = ms.grad(lambda x: ops.sum(schedule.stages[1].cell(x) ** 2) / 2, None, weights)(Tensor(array(4, 4)))
    assert schedule.stages[0].gradients == () and np.isfinite(float(loss))
    for gradient, expected in zip(schedule.stages[1].gradients, true, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), expected.asnumpy(), 1e-5, 1e-7)


def test_keyword_only_arguments_and_a_loss_function():
    def weighted(self, x, *, weights=None, power=1.0):
        return self.dense(x) * weights * power

    def made(compiled):
        cells = [Scale(0), cell_of(weighted, dense=nn.Dense(4, 4))]
        return pipeline(cells, 2, loss_fn=ops.mse_loss, compiled=compiled)

    x, weights, target = Tensor(array(4, 4)), Tensor(array(4, 1, seed=1)), Tensor(array(4, 4, seed=2))
    found = []
    for compiled in (False, True):
        np.random.seed(0)
        ms.set_seed(0)
        schedule = made(compiled)
        loss = schedule.run(x, weights=weights, target=target, power=2.0)
        output = schedule.stages[1].cell(schedule.stages[0].cell(x), weights=weights, power=2.0)
        np.testing.assert_allclose(float(loss), float(ops.mse_loss(output, target)), 1e-5)
        found.append([g.asnumpy() for stage in schedule.stages for g in stage.gradients])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-7)
    with pytest.raises(TypeError, match="the loss_fn needs the keyword argument 'target'"):
        schedule.run(x, weights=weights)


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True])
def test_sharded_stages_defer_the_gradients_of_weights(compiled):
    """ZB-V on a mesh of one rank, whose programs leave the gradients of matmuls for later."""
    expected = models.one_card(8, 2)
    make = models.sharded_part(init_device_mesh((1, 1), ("dp", "tp")))
    schedule = models.schedule_of(ScheduleZBV, 4, 2, make=make, compiled=compiled)
    models.assert_alike(models.pipelined(schedule, 8, 2), expected, "zb_v")
    assert schedule.stages[0].weight_gradients._deferred is not None


def test_both_parts_of_a_weights_gradient_count():
    """Of one that is deferred in part: a product's is, that of a square isn't."""

    def twice(self, x):
        return ops.square(ops.matmul(x, self.weight)).mean() + ops.square(self.weight).sum()

    x = Tensor(array(8, 4))
    cell, plain = (cell_of(twice, weight=Parameter(Tensor(array(4, 4)), name="weight")) for _ in range(2))
    shard(cell.set_train(), init_device_mesh((1,), ("tp",)))
    schedule = ScheduleZBH1(PipelineStage(cell, 0, 1), 2)
    schedule.run(x)
    expected = ms.grad(plain, None, plain.trainable_params())(x)[0].asnumpy()
    np.testing.assert_allclose(schedule.stages[0].gradients[0].asnumpy(), expected, 1e-5)


def test_a_run_that_failed_leaves_nothing():
    """The next run is right, and the gradients of runs before are still there."""
    schedule = pipeline([Scale(0), Scale(1, True)])
    x = Tensor(array(8, 4))
    check(schedule, x)
    before = [gradient.asnumpy() for gradient in schedule.stages[0].gradients]
    with pytest.raises(ValueError, match=r"stage 0 \(rank 0\), step F0@0: "):
        schedule.run(Tensor(array(8, 5)))
    for count in (1, 2):
        for gradient, expected in zip(schedule.stages[0].gradients, before, strict=True):
            np.testing.assert_allclose(gradient.asnumpy(), count * expected, 1e-6)  # also of runs after it was read
        schedule.run(x)
    for stage in schedule.stages:
        stage.zero_gradients()
    check(schedule, x)
