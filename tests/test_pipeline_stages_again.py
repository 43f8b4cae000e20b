"""Stages whose Cells are used again: otherwise than in the pipeline, with other values or flags, many times."""

import gc
import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.small_pipelines import Scale, array, pipeline

from mindformers_core.mesh import init_device_mesh
from mindformers_core.passes.forward_backward import _Tape
from mindformers_core.pipeline import PipelineStage, ScheduleLoopedBFS, ScheduleZBV
from mindformers_core.tensor_parallel import shard

pytestmark = pytest.mark.usefixtures("one_rank")


def sharded_cells():
    mesh = init_device_mesh((1,), ("tp",))
    return [shard(Scale(0), mesh), shard(Scale(1, is_last=True), mesh)]


def all_gradients(schedule, x):
    """Of one run, as arrays."""
    for stage in schedule.stages:
        stage.zero_gradients()
    schedule.run(x)
    return [gradient.asnumpy() for stage in schedule.stages for gradient in stage.gradients]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-7)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_zero_bubble_schedule_leaves_the_cells_as_they_were(compiled):
    """Whole gradients for all others: `value_and_grad`, and stages of another schedule."""
    cells, x = sharded_cells(), Tensor(array(4, 4))
    weights = [weight for cell in cells for weight in cell.trainable_params()]

    def by_hand():
        _, found = ms.value_and_grad(lambda x: cells[1](cells[0](x)).to_local(), None, weights)(x)
        return [gradient.asnumpy() for gradient in found]

    before = by_hand()
    split = pipeline(cells, 2, ScheduleZBV, compiled=compiled)
    assert_equal(all_gradients(split, x), before)
    assert_equal(by_hand(), before)
    assert_equal(all_gradients(pipeline(cells, 2, ScheduleLoopedBFS, compiled=compiled), x), before)
    assert_equal(all_gradients(split, x), before)


def test_a_failed_zero_bubble_run_leaves_the_cells_as_they_were():
    cells, x = sharded_cells(), Tensor(array(4, 4))
    expected = all_gradients(pipeline(cells, 2, ScheduleLoopedBFS), x)
    with pytest.raises((ValueError, RuntimeError)):
        pipeline(cells, 2, ScheduleZBV).run(Tensor(array(4, 5)))
    assert_equal(all_gradients(pipeline(cells, 2, ScheduleLoopedBFS), x), expected)


def test_plain_cells_in_a_zero_bubble_schedule_are_warned_about_once(caplog):
    schedule = pipeline([Scale(0), Scale(1, True)], 2, ScheduleZBV)
    with caplog.at_level(logging.WARNING, "mindformers_core"):
        schedule.run(Tensor(array(4, 4)))
        schedule.run(Tensor(array(4, 4)))
    assert len([text for text in caplog.messages if "can't be split off" in text and "shard(cell, mesh)" in text]) == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_compiled_stage_sees_values_that_were_replaced(sharded):
    cells = sharded_cells() if sharded else [Scale(0), Scale(1, True)]
    x, weight = Tensor(array(4, 4)), cells[1].trainable_params()[0]
    plain, compiled = (pipeline(cells, 2, compiled=compiled) for compiled in (False, True))
    for schedule in (plain, compiled):
        schedule.run(x)
    weight.set_data(Tensor(array(4, 4, seed=7)))
    assert_equal(all_gradients(compiled, x), all_gradients(plain, x))
    np.testing.assert_allclose(float(compiled.evaluate(x)), float(plain.evaluate(x)), 1e-6)
    optimizer = nn.Momentum(list(compiled.stages[1].parameters), 0.1, 0.9)
    graphs = dict(compiled.stages[1].function._graphs)
    optimizer(compiled.stages[1].gradients)
    assert_equal(all_gradients(compiled, x), all_gradients(plain, x))
    assert compiled.stages[1].function._graphs == graphs  # an optimizer's update needs no new graph


class Dropping(nn.Cell):
    """Gives the share of its input that is left."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(1, np.float32)), name="weight")
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, x):
        return ops.mean(self.dropout(x * self.weight))


@pytest.mark.parametrize("first", [False, True])
def test_a_compiled_plain_cell_follows_set_train(first):
    cell = Dropping()
    schedule = ScheduleLoopedBFS([PipelineStage(cell, 0, 1, compiled=True)], 2)
    x = Tensor(array(2, 64))
    for flag in (first, not first, first):
        cell.set_train(flag)
        whole = np.isclose(float(schedule.evaluate(x)), x.asnumpy().mean(), rtol=1e-5, atol=1e-6)
        assert whole != flag


def test_nothing_is_left_of_frozen_stages():
    cells = [Scale(0), Scale(1, True)]
    for parameter in cells[0].trainable_params():
        parameter.requires_grad = False
    schedule, counts = pipeline(cells, 4), []
    for _ in range(3):
        schedule.run(Tensor(array(4, 4)))
        gc.collect()
        counts.append(sum(type(entry) is _Tape for entry in gc.get_objects()))
    assert counts[0] == counts[1] == counts[2]
    assert schedule.stages[0]._passes._free == [] and len(schedule.stages[1]._passes._free) == 4
