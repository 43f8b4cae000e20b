"""`Trainer`: a loop that belongs to the user."""

import json
import os

import mindspore as ms
import pytest
from test_training_loop import ONE_RANK, SMALL

from mindformers_core import Trainer
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.commands.compare import read_losses
from mindformers_core.files import lock_folder


@pytest.mark.usefixtures("one_rank")
def test_a_loop_of_the_users(tmp_path):
    """It may end early, add to rows, and go on; a loss is read when its record is due."""
    options = [*SMALL, f"train_dataset.cache_dir={tmp_path / 'cache'}", "checkpoint.async_save=true"]
    options += ["checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=2"]
    Trainer(ONE_RANK, *options, f"training.output_dir={tmp_path / 'whole'}").run()
    job, folder, waiting = Trainer(ONE_RANK, *options, f"training.output_dir={tmp_path / 'a'}"), tmp_path / "a", []
    for row in job.steps():
        waiting.append(isinstance(row._numbers["loss"], ms.Tensor))
        row["own"] = row["step"] / 2
        if row["step"] == 4:
            break
    assert waiting == [True] * 4
    assert (folder / "summary.txt").read_text() == f"{job.summary}\n" and job.summary.startswith("4 steps on")
    assert sorted(os.listdir(folder / "checkpoint")) == ["step_2", "step_4"]
    check_checksums(open_checkpoint(job.save()))
    with lock_folder(folder):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["own"] for row in rows] == [0.5, 1.0, 1.5, 2.0]
    job.run()
    assert read_losses(str(folder)) == read_losses(str(tmp_path / "whole")) and not (tmp_path / "a.1").exists()
    assert list(job.steps()) == [] and job.summary is None
