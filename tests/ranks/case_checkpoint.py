"""Checkpoints of ranks: saved on a mesh, resumed on others and by each rank alone; the failure of one rank."""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from case_training import CONFIGS, SMALL, compare_with_one_rank, job_on, pipeline
from safetensors import safe_open
from support.launch import on_ranks

from mindformers_core.checkpoint.folders import newest_checkpoint
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.checkpoint.regions import inside, whole
from mindformers_core.checkpoint.save import SaveError
from mindformers_core.checkpoint.tensors import model_parts
from mindformers_core.commands.compare import read_losses
from mindformers_core.communication import world
from mindformers_core.communication.messages import gather_values
from mindformers_core.padding import padded_array
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.trainer.checkpoints import resume, save_job
from mindformers_core.trainer.trainer import Trainer

FOLDER = os.path.join(tempfile.gettempdir(), "mindformers_core_case_checkpoint_")
PP = (4, 1, 1, 1)
MODEL = ("model.num_hidden_layers=2", "model.tie_word_embeddings=true", "training.steps=9")
ZERO = ("parallelism.zero_level=2", "parallelism.zero_threshold_kb=1")


def folder_of(case):
    """A folder of this launch's own."""
    return f"{FOLDER}{case}_{os.environ['MS_SCHED_PORT']}"


def numbers(row):
    """What training has computed."""
    return [row[key] for key in ("step", "loss", "gradient_norm")]


@on_ranks(2, nightly=(4,))
def case_saved_on_one_mesh_and_resumed_on_others():
    """ZeRO 2 on dp 2: the next step in a pipeline; at night all x tp 2, and on the same mesh, equal bit by bit."""
    folder, tp = folder_of("meshes"), world().size // 2
    options = (*MODEL, f"training.output_dir={folder}")
    job = job_on((1, 2, 1, tp), None, *options, *ZERO)
    job.train_step()
    saved = open_checkpoint(save_job(job))
    expected = numbers(job.train_step())
    targets = ((2, 1, 1, tp), (*pipeline("zb_h1"), "training.local_batch_size=4")), ((1, 2, 1, tp), ZERO)
    for shape, overrides in targets[:tp]:
        resumed = job_on(shape, None, *options, *overrides)
        resume(resumed, saved)
        found = numbers(resumed.train_step())
        if overrides == ZERO:
            assert found == expected
        np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-6, err_msg=str(overrides))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(overrides))
    gather_values(job.mesh, None)  # all ranks have read, before one of them removes the folder
    if world().rank == 0:
        shutil.rmtree(folder)


@on_ranks(nightly=(4,))
def case_vocabulary_that_no_axis_divides():
    """257 ids: trained on tp 4 as on one card, resumed on tp 3 and on one card; files have 257 rows.

    Daily, on simulated ranks: `test_checkpoint_meshes`, `test_padding`.
    """
    folder, rank = folder_of("vocabulary"), world().rank
    heads = [f"model.{key}=12" for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")]
    options = (*heads, "model.hidden_size=24")
    job = compare_with_one_rank(f"training.output_dir={folder}", shape=(1, 1, 1, 4), alike=options)
    saved = open_checkpoint(save_job(job))
    rows = {name: placed.shape[0] for (_, name), placed in saved.tensors.items() if "embed" in name or "head" in name}
    assert len(rows) == 2 + 4 and {*rows.values()} == {257}, "weights and moments"
    last = [each for each in job.optimizer.parameters if rank == 3 and hasattr(each, "part_sizes")]
    assert all(each.shape == (65, 24) and not each[62:].asnumpy().any() for each in last)
    shape, ranks = ((1, 1, 1, 3), [0, 1, 2]) if rank < 3 else ((1, 1, 1, 1), [3])
    resumed = job_on(shape, ranks, *options)
    resume(resumed, saved)
    for part, parameter in model_parts(resumed.cells.values(), rank).items():
        with safe_open(saved.tensors[part.key].file, "np") as file:
            expected = padded_array(file.get_tensor(part.name)[inside(part.box, whole(part.shape))], parameter.shape)
        np.testing.assert_array_equal(parameter.asnumpy(), expected, part.name)
    np.testing.assert_allclose(numbers(resumed.train_step()), numbers(job.train_step()), rtol=1e-5)
    gather_values(job.mesh, None)
    if rank == 0:
        shutil.rmtree(folder)


@on_ranks(2)
def case_resumed_run_with_few_checkpoints():
    """Runs by recipe: one that goes on from a checkpoint, saved beside training, is as the unbroken one.

    Two ranks share every sequence of documents, in zigzag, in evaluation too."""
    folder = folder_of("runs")
    places = (f"train_dataset.data_path={CONFIGS}", f"train_dataset.cache_dir={folder}/cache")
    places += ("parallelism.data_parallel_shard=1", "parallelism.context_parallel=2", "parallelism.tensor_parallel=1")
    saving = ("checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=1", "checkpoint.keep_last=2")
    evaluating = ("evaluation.interval=4", "evaluation.samples=8", "evaluation.dataset={max_bytes: 1000}")

    def run(name, *overrides):
        overrides = [
            *SMALL,
            *places,
            "train_dataset.packing=documents",
            f"training.output_dir={folder}/{name}",
            *overrides,
        ]
        job = Trainer(load_recipe(str(CONFIGS / "llama_tiny_cpu.yaml"), overrides))
        job.run()
        gather_values(job.mesh, None)
        losses = read_losses(f"{folder}/{name}")
        rows = map(json.loads, Path(f"{folder}/{name}/metrics.jsonl").read_text().splitlines())
        evaluated.append([row["eval_loss"] for row in rows if "eval_loss" in row])
        gather_values(job.mesh, None)
        return losses

    evaluated = []
    unbroken = run("unbroken", *saving, *evaluating, "checkpoint.keep_every=3", "checkpoint.async_save=true")
    assert sorted(os.listdir(f"{folder}/unbroken/checkpoint")) == ["step_3", "step_4"]
    path = f"checkpoint.load_path={folder}/unbroken/checkpoint/step_3"
    auto = "checkpoint.save_interleaved_steps=auto", "checkpoint.mtbf=1h", "checkpoint.enable_save=true"
    assert run("resumed", path, *evaluating, *auto) == {4: unbroken[4]}
    assert len(evaluated[0]) == 1 and evaluated[0] == evaluated[1]
    if world().rank == 0:
        check_checksums(open_checkpoint(f"{folder}/unbroken/checkpoint/step_4"))
        shutil.rmtree(folder)


@on_ranks(2)
def case_a_signal_to_one_rank_ends_all_after_one_step():
    """SIGTERM at rank 1 after step 2: both save step 3, whole also beside training, and leave with 75."""
    folder, steps = folder_of("signal"), []
    saving = ("checkpoint.enable_save=true", "checkpoint.async_save=true", "checkpoint.grace=1000000")
    job = job_on((1, 2, 1, 1), None, *MODEL, "model.num_hidden_layers=1", f"training.output_dir={folder}", *saving)
    with pytest.raises(SystemExit) as left:
        for row in job.steps():
            steps.append(row["step"])
            if row["step"] == 2 and world().rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 75
    assert gather_values(job.mesh, steps) == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert newest_checkpoint(folder) == f"{folder}/checkpoint/step_3"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if world().rank == 0:
        assert list(read_losses(folder)) == [1, 2, 3]
        shutil.rmtree(folder)


@on_ranks(4)
def case_failures_of_one_rank_are_those_of_all():
    """A rank that can't write, and a damaged tensor that one rank reads: the same error on all, and nothing is left."""
    folder = folder_of("failures")
    options = (*MODEL, "model.num_hidden_layers=4", f"training.output_dir={folder}")
    job = job_on(
        PP, None, *options, *pipeline("1f1b"), "parallelism.pipeline_parallel=4", "training.local_batch_size=4"
    )
    saved = Path(save_job(job))
    job.step += 1
    gather_values(job.mesh, None)
    moment, values = job.optimizer.members[0].moments1[0], job.optimizer.members[0].moments1[0].asnumpy
    if world().rank == 2:

        def fail():
            raise PermissionError(13, "Permission denied", "a file")

        moment.asnumpy = fail
    with pytest.raises(SaveError, match=r"step_1 can't be saved: rank 2: \[Errno 13\] Permission denied: 'a file'"):
        save_job(job)
    moment.asnumpy = values
    gather_values(job.mesh, None)  # rank 0 has removed what was written
    assert os.listdir(saved.parent) == ["step_0"]
    if world().rank == 0:
        checkpoint = open_checkpoint(str(saved))
        placed = checkpoint.tensors["model", "model.layers.2.mlp.up_proj.weight"]
        with open(placed.file, "r+b") as file:
            file.seek(placed.offset + 5)
            file.write(b"\xff")
    gather_values(job.mesh, None)
    with pytest.raises(
        ValueError, match=r"model-00001.* is damaged: 'model.layers.2.mlp.up_proj.weight'\[0:64, 0:32\]"
    ):
        resume(job, open_checkpoint(str(saved)))
    gather_values(job.mesh, None)
    if world().rank == 0:
        shutil.rmtree(folder)
