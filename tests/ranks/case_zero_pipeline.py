"""Stages under hsdp() against one card: schedules, levels, ties, runs that add up, errors, clipping, communication."""

import numpy as np
import pytest
from pipeline_models import LAYERS, assert_alike, batch, my_rows, one_card, pipelined, schedule_of, sharded_part, train
from support.launch import on_ranks

from mindformers_core.communication import count_collectives, world
from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBH1,
    ScheduleZBV,
)
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm
from mindformers_core.zero import hsdp, tie_shards

PIPELINES, ROWS, COUNT, STEPS = 2, 8, 4, 2


def zero_schedule(kind, compiled=False, units=None, shape=(PIPELINES, 2, 1), count=COUNT, **options):
    """A schedule of this rank's stages under hsdp() on a mesh (pp, dp, tp), and the mesh."""
    mesh = init_device_mesh(shape, ("pp", "dp", "tp"))
    make = sharded_part(mesh.sub_mesh(("dp", "tp"), world().rank))
    options = {"shard_size": shape[1], "threshold": 0, **options}
    (rank,) = mesh.coordinate(world().rank, ("pp",))
    chunks = 2 if issubclass(kind, PipelineScheduleMulti) else 1

    def made(*at):
        return hsdp(make(*at), units=None if units is None else units(*at), **options)

    return schedule_of(kind, count, chunks, mesh, rank, made, compiled), mesh


def first_layers(stage_index, stage_num):
    """Two of the layers of a stage."""
    first = stage_index * LAYERS // stage_num
    return f"layers.{first}", f"layers.{first + 1}"


def values_of(schedule):
    """Path -> array, of all parts of this rank."""
    return {part.name: part.asnumpy().copy() for stage in schedule.stages for part in stage.parameters}


def gradients_of(schedule):
    """Path -> gradient, of all stages of this rank."""
    return {p.name: g for s in schedule.stages for p, g in zip(s.parameters, s.gradients, strict=True)}


def assert_gradients(schedule, expected, what, factor=1.0):
    """Those of the stages are the parts of one card's, times a factor."""
    parts = {p.name: p for stage in schedule.stages for p in stage.parameters}
    for path, gradient in gradients_of(schedule).items():
        part = parts[path]
        assert gradient.shape == part.shape and gradient.dtype == part.dtype, path
        true = dict(expected)[path][part.layout.local_slices(part.global_shape, world().rank)]
        np.testing.assert_allclose(gradient.asnumpy(), factor * true, 1e-5, 1e-6, err_msg=f"{what}: {path}")


def run(schedule, mesh, number=0, rows=ROWS):
    """One run over this rank's part of a batch."""
    tokens, named = my_rows(mesh, *batch(rows, number))
    return schedule.run(tokens, **named)


WAYS = (  # by day the first, at night all
    (ScheduleZBH1, "level3", True, True),
    (ScheduleInterleaved1F1B, "level1", None, False),
    (Schedule1F1B, "level2", None, False),
    (ScheduleZBH1, "level3", None, False),
)


@on_ranks(4)
def case_zero_stages_equal_one_card(ways=WAYS[:1]):
    """Schedules, levels, weights kept or gathered for every micro-batch, in PyNative and compiled; tied embeddings."""
    expected = one_card(ROWS, STEPS)
    for kind, level, reshard, compiled in ways:
        units = first_layers if compiled else None
        schedule, mesh = zero_schedule(kind, compiled, units, optimizer_level=level, reshard_after_forward=reshard)
        what = f"{kind.__name__}, {level}, reshard_after_forward={reshard}, compiled: {compiled}"
        assert_alike(pipelined(schedule, ROWS, STEPS, mesh), expected, what)
        for stage in schedule.stages:
            assert all(any(part.layout.dims) for part in stage.parameters), what
            assert [id(part) for part in stage.parameters] == [id(part) for part in stage.cell.trainable_params()], what


SENT = (("level1", None, None), ("level3", True, None), ("level3", None, False))


@on_ranks(4)
def case_what_zero_steps_communicate(ways=SENT[:2]):
    """Whatever the number of micro-batches and runs, each bucket is gathered once; evaluations in between change
    nothing. Only `reshard_after_forward=True` gathers for every micro-batch, twice. Where sums are sharded every
    micro-batch's gradients are reduced, else once a step."""
    (_, true), *_ = one_card(2 * ROWS, 1)[0]
    for level, reshard, shards in ways:
        options = {"optimizer_level": level, "reshard_after_forward": reshard, "accumulate_grad_step": 2}
        options["gradient_accumulation_shard"] = shards
        schedule, mesh = zero_schedule(Schedule1F1B, **options)
        tokens, named = my_rows(mesh, *batch(2 * ROWS))
        halves = [(tokens[own], {k: v[own] for k, v in named.items()}) for own in (slice(0, 4), slice(4, 8))]
        rows, kwargs = halves[0]
        schedule.meet()
        before = values_of(schedule)
        with count_collectives() as counts:
            schedule.run(rows, **kwargs)
            schedule.evaluate(rows, **kwargs)
            schedule.run(halves[1][0], **halves[1][1])
            assert_gradients(schedule, true, f"{level}, {reshard}")
            assert_gradients(schedule, true, "asked again")
        buckets = LAYERS // PIPELINES + 1 if level == "level3" else 1
        passes = 2 * COUNT * 2 + COUNT  # forward and backward in both runs, and forward
        gathers = (buckets - 1) * passes + 1 if reshard else buckets  # the embedding is in no unit
        found = {kind: calls for (kind, axes), (calls, _) in counts.items() if axes == ("dp",)}
        scatters = buckets * 2 * COUNT if level == "level3" and shards is None else buckets
        assert found["reduce_scatter"] == scatters and found["all_gather"] == gathers, (level, reshard, found)
        for path, value in values_of(schedule).items():
            np.testing.assert_array_equal(value, before[path])  # parts are there again
        for stage in schedule.stages:
            stage.zero_gradients()
            assert not any(gradient.asnumpy().any() for gradient in stage.gradients)


@on_ranks(4)
def case_zero_stages_recover():
    """After a run that failed on all ranks, after gradients that nobody took, with gradients taken between runs."""
    (_, true), *_ = one_card(ROWS, 1)[0]
    schedule, mesh = zero_schedule(ScheduleZBH1, count=2, optimizer_level="level3", reshard_after_forward=True)
    (stage,) = schedule.stages
    run(schedule, mesh)
    before = {path: gradient.asnumpy() for path, gradient in gradients_of(schedule).items()}
    forward = stage.forward

    def failing(micro_index, inputs, kwargs):
        if micro_index == 1 - stage.stage_index:
            raise RuntimeError("no more")
        return forward(micro_index, inputs, kwargs)

    stage.forward = failing
    with pytest.raises(RuntimeError, match="no more"):
        run(schedule, mesh, number=1)
    stage.forward = forward
    storage = tree_of(stage.cell).storage
    assert not storage.is_open
    for path, gradient in gradients_of(schedule).items():
        np.testing.assert_array_equal(gradient.asnumpy(), before[path])
    run(schedule, mesh)  # gradients were taken before: the sum goes on
    assert storage.is_open
    assert_gradients(schedule, true, "two runs", 2.0)
    assert not storage.is_open
    run(schedule, mesh, number=1)
    stage.zero_gradients()
    assert not storage.is_open
    run(schedule, mesh)
    assert_gradients(schedule, true, "once more")


MESHES = (((2, 2, 1), Schedule1F1B, 2), ((1, 2, 2), ScheduleZBV, 2), ((1, 4, 1), ScheduleZBV, 2))


@on_ranks(4)
def case_zero_clipping_counts_elements_once(meshes=MESHES[:1]):
    """Over stages and data-parallel parts; over parts that tensor parallelism cuts, too, with two stages on a rank."""
    (_, true), *_ = one_card(ROWS, 1)[0]
    expected = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for _, gradient in true))
    for shape, kind, size in meshes:
        schedule, mesh = zero_schedule(kind, shape=shape, count=2, shard_size=size)
        run(schedule, mesh)
        parameters = [part for stage in schedule.stages for part in stage.parameters]
        gradients = tuple(gradient for stage in schedule.stages for gradient in stage.gradients)
        counted = tuple(flag for stage in schedule.stages for flag in stage.counted)
        clipped, norm = ClipByGlobalNorm(parameters, 0.1, mesh, ("pp",), counted)(gradients)
        np.testing.assert_allclose(float(norm), expected, 1e-5, err_msg=f"{shape}")
        for one, other in zip(clipped, gradients, strict=True):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy() * (0.1 / expected), 1e-4, 1e-8)


SHARED = ((2, "level3", True), (2, "level1", None), (1, "level1", None))


@on_ranks(4)
def case_zero_stages_share_parts(ways=SHARED[:1]):
    """Two stages of one rank update one part of a tied embedding; cut, and whole."""
    expected = one_card(ROWS, STEPS)
    for size, level, reshard in ways:
        mesh = init_device_mesh((PIPELINES, 2, 1), ("pp", "dp", "tp"))
        make = sharded_part(mesh.sub_mesh(("dp", "tp"), world().rank))
        (rank,) = mesh.coordinate(world().rank, ("pp",))
        own = [index for index in range(4) if ScheduleZBV.stage_ranks(4, PIPELINES)[index] == rank]
        options = {"shard_size": size, "threshold": 0, "optimizer_level": level, "reshard_after_forward": reshard}
        cells = {index: hsdp(make(index, 4), **options) for index in own}
        tie_shards(cells.values(), ["embedding", "nowhere"])
        schedule = schedule_of(ScheduleZBV, COUNT, 2, mesh, rank, lambda index, _, cells=cells: cells[index])
        parameters = list(dict.fromkeys(part for stage in schedule.stages for part in stage.parameters))
        assert len(parameters) == sum(len(stage.parameters) for stage in schedule.stages) - (rank == 0)

        def gradients_of_step(number, schedule=schedule, mesh=mesh, parameters=parameters):
            for stage in schedule.stages:
                stage.zero_gradients()
            run(schedule, mesh, number)
            found = {p: g for s in schedule.stages for p, g in zip(s.parameters, s.gradients, strict=True)}
            return None, [tuple(found[part] for part in parameters)]

        assert_alike(train(gradients_of_step, [parameters], STEPS), expected, f"shard_size {size}, {level}, {reshard}")


@on_ranks(nightly=(4,))
def case_more_zero_stages():
    """Other levels, schedules and meshes."""
    case_zero_stages_equal_one_card(WAYS[1:])
    case_what_zero_steps_communicate(SENT[2:])
    case_zero_clipping_counts_elements_once(MESHES[1:])
    case_zero_stages_share_parts(SHARED[1:])
