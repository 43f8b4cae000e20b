"""`Trainer`: a loop that belongs to the user."""

import json
import os
import re
import sys
from functools import cache

import mindspore as ms
import numpy as np
import pytest
from support.launch import ROOT
from support.nightly import daily
from test_training_loop import ONE_RANK, SMALL, rows_of

from mindformers_core import Trainer
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.commands.command_line import main
from mindformers_core.commands.compare import read_losses
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.files import lock_folder
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.redistribution.device_model import GPU
from mindformers_core.trainer import records, step, trainer
from mindformers_core.trainer.checkpoints import going_on, open_source
from mindformers_core.trainer.evaluation import inference

sys.path.insert(0, str(ROOT / "examples"))


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
def test_a_loop_of_the_users(tmp_path, capsys):
    """It may end early, add to rows, and go on; a loss is read when its record is due."""
    options = [*SMALL, f"train_dataset.cache_dir={tmp_path / 'cache'}", "checkpoint.async_save=true"]
    options += ["checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=2"]
    options += [f"evaluation.dataset={{data_path: [{ROOT / 'README.md'}], packing: documents}}"]
    options += ["evaluation.interval=3"]
    options += ["evaluation.samples=5", "monitor.gradient_norms=['*norm*']", "precision.loss_scale=2"]
    options += ["training.average_decay=0.9", "context.device_model=CPU"]
    whole, auto = tmp_path / "whole", ("checkpoint.save_interleaved_steps=auto", "checkpoint.mtbf=1ms")
    Trainer(ONE_RANK, *options, *auto, f"training.output_dir={whole}").run()
    assert sorted(os.listdir(whole / "checkpoint")) == ["step_5", "step_6"]
    assert "save_interleaved_steps: auto: every 1 steps, since one takes" in capsys.readouterr().out
    assert main(["recovery", "--simulate", "--run", str(whole), "--mtbf", "1h", "--restart", "9"]) == 0
    assert "Daly's formula" in capsys.readouterr().out
    job, folder, waiting = Trainer(ONE_RANK, *options, f"training.output_dir={tmp_path / 'a'}"), tmp_path / "a", []
    for row in job.steps():
        waiting.append(isinstance(row.data["loss"], ms.Tensor))
        row["own"] = row["step"] / 2
        if row["step"] == 4:
            break
    assert waiting == [True, False, True, False]  # a save is after the row
    assert (folder / "summary.txt").read_text() == f"{job.summary}\n" and job.summary.startswith("4 steps on")
    assert sorted(os.listdir(folder / "checkpoint")) == ["step_2", "step_4"]
    check_checksums(open_checkpoint(job.save()))
    with lock_folder(folder):
        assert [row["own"] for row in rows_of(folder)] == [0.5, 1.0, 1.5, 2.0]
    job.run()
    assert read_losses(str(folder)) == read_losses(str(tmp_path / "whole")) and not (tmp_path / "a.1").exists()
    assert list(job.steps()) == [] and job.summary is None
    rows = {row["step"]: row.get("eval_loss") for row in rows_of(folder)}
    assert [step for step, loss in rows.items() if loss] == [3, 6] and rows[6] < rows[3]
    assert rows[6] == pytest.approx(job.evaluate()["eval_loss"], 1e-6)
    assert rows == {row["step"]: row.get("eval_loss") for row in rows_of(tmp_path / "whole")}
    others = {"not_finite", "eval_NAME", "epoch N", "epoch_begins", "slow_rank", "slow_seconds", "replica_seconds"}
    others |= {"router_loss", "expert_load", "expert_overflow", "rank_load", "experts_moved"}
    found = {key for row in rows_of(folder) for key in row} - {"own"} | others
    given = {"gradient_norm *norm*": "gradient_norm PATTERN"}
    given |= {f"average_eval_{name}": "average_eval_NAME" for name in ("loss", "perplexity")}
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert {given.get(key, key) for key in found} == set(re.findall(r"^\| `([^`]*)` \|", page, re.M))
    with pytest.raises(ValueError, match="evaluation.dataset: missing: training data would be evaluated"):
        load_recipe(ONE_RANK, ["evaluation.interval=1"])
    with pytest.raises(ValueError, match="evaluation.dataset.data_pth: unknown key .did you mean 'data_path'"):
        load_recipe(ONE_RANK, ["evaluation.interval=1", "evaluation.dataset={data_pth: a}"])


@pytest.mark.usefixtures("one_rank")
def test_a_row_is_in_its_file_before_a_job_could_go_on_after_it(tmp_path, monkeypatch):
    """Its loss and its evaluation, when its step is saved, behind earlier rows; then it gets the seconds of a save."""
    options = [*SMALL, f"train_dataset.cache_dir={tmp_path / 'cache'}", f"training.output_dir={tmp_path / 'run'}"]
    options += ["checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=2", "monitor.log_interval=100"]
    options += [f"evaluation.dataset={{data_path: [{ROOT / 'README.md'}], packing: documents}}"]
    options += ["evaluation.interval=2", "evaluation.samples=5", "training.steps=4"]
    save, found = trainer.save_job, []

    def noted(job, **given):
        found.append(rows_of(tmp_path / "run"))
        return save(job, **given)

    monkeypatch.setattr(trainer, "save_job", noted)
    Trainer(ONE_RANK, *options).run()
    assert [[row["step"] for row in rows] for rows in found] == [[1, 2], [1, 2, 3, 4]]
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for early, row in ((found[0][1], rows[1]), (found[1][3], rows[3])):
        assert "eval_loss" in early and early.items() < row.items()


def test_half_written_metrics_line_is_dropped_when_resuming(tmp_path):
    rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "lo')
    records.metrics_writer(str(tmp_path), after_step=2)({"step": 3, "loss": 9.0})
    assert read_losses(str(tmp_path)) == {1: 1.0, 2: 0.5, 3: 9.0}


LLAMA = str(ROOT / "configs" / "llama_tiny_pp.yaml")
SIZES = (
    "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=2", "model.num_attention_heads=4",
    "model.num_key_value_heads=2", "training.local_batch_size=4", "training.global_batch_size=8",
    "train_dataset.seq_length=16", "evaluation.samples=11",
)  # fmt: skip
# Of a step of 8 sequences of 16 tokens: of each token and layer 2 x (q, k, v, o; gate, up, down), and for both products
# of attention 2 x 16 scores of 16 values, then the head of 256 classes; the backward pass has twice as many.
LLAMA_OPERATIONS = 3 * 8 * 16 * (2 * (2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 4 * 16 * 16) + 2 * 16 * 256)
OWN = str(ROOT / "examples" / "own_model.yaml")
OWN_SIZES = "model.dropout=0.25", "training.local_batch_size=4", "training.global_batch_size=8", "evaluation.samples=11"


def parallel(pp=1, dp=1, tp=1, **others):
    keys = {"pipeline_parallel": pp, "data_parallel_shard": dp, "tensor_parallel": tp, "zero_level": 0} | others
    return [f"parallelism.{key}={value}" for key, value in keys.items()]


class Held:
    """Samples of 16 tokens of which the first 2 to 15 have labels: each one is a function of its number."""

    def batch(self, first, count):
        numbers = range(first, first + count)
        rows = np.stack([np.random.default_rng((7, each)).integers(0, 256, 17) for each in numbers]).astype(np.int32)
        counts = np.array([[2 + 5 * each % 14] for each in numbers])
        return rows[:, :-1], np.where(np.arange(16) < counts, rows[:, 1:], -100).astype(np.int32)


HELD = Held()


class Counts:
    """A metric: the number of samples, and that of labels."""

    def __init__(self):
        self.samples = self.labels = 0

    def update(self, results, samples):
        self.samples, self.labels = self.samples + samples, self.labels + results[-1]

    def compute(self):
        return {"samples": self.samples, "labels": self.labels}


def evaluations(recipe, *overrides, data=None, evaluates=True):
    """What all ranks find, alike: an evaluation, the loss of a step, an evaluation, the loss of another step."""
    given = "evaluation.metrics=[test_trainer:Counts]", "context.device_model=GPU"
    recipe = load_recipe(recipe, [*overrides, *given])
    mesh = recipe_mesh(recipe)
    ms.runtime.launch_blocking()

    def work(rank):
        job, found = Trainer(recipe, mesh=mesh, dataset=data), []
        for _ in range(2):
            found += [job.evaluate(job.dataset) if evaluates else None, (row := job.train_step())["loss"]]
        if data is HELD and recipe.context.engine == "generated":
            operations = row["mfu"] * row["seconds"] * GPU.operations_per_second * mesh.size
            assert operations == pytest.approx(LLAMA_OPERATIONS, 1e-9)
        assert all(child.training for cell in job.cells.values() for _, child in cell.cells_and_names())
        return found

    with custom_gradients():
        first, *others = SimulatedRanks(mesh.size).run(work)
    assert all(other == first for other in others)
    return first


@pytest.mark.usefixtures("one_rank")
def test_what_changes_nothing(tmp_path, monkeypatch):
    """A loss that isn't finite, though all gradients are; and inference, of flags and MindSpore's generator."""
    job = Trainer(ONE_RANK, *SMALL, f"train_dataset.cache_dir={tmp_path}")
    expected = [each.asnumpy().copy() for each in job.optimizer.parameters]
    monkeypatch.setattr(step, "mean_loss", lambda results, form: ms.Tensor(np.inf))
    assert "the loss is inf, and the norm of all gradients " in (row := job.train_step())["not_finite"]
    assert "all gradients are finite; the weights stay" in row["not_finite"] and row["gradient_norm"] < 100
    for each, weight in zip(job.optimizer.parameters, expected, strict=True):
        np.testing.assert_array_equal(each.asnumpy(), weight)
    net, state = job.cells[0], ms.get_rng_state().asnumpy().copy()
    with inference([net]):
        ms.manual_seed(99)
        assert not net.training and (ms.get_rng_state().asnumpy() != state).any()
    assert net.training and (ms.get_rng_state().asnumpy() == state).all()


@cache
def one_card(*given, **options):
    return evaluations(*given, **options)


LAYOUTS = [  # the first one daily; at level 3 `test_the_moving_average_of_weights` evaluates, too
    parallel(pp=2, pipeline_parallel_microbatch_size=1),
    parallel(dp=2, tp=2, zero_level=3, zero_threshold_kb=0, sequence_parallel="true"),
    parallel(pp=2, dp=2, pipeline_parallel_microbatch_size=2),
    [*parallel(dp=4), "context.engine=eager"],
]


@pytest.mark.long
@pytest.mark.parametrize("layout", daily(LAYOUTS[:1], LAYOUTS), ids=" ".join)
def test_an_evaluation_is_one_cards(layout):
    """Of 11 samples with ignored labels, in passes of 4 or 8: loss to 1e-6, and the numbers of samples and labels."""
    expected, found = one_card(LLAMA, *SIZES, *parallel(), data=HELD), evaluations(LLAMA, *SIZES, *layout, data=HELD)
    for one, other in zip(expected[::2], found[::2], strict=True):
        assert one["eval_samples"] == 11 and one["eval_labels"] == sum(2 + 5 * each % 14 for each in range(11))
        np.testing.assert_allclose(list(other.values()), list(one.values()), 1e-6, err_msg=str(list(one)))
    assert found[2]["eval_loss"] < found[0]["eval_loss"]
    assert found[0]["eval_perplexity"] == np.exp(found[0]["eval_loss"])


@pytest.mark.long
def test_an_evaluation_changes_nothing():
    """Of a model with dropout whose loss is a mean: no number of training, and it drops nothing."""
    found = evaluations(OWN, *OWN_SIZES, *parallel(dp=2))
    assert found[1::2] == evaluations(OWN, *OWN_SIZES, *parallel(dp=2), evaluates=False)[1::2]
    expected = one_card(OWN, *OWN_SIZES, *parallel())
    for one, other in zip(expected[::2], found[::2], strict=True):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], 1e-6)


@pytest.mark.long
def test_the_moving_average_of_weights(tmp_path):
    """By its formula; begun on one mesh, resumed on another one, evaluated, and loaded as weights, as of one card."""
    ms.runtime.launch_blocking()
    given = [*SIZES, "training.average_decay=0.5", f"training.output_dir={tmp_path}", "training.steps=9"]
    given += ["lr_scheduler.warmup_steps=0", "evaluation.samples=8", "model.num_hidden_layers=1"]

    def averages(steps, *overrides):
        recipe = load_recipe(LLAMA, [*given, *overrides])

        def work(rank):
            job = Trainer(recipe, mesh=recipe_mesh(recipe), dataset=HELD)
            expected = [each.asnumpy().copy() for each in job.optimizer.average.averages]
            for _ in range(steps):
                job.train_step()
                pairs = zip(expected, job.optimizer.parameters, strict=True)
                expected = [0.5 * (average + weight.asnumpy()) for average, weight in pairs]
            with job.optimizer.average.in_place():
                found = job.evaluate(HELD)["eval_loss"]
            for average, one in zip(job.optimizer.average.averages, expected, strict=True):
                np.testing.assert_allclose(average.asnumpy(), one, 1e-6, 1e-8)
            job.save()
            return found, job.evaluate(HELD)["eval_loss"]

        with custom_gradients():
            found, *others = SimulatedRanks(recipe_mesh(recipe).size).run(work)
        assert all(other == found for other in others)
        return found

    one = averages(3, *parallel(), f"training.output_dir={tmp_path / 'one'}")
    assert one[0] > one[1] * 1.0001
    averages(2, *parallel(dp=2, zero_level=3, zero_threshold_kb=0))
    # it goes on with its own weights, whatever it began with
    resumed = averages(1, *parallel(tp=2), "training.resume=auto", "checkpoint.load_average=true")
    np.testing.assert_allclose(resumed, one, 1e-6)
    resuming = *parallel(), "training.resume=auto", "checkpoint.load_average=true"
    recipe = going_on(load_recipe(LLAMA, [*given, *resuming]))
    assert recipe.checkpoint.load_path and open_source(recipe).state["consumed"] == 3 * 8, "the run begins anew"
    resumed = averages(0, *parallel(), f"checkpoint.load_path={tmp_path}", "checkpoint.load_average=true")
    np.testing.assert_allclose(resumed, [one[0]] * 2, 1e-6)
