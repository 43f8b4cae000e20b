"""What pipeline stages can't do, and a stage that dies: the errors name stages, ranks, steps and tensors."""

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from support.small_pipelines import Scale, Squares, Through, array, pipeline

from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline import PipelineStage, ScheduleGPipe, ScheduleLoopedBFS
from mindformers_core.tensor_parallel import shard

pytestmark = pytest.mark.usefixtures("one_rank")


class Gives(nn.Cell):
    """Gives what it was made with."""

    def __init__(self, *results):
        super().__init__()
        self.results = results

    def construct(self, x):
        return self.results


INTEGERS, FLOATS = Tensor(np.zeros(3, np.int32)), Tensor(array(2, 3))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ((Gives(FLOATS, None), Squares()), "step F0@0: output 1 of Gives is None of type NoneType: it should return a"),
        ((Gives(INTEGERS), Squares()), r"the Gives of stage 0 gave int32 \[3\]: without a floating tensor no gradient"),
        ((Through(), Through()), r"the Through of stage 1 should return the loss.* it gave float32 \[2, 4\]"),
        ((Gives(FLOATS), Scale(1, True)), r"stage 1 \(rank 0\), step F0@1: with Float32 \(2, 3\) from stage 0: "),
        (
            (Gives(FLOATS, FLOATS), Squares()),
            r"F0@1: with Float32 \(2, 3\), Float32 \(2, 3\) from stage 0: .*3 were",
        ),
    ],
)
def test_what_stages_cannot_do(cells, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        pipeline(cells, 2).run(Tensor(array(4, 4)))


def test_parameters_of_one_path_are_alike():
    small, frozen = Scale(0), Scale(0, True)
    frozen.weights["0"].weight.requires_grad = False
    both = ("weights.0.weight", "weights.0.bias")
    with pytest.raises(ValueError, match=r"'weights.0.weight' is on stage 0 \(Scale\), trained, .* frozen, float32 of"):
        pipeline([small, frozen], tied=both).meet()
    with pytest.raises(ValueError, match="'weights.0.bias' has other values on stage 1 than on stage 0"):
        pipeline([small, Scale(0, True)], tied=both).meet()


def test_a_path_on_two_stages_is_named_as_tied_by_both():
    """Layers that happen to have the same path, and even the same values, aren't one parameter."""
    with pytest.raises(
        ValueError, match=r"'0.beta' is on stage 0 \(SequentialCell\) and stage 1 .* tied=\('0.beta',\)"
    ):
        pipeline([nn.SequentialCell(nn.LayerNorm((4,))), nn.SequentialCell(nn.LayerNorm((4,)))]).meet()
    cells = [Scale(0), Scale(0, True)]
    for parameter, other in zip(cells[0].trainable_params(), cells[1].trainable_params()):
        other.set_data(parameter.value())
    schedule = pipeline(cells, 2, tied=("weights.0.weight", "weights.0.bias"))
    schedule.run(Tensor(array(4, 4)))
    first, second = (stage.gradients for stage in schedule.stages)
    for one, other in zip(first, second):
        assert (one.asnumpy() == other.asnumpy()).all() and one.asnumpy().any()


def test_a_list_is_not_a_stage_and_a_stage_no_list():
    stage = PipelineStage(Through(), 0, 1)
    with pytest.raises(TypeError, match="ScheduleGPipe takes one PipelineStage, not "):
        ScheduleGPipe([stage], 4)
    for wrong in (stage, [], [Through()]):
        with pytest.raises(TypeError, match="ScheduleLoopedBFS takes a list of this rank's PipelineStages, not "):
            ScheduleLoopedBFS(wrong, 4)


def test_graph_mode_is_for_stages_not_for_schedules():
    schedule = pipeline([Scale(0), Scale(1, True)], 2)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(ValueError, match=r"schedule runs in PyNative: .* PipelineStage\(..., compiled=True\)"):
            schedule.run(Tensor(array(4, 4)))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def test_a_parameter_that_is_frozen_later():
    schedule = pipeline([Scale(0), Scale(1, True)], 2)
    schedule.stages[1].cell.weights["1"].bias.requires_grad = False
    with pytest.raises(ValueError, match="requires_grad of 'weights.1.bias' has changed since stage 1 was made"):
        schedule.run(Tensor(array(4, 4)))


def test_stages_agree_on_layouts():
    """What one stage gives cut over dp, the next one has to take so."""
    shutdown()
    init_distributed("fake", world_size=2)
    mesh = init_device_mesh((1, 2), ("pp", "dp"))

    def make(number, is_last, cut):
        return shard(
            Scale(number, is_last), mesh.sub_mesh("dp", 0), plan={"": {"input": layout("dp") if cut else None}}
        )

    stages = [PipelineStage(make(place, place == 1, place == 0), place, 2, mesh=mesh) for place in (0, 1)]
    with pytest.raises(
        ValueError, match=r"stage 0 \(Scale\) gives output 0 as \[dp, -\], but stage 1 .* 'x' as \[-, -"
    ):
        ScheduleLoopedBFS(stages, 1).evaluate(mint.zeros((2, 4)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelineStage("cell", 0, 1), "takes a Cell"),
        (lambda: PipelineStage(Through(), 2, 2), "stage 2 of 2: stages count from 0 to 1"),
        (lambda: PipelineStage(Through(), 0, 2, loss_fn=ops.mse_loss), "only the last one, 1, may have one"),
        (lambda: PipelineStage(Through(), 0, 2).counted, r"doesn't know the others yet: call the schedule's meet\(\)"),
    ],
)
def test_stages_that_make_no_sense(make, message):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        make()


@pytest.mark.ranks("dead_stage.py", 3)
def test_a_stage_that_dies_is_named(launches):
    """The others end at once, with errors that say what they waited for."""
    launched = launches["dead_stage.py"].result()
    first, last = (launched.logs[rank].partition("ended after ")[2] for rank in (0, 2))
    for text, waiting in (
        (first, r"stage 0 \(rank 0\), step RB\d@0, waiting for SB\d@1 of stage 1 \(rank 1\): "),
        (last, r"stage 2 \(rank 2\), step RF1@2, waiting for SF1@1 of stage 1 \(rank 1\): "),
    ):
        assert re.match(r"\d s with: " + waiting, text), text
