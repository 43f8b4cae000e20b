"""Checkpoints of jobs on simulated ranks: all pairs of meshes, ZeRO levels and pipelines, bit by bit.

The next losses, on ranks: `case_checkpoint`.
"""

import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_states import CountingFiles
from support.nightly import daily

from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.checkpoint.regions import inside, whole
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts, optimizer_parts
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.communication.messages import gather_values
from mindformers_core.padding import padded_array
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.trainer.checkpoints import save_job

pytestmark = pytest.mark.ranks
RECIPE = str(Path(__file__).parent.parent / "configs" / "llama_tiny_pp.yaml")
SMALL = (
    "training.local_batch_size=2", "training.global_batch_size=8", "train_dataset.seq_length=16",
    "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=4", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "train_dataset.max_bytes=20000", "parallelism.zero_threshold_kb=1",
    "model.vocab_size=257",
)  # fmt: skip


def mesh(pp=1, dp=1, tp=1, zero=0, **others):
    """Overrides of `parallelism`."""
    keys = {"pipeline_parallel": pp, "data_parallel_shard": dp, "tensor_parallel": tp, "zero_level": zero} | others
    return [f"parallelism.{key}={value}" for key, value in keys.items()]


MESHES = {
    "one": mesh(),
    "dp_tp": mesh(dp=2, tp=2),
    "zero_1": mesh(dp=4, zero=1),
    "zero_2_tp": mesh(dp=2, tp=2, zero=2),
    "zero_3_of_groups": mesh(dp=2, zero=3, data_parallel_replicate=2),
    "pp_of_uneven_stages_tp": mesh(pp=2, tp=2, pipeline_parallel_layers_per_stage="[1,3]"),
    "interleaved_zero_1": mesh(
        pp=2, dp=2, zero=1, pipeline_parallel_schedule="interleaved_1f1b", pipeline_parallel_interleave_num=2
    ),
    "v_zero_3_tp": mesh(
        pp=2, dp=2, tp=2, zero=3, pipeline_parallel_schedule="zb_v", pipeline_parallel_interleave_num=2
    ),
}


def run(folder, name, *overrides, steps=0, prepare=None):
    """Run the small recipe on simulated ranks of a mesh."""
    places = (f"training.output_dir={folder / name}", f"train_dataset.cache_dir={folder / 'cache'}")
    return run_simulated(load_recipe(RECIPE, [*SMALL, *MESHES[name], *places, *overrides]), steps, prepare)


def bits_of(part):
    """Random bits of a whole tensor, the same for all meshes: those of finite numbers, as no others are saved."""
    rng = np.random.default_rng(zlib.crc32("/".join(part.key).encode()))
    return rng.integers(0, 2**32, part.shape, np.uint32) & np.uint32(0xBFFFFFFF)


def parts_of(job):
    """This rank's parts of weights and moments."""
    return model_parts(job.cells.values(), job.rank) | optimizer_parts(job.optimizer, job.rank)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of a mesh -> the folder of a run on it that has saved the same state as all others."""
    folder = tmp_path_factory.mktemp("saved")

    def fill_and_save(job):
        for part, parameter in parts_of(job).items():
            fill_parameter(parameter, bits_of(part)[inside(part.box, whole(part.shape))])
        save_job(job)

    def saved_on(name):
        if not (folder / name).exists():
            run(folder, name, prepare=fill_and_save)
        return folder / name

    return saved_on


SOURCES = "one", "v_zero_3_tp"  # daily; all are nightly, as all targets
TARGETS = ("zero_2_tp",)


@pytest.mark.parametrize("target", daily(TARGETS, MESHES))
def test_every_mesh_loads_from_every_mesh(saved, target, tmp_path):
    """64 pairs: all parameters and moments bit by bit; each rank reads what it needs, and all is verified."""
    folders = {name: saved(name) for name in (SOURCES if target in TARGETS else MESHES)}
    files = [load_file(path) for path in folders["one"].rglob("*.safetensors")]
    size = sum(array.nbytes for found in files for array in found.values())
    assert size == 3 * 4 * 11936, "weights and two moments of float32"

    def load_all(job):
        parts = parts_of(job)
        for source, folder in folders.items():
            for parameter in parts.values():
                fill_parameter(parameter, np.zeros(parameter.shape, np.uint32))
            checkpoint, counting = open_checkpoint(str(folder / "checkpoint/step_0")), CountingFiles()
            report = load(
                checkpoint, list(parts), lambda part, array: fill_parameter(parts[part], array),
                Ranks(job.rank, lambda value: gather_values(job.mesh, value)), files=counting,
            )  # fmt: skip
            for part, parameter in parts.items():
                expected = padded_array(bits_of(part)[inside(part.box, whole(part.shape))], parameter.shape)
                np.testing.assert_array_equal(parameter.asnumpy().view(np.uint32), expected, f"{part} of {source}")
            assert counting.counts["read"] == report.read == report.needed == sum(part.nbytes for part in parts)
            assert sum(gather_values(job.mesh, report.verified).values()) == size

    run(tmp_path, target, prepare=load_all)


@pytest.mark.parametrize("names", daily([[*SOURCES]], [[*SOURCES], [*MESHES]]), ids=len)
def test_files_of_all_meshes_are_equal(saved, names):
    first, *others = ({path.name: path.read_bytes() for path in saved(name).rglob("*.safetensors")} for name in names)
    assert len(first) == 2 and all(each == first for each in others)
