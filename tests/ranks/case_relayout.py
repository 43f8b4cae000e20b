"""Weights and moments of a running job on other meshes, in memory: bits, bytes sent, the next step's loss."""

import numpy as np
import pytest
from case_training import job_on, pipeline
from support.launch import on_ranks

from mindformers_core.checkpoint.between_meshes import global_checksums, relayout
from mindformers_core.checkpoint.parts import Ranks, parts_of_all
from mindformers_core.checkpoint.regions import overlap, volume
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts, optimizer_parts
from mindformers_core.communication import world
from mindformers_core.communication.messages import gather_values
from mindformers_core.mesh import init_device_mesh

ZERO = ("parallelism.zero_level=3", "parallelism.zero_threshold_kb=1")
TARGETS = {
    "other cuts": ((1, 1, 1, 4), None, ("model.num_key_value_heads=4",)),
    "zero 3": ((1, 4, 1, 1), None, ZERO),
    "stages as V": ((2, 1, 1, 2), None, (*pipeline("zb_v", 2), "training.local_batch_size=4")),
    "fewer ranks": ((1, 1, 1, 2), [1, 2], ()),
    "one": ((1, 1, 1, 1), [3], ()),
}


def gathered(value):
    """A value of all ranks."""
    return gather_values(init_device_mesh((world().size,), ("rank",)), value)


def parts_of(job):
    """This rank's parts, a dict; {} without a job."""
    found = (
        () if job is None else [*model_parts(job.cells.values(), job.rank), *optimizer_parts(job.optimizer, job.rank)]
    )
    return {part.key: part for part in found}


def sides(job):
    """The Cells and the optimizer of a job; nothing on ranks outside of its mesh."""
    return ((), None) if job is None else (list(job.cells.values()), job.optimizer)


@on_ranks(4)
def case_relayout_to_other_meshes(names=("zero 3", "one"), layers=2):
    """From (dp 2, tp 2): every rank receives what it lacks, and the job goes on there as it would have here."""
    alike = (f"model.num_hidden_layers={layers}", "model.tie_word_embeddings=true", "model.num_key_value_heads=4")
    source = job_on((1, 2, 1, 2), None, *alike)
    source.train_step()
    jobs = {}
    for name, (shape, ranks, overrides) in ((name, TARGETS[name]) for name in names):
        outside = ranks is not None and world().rank not in ranks
        job = None if outside else job_on(shape, ranks, *alike, *overrides, "training.seed=7")
        (cells, optimizer), (old_cells, old_optimizer) = sides(job), sides(source)
        report = relayout(old_cells, cells, old_optimizer, optimizer)
        held, lacking = parts_of(source), 0
        for key, part in parts_of(job).items():
            common = overlap(held[key].box, part.box)
            lacking += (volume(part.box) - (0 if common is None else volume(common))) * part.nbytes // volume(part.box)
        assert report.received == lacking, (name, report)
        assert report.received + report.copied == sum(part.nbytes for part in parts_of(job).values())
        totals = np.sum([list(row) for row in gathered([report.sent, report.received]).values()], axis=0)
        assert totals[0] == totals[1] and (totals[0] > 0) == (name != "stages as V"), name  # these are subsets
        assert global_checksums(*sides(source)) == global_checksums(*sides(job)), name
        jobs[name] = job
    expected = source.train_step()
    for name in (name for name in names if name in ("zero 3", "stages as V")):
        jobs[name].step, jobs[name].consumed = 1, 8
        found = jobs[name].train_step()
        for key in ("loss", "gradient_norm"):
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, err_msg=f"{name} {key}")


@on_ranks(nightly=(4,))
def case_relayout_to_more_meshes():
    """A pipeline among them, two stages of which are on a rank."""
    case_relayout_to_other_meshes(("other cuts", "stages as V", "fewer ranks"), layers=4)


@on_ranks(4)
def case_relayout_errors():
    """A rank with a wrong shard is named. A model that isn't the source's: `test_checkpoint_moves`."""
    source = job_on((1, 2, 1, 2), None)
    parts = model_parts(source.cells.values(), world().rank)
    part = next(part for part in parts if part.name.endswith("norm.weight"))
    if world().rank == 2:
        fill_parameter(parts[part], parts[part].asnumpy() + 1)
    with pytest.raises(ValueError, match=rf"'{part.name}'\[0:\d+\] differs between rank 0 and rank 2"):
        global_checksums(list(source.cells.values()))
    assert len(parts_of_all(Ranks(world().rank, gathered), list(parts))) == 4
