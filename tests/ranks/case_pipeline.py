"""Pipelines on several ranks against one card: losses, gradients of all parameters, parameters after five steps."""

from itertools import product

import mindspore as ms
import numpy as np
import pytest
from pipeline_models import assert_alike, batch, my_rows, one_card, part, pipelined, schedule_of, sharded_part
from support.launch import on_ranks

from mindformers_core.communication import count_collectives, world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBV
from mindformers_core.pipeline.schedules.named import SCHEDULES
from mindformers_core.tensor_parallel import jit
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm


def chunks_of(kind):
    return 2 if issubclass(kind, PipelineScheduleMulti) else 1


def compare_schedules(names=tuple(SCHEDULES), steps=2, compiled=False):
    """Built-in schedules, by default all of them."""
    rows = 2 * (count := 2 * world().size)
    expected = one_card(rows, steps)
    for name in names:
        kind = SCHEDULES[name]
        schedule = schedule_of(kind, count, chunks_of(kind), compiled=compiled)
        assert_alike(pipelined(schedule, rows, steps), expected, name)


@on_ranks(4)
def case_schedules_equal_one_card():
    """In PyNative; tensors of three kinds between stages, an embedding that is the head. The tables of all schedules,
    in one process: `test_pipeline_schedules`."""
    compare_schedules(("interleaved_1f1b", "dualpipe_v"))


@on_ranks(nightly=(2, 4))
def case_every_schedule_equals_one_card():
    compare_schedules()


@on_ranks(2)
def case_compiled_schedules_equal_one_card():
    """Stages compiled, the schedule in Python: two stages on a rank, with split backward passes."""
    compare_schedules(("zb_v",), compiled=True)


@on_ranks(nightly=(2, 4))
def case_every_compiled_schedule_equals_one_card():
    """Five steps of each."""
    compare_schedules(steps=5, compiled=True)


def on_a_mesh(shape, kind, compiled=False, count=4, **options):
    """A schedule of sharded stages on a mesh (pp, dp, tp), and the mesh."""
    mesh = init_device_mesh(shape, ("pp", "dp", "tp"))
    make = sharded_part(mesh.sub_mesh(("dp", "tp"), world().rank))
    (rank,) = mesh.coordinate(world().rank, ("pp",))
    return schedule_of(kind, count, chunks_of(kind), mesh, rank, make, compiled, **options), mesh


OVER_TP, OVER_DP = (2, 1, 2), (2, 2, 1)


def compare_on_meshes(*runs):
    expected = one_card(8, 2)
    for shape, kind, compiled in runs:
        schedule, mesh = on_a_mesh(shape, kind, compiled)
        what = f"{kind.__name__} on {shape}, compiled: {compiled}"
        assert_alike(pipelined(schedule, 8, 2, mesh), expected, what)


@on_ranks(4)
def case_pipelines_compose_with_the_other_axes():
    """Two stages of two ranks each: cut over tp, weight gradients later. Over dp, compiled: `case_zero_pipeline`."""
    compare_on_meshes((OVER_TP, ScheduleZBV, False))


@on_ranks(nightly=(4,))
def case_more_pipelines_compose_with_the_other_axes():
    """Over dp; compiled."""
    compare_on_meshes(*product((OVER_DP,), (Schedule1F1B, ScheduleZBV), (False, True)), (OVER_TP, ScheduleZBV, True))


@on_ranks(4)
def case_clipping_is_right_across_stages():
    """Every element counts once, that of a tied embedding of two stages, too; PyNative and compiled.

    Of a tied embedding of two ranks: `case_zero_clipping_counts_elements_once`.
    """
    (_, true), *_ = one_card(8, 1)[0]
    expected = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for _, gradient in true))
    schedule, mesh = on_a_mesh(OVER_TP, ScheduleZBV)
    tokens, named = my_rows(mesh, *batch(8))
    schedule.run(tokens, **named)
    parameters = [p for stage in schedule.stages for p in stage.parameters]
    gradients = tuple(g for stage in schedule.stages for g in stage.gradients)
    counted = tuple(flag for stage in schedule.stages for flag in stage.counted)
    clip = ClipByGlobalNorm(parameters, 0.1, mesh=mesh, over=("pp",), counted=counted)

    @jit
    def compiled(*gradients):
        return clip(gradients)

    for clipped, norm in (clip(gradients), compiled(*gradients)):
        np.testing.assert_allclose(float(norm), expected, 1e-5)
        for one, other in zip(clipped, gradients, strict=True):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy() * (0.1 / expected), 1e-4, 1e-8)


@on_ranks(2)
def case_runs_add_up_and_evaluation_leaves_nothing():
    """Two runs of half the rows each give twice the mean's gradient; tied gradients are summed once."""
    for kind in (Schedule1F1B, ScheduleZBV):
        schedule = schedule_of(kind, 4, chunks_of(kind), share_outputs=True)
        tokens, named = batch(16)
        halves = [(tokens[own], {k: v[own] for k, v in named.items()}) for own in (slice(0, 8), slice(8, 16))]
        losses = [float(schedule.run(rows, **kwargs)[0]) for rows, kwargs in halves]
        accumulated = [[g.asnumpy() for g in stage.gradients] for stage in schedule.stages]
        (true_loss, true), *_ = one_card(16, 1)[0]
        np.testing.assert_allclose(np.mean(losses), true_loss, 1e-5)  # on both ranks
        for stage, gradients in zip(schedule.stages, accumulated):
            for parameter, gradient in zip(stage.parameters, gradients, strict=True):
                np.testing.assert_allclose(gradient / 2, dict(true)[parameter.name], 1e-5, 1e-6, parameter.name)
        loss, logits = schedule.evaluate(tokens, **named)
        np.testing.assert_allclose(float(loss), true_loss, 1e-5)
        np.testing.assert_allclose(logits.asnumpy(), part()(tokens, **named)[1].asnumpy(), 1e-4, 1e-5)
        for stage, gradients in zip(schedule.stages, accumulated):
            for gradient, before in zip(stage.gradients, gradients, strict=True):
                assert (gradient.asnumpy() == before).all()
            stage.zero_gradients()
            assert not any(gradient.asnumpy().any() for gradient in stage.gradients)


@on_ranks(2)
def case_micro_batches_may_differ_in_shape():
    """Three micro-batches of 1, 3 and 2 rows: each counts as much as any other, and only needed values travel."""
    schedule = schedule_of(Schedule1F1B, 3)
    tokens, named = batch(6)
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    pieces = [((tokens[own],), {name: value[own] for name, value in named.items()}) for own in cuts]
    with count_collectives() as counts:
        results = schedule.run_microbatches(pieces)
    model = part()
    step = ms.value_and_grad(lambda rows, named: model(rows, **named), None, model.trainable_params(), has_aux=True)
    found = [step(*rows, named) for rows, named in pieces]
    true = {p.name: sum(g[at].asnumpy() for _, g in found) / 3 for at, p in enumerate(model.trainable_params())}
    (stage,) = schedule.stages
    for parameter, gradient in zip(stage.parameters, stage.gradients, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), true[parameter.name], 1e-5, 1e-6, parameter.name)
    if world().rank == 1:
        np.testing.assert_allclose(float(results[0]), np.mean([float(outputs[0]) for outputs, _ in found]), 1e-5)
        logits = np.concatenate([outputs[1].asnumpy() for outputs, _ in found])
        np.testing.assert_allclose(results[1].asnumpy(), logits, 1e-5, 1e-6)
    hidden, total, ids, tied = 6 * 4 * 8 * 4, 6 * 8, 6 * 4 * 4, 16 * 8 * 4
    forth, back = (3, hidden + total + ids), (3, hidden + total)  # no gradient of integers
    calls, size = forth if world().rank == 0 else back
    assert counts == {("send", ("pp",)): (calls + 1, size + tied)}


@on_ranks(2)
def case_what_a_failed_run_has_sent_is_not_taken():
    """Stage 0 has sent three micro-batches when stage 1 fails at its first one."""
    schedule = schedule_of(ScheduleGPipe, 4)
    (stage,) = schedule.stages
    forward = stage.forward

    def failing(micro_index, *given):
        if micro_index == 3 * (1 - stage.stage_index):
            raise RuntimeError("no more")
        return forward(micro_index, *given)

    stage.forward = failing
    tokens, named = batch(8, 1)
    with pytest.raises(RuntimeError, match="no more"):
        schedule.run(tokens, **named)
    stage.forward = forward
    expected = one_card(8, 1)
    for following in (schedule_of(ScheduleGPipe, 4), schedule):
        assert_alike(pipelined(following, 8, 1), expected, "after it")


@on_ranks(2)
def case_errors_name_both_stages():
    """What a stage can't take, keyword arguments that nobody takes, tied parameters that aren't alike."""
    schedule = schedule_of(ScheduleGPipe, 2)
    tokens, named = batch(4)
    with pytest.raises(TypeError, match=r"no stage takes a keyword argument 'label' \(did you mean 'labels'\?\)"):
        schedule.run(tokens, label=named["labels"])
    other = part(world().rank, 2)
    if world().rank == 1:
        other.embedding.set_data(other.embedding + 1)
    with pytest.raises(ValueError, match="'embedding' has other values on stage 1 than on stage 0"):
        ScheduleGPipe(PipelineStage(other, world().rank, 2, tied=("embedding",)), 2).meet()
