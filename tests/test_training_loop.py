"""The training loop on one process: accumulation, resuming, clipping, AdamW, records, the command line's errors."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore.graph import api as graph_api
from safetensors.numpy import load_file
from support.nightly import daily

from mindformers_core.commands.command_line import main
from mindformers_core.commands.compare import largest_difference, read_losses
from mindformers_core.optimizers.grouped import GroupedOptimizer
from mindformers_core.optimizers.settings import AdamWSettings
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.sharding.inspecting import programs
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm, clip_by_global_norm
from mindformers_core.trainer import records, trainer
from mindformers_core.trainer.records import progress_writer
from mindformers_core.trainer.trainer import Trainer

ONE_RANK = str(Path(__file__).parent.parent / "configs" / "llama_tiny_cpu_1p.yaml")
SMALL = (
    "training.steps=6", "training.local_batch_size=4", "training.global_batch_size=4", "train_dataset.seq_length=16",
    "train_dataset.max_bytes=20000", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1",
    "lr_scheduler.warmup_steps=2", "monitor.plot=false",
)  # fmt: skip
SCALED = ["precision.compute=float16", "precision.loss_scale=1048576"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(name, *overrides)`: train the small recipe into `tmp_path/name`; returns `{step: loss}` and the summary."""
    for variable in ("MS_ROLE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(variable, raising=False)

    def train(name, *overrides):
        places = (f"training.output_dir={tmp_path / name}", f"train_dataset.cache_dir={tmp_path / 'cache'}")
        summary = Trainer(load_recipe(ONE_RANK, [*SMALL, *places, *overrides])).run()
        return read_losses(str(tmp_path / name)), summary

    return train


def test_run_leaves_metrics_config_picture_and_summary(run, tmp_path):
    losses, summary = run("a", "monitor.plot=true")
    folder = tmp_path / "a"
    known = [".lock", "config.yaml", "loss.png", "metrics.jsonl", "programs", "summary.txt"]
    assert sorted(os.listdir(folder)) == known
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert abs(losses[1] - np.log(256)) < 0.1 and losses[6] < losses[1]
    assert (folder / "summary.txt").read_text().strip() == summary
    assert summary.startswith("6 steps on ranks (pp=1, dp=1, cp=1, tp=1) in ")
    assert load_recipe(str(folder / "config.yaml")).training.steps == 6
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    times = {"seconds", "data_seconds", "wait_seconds", "tokens_per_second"}
    assert row.keys() == {"step", "loss", "learning_rate", "gradient_norm", "epoch"} | times
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def rows_of(folder):
    """All rows of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved_tensors(folder):
    """All tensors of a run's checkpoint after two steps, of weights and moments, by name."""
    paths = (folder / "checkpoint/step_2").rglob("*.safetensors")
    return {name: array for path in paths for name, array in load_file(path).items()}


@pytest.mark.ranks
def test_micro_batches_do_not_change_the_curve(run, tmp_path):
    short = "training.steps=3"
    whole, _ = run("whole", short)
    split, _ = run("split", short, "training.local_batch_size=2")
    assert largest_difference(whole, split)[0] < 1e-5
    norms = [[row["gradient_norm"] for row in rows_of(tmp_path / name)] for name in ("whole", "split")]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    other, _ = run("other", short, "training.seed=43")
    assert largest_difference(whole, other)[0] > 1e-4


@pytest.mark.ranks
def test_engines_and_graph_mode_give_the_same_curve(run, tmp_path):
    """With two micro-batches: losses, norms, and (through a checkpoint) parameters and moments."""
    batches = "training.local_batch_size=2", "training.steps=2", "checkpoint.enable_save=true"
    run("eager", "context.engine=eager", *batches)
    expected = rows_of(tmp_path / "eager")
    state = saved_tensors(tmp_path / "eager")
    for name, overrides in (("generated", ()), ("compiled", ("context.mode=0",))):
        run(name, *batches, *overrides)
        for row, one in zip(rows_of(tmp_path / name), expected, strict=True):
            for key in ("step", "loss", "gradient_norm", "learning_rate"):
                np.testing.assert_allclose(row[key], one[key], rtol=1e-6, err_msg=f"{key} of {name}")
        found = saved_tensors(tmp_path / name)
        assert found.keys() == state.keys()
        for tensor in found:
            np.testing.assert_allclose(found[tensor], state[tensor], 1e-4, 1e-6, err_msg=f"{tensor} of {name}")


@pytest.mark.parametrize("engine", ["generated", "eager"])
def test_the_engine_is_the_recipes(run, engine, tmp_path):
    overrides = (f"context.engine={engine}", f"train_dataset.cache_dir={tmp_path}")
    job = Trainer(load_recipe(ONE_RANK, [*SMALL, *overrides]))
    job.train_step()
    assert len(programs(job.cells[0])) == (engine == "generated")


@pytest.mark.long
def test_a_step_is_compiled_once(run, monkeypatch):
    """Neither what changes from step to step nor reading the loss compiles it again; nor does an evaluation."""
    compiled = []
    check = graph_api._check_recompile
    monkeypatch.setattr(graph_api, "_check_recompile", lambda *args: (compiled.append(args[3]), check(*args)))
    held = "evaluation.interval=4", "evaluation.dataset={max_bytes: 2000}", "training.steps=4"
    run("a", "context.mode=0", "lr_scheduler.warmup_steps=3", "training.local_batch_size=2", *held)
    passes, norm, update = compiled  # forward and backward; the norm, which Python looks at; clipping and update
    assert "stage_function" in passes and "norm_of" in norm and "update" in update


@pytest.mark.ranks
@pytest.mark.parametrize("scaled", daily([SCALED, []], [SCALED, [], ["context.mode=0"]]))
def test_resumed_run_is_the_unbroken_run(run, tmp_path, scaled):
    blocks = "model.heterogeneous_block_specs=[{intermediate_size: 48}]"  # a tuple in the config, a list in the file
    saving = "checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=3", blocks
    saving = *saving, *scaled
    unbroken, _ = run("broken", *saving)
    source = tmp_path / "broken" / "checkpoint" / "step_3"
    assert sorted(os.listdir(source.parent)) == ["step_3", "step_6"]
    resumed, summary = run("new" if scaled == SCALED else "broken", f"checkpoint.load_path={source}", *saving)
    assert summary.startswith("3 steps")
    assert resumed == {step: loss for step, loss in unbroken.items() if scaled != SCALED or step > 3}
    for name in ("broken", "new") if scaled == SCALED else ():
        assert [row["skipped"] for row in rows_of(tmp_path / name)[-3:]] == [4, 5, 6]


def test_checkpoint_that_does_not_fit_is_an_error(run, tmp_path):
    run("a", "checkpoint.enable_save=true")
    with pytest.raises(ValueError, match=r"training.steps: 6, but .*step_6 already has 6 steps"):
        run("b", f"checkpoint.load_path={tmp_path / 'a'}")
    config = r"checkpoint.load_path: .*step_6/config.json has num_hidden_layers 1, but model.num_hidden_layers is 2"
    with pytest.raises(ValueError, match=config):
        run("b", f"checkpoint.load_path={tmp_path / 'a'}", "training.steps=7", "model.num_hidden_layers=2")
    with pytest.raises(FileNotFoundError, match=r"checkpoint.load_path: '.*nowhere' is neither"):
        run("b", f"checkpoint.load_path={tmp_path / 'nowhere'}")
    state = tmp_path / "a" / "checkpoint" / "step_6" / "state.json"
    state.write_text(state.read_text().replace('"step": 6', '"step": 5'))
    with pytest.raises(ValueError, match=r"checkpoint.load_path: .*state.json is damaged"):
        run("b", f"checkpoint.load_path={tmp_path / 'a'}", "training.steps=7")


@pytest.mark.parametrize("on_error", ["end", "go_on"])
def test_a_checkpoint_that_cannot_be_saved(run, tmp_path, capsys, on_error):
    """One line, and the run ends or goes on, as the recipe says."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/checkpoint").touch()
    overrides = ["training.steps=2", "checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=1"]
    overrides += [f"training.output_dir={tmp_path / 'a'}", f"train_dataset.cache_dir={tmp_path / 'cache'}"]
    code = main(["train", "--config", ONE_RANK, *SMALL, *overrides, f"checkpoint.on_error={on_error}"])
    captured = capsys.readouterr()
    lines = captured.err.splitlines() if on_error == "end" else captured.out.splitlines()
    said = [
        line for line in lines if re.match(r"(error|warning): the checkpoint .*step_1 can't be saved: .*'.*'", line)
    ]
    assert len(said) == 1 and said[0].startswith("error" if on_error == "end" else "warning")
    assert code == (2 if on_error == "end" else 0)
    assert list(read_losses(str(tmp_path / "a"))) == ([1] if on_error == "end" else [1, 2])


def test_earlier_run_is_moved_aside(run, tmp_path, capsys):
    first, _ = run("a")
    second, _ = run("a", "training.seed=7")
    assert first != second and read_losses(str(tmp_path / "a.1")) == first
    assert f"an earlier run was moved to {tmp_path / 'a.1'}" in capsys.readouterr().out


def test_gradients_that_are_no_numbers_end_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "learning_rate", lambda recipe, step, samples: 1e36)
    with pytest.raises(FloatingPointError, match=r"at step 2 \(samples 4 to 7\) .* 11 weights have gradients th"):
        run("a", "training.max_norm=0")
    assert (tmp_path / "a" / "metrics.jsonl").exists()


def fail_with(error):
    """A function that raises `error`."""

    def fail(*_):
        raise error

    return fail


def random_parameters(generator, names):
    return [ms.Parameter(ms.Tensor(generator.normal(size=(3, 4)).astype(np.float32)), name=name) for name in names]


def compiled_clipping(parameters, max_norm):
    """A compiled function of gradients."""
    clip = ClipByGlobalNorm(parameters, max_norm)

    @ms.jit
    def run(one, other):
        return clip((one, other))

    return run


def test_clipping_scales_all_by_one_factor():
    generator = np.random.default_rng(0)
    parameters = random_parameters(generator, ["a", "b"])
    gradients = [generator.normal(size=(3, 4)).astype(np.float32) for _ in parameters]
    expected = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
    for max_norm, factor in ((0.5, 0.5 / expected), (100.0, 1.0), (0, 1.0)):
        clipped, norm = clip_by_global_norm([ms.Tensor(gradient) for gradient in gradients], parameters, max_norm)
        assert float(norm.asnumpy()) == pytest.approx(expected, rel=1e-6)
        for one, other in zip(clipped, gradients, strict=True):
            np.testing.assert_allclose(one.asnumpy(), other * factor, rtol=1e-5)
        same, again = compiled_clipping(parameters, max_norm)(*map(ms.Tensor, gradients))
        assert float(again.asnumpy()) == pytest.approx(expected, rel=1e-6)
        for one, other in zip(same, clipped, strict=True):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=1e-6)
    zero, norm = clip_by_global_norm([ms.ops.zeros((3, 4), ms.float32)], parameters[:1], 1.0)
    assert float(norm.asnumpy()) == 0 and (zero[0].asnumpy() == 0).all()


def test_adamw_is_the_papers():
    generator = np.random.default_rng(0)
    parameters = [*random_parameters(generator, ["weight", "norm"]), ms.Parameter(ms.ops.ones(4), name="ln1.gamma")]
    section = AdamWSettings(betas=(0.9, 0.99), eps=1e-3, weight_decay=0.3, weight_decay_exclude=("norm",))
    optimizer = GroupedOptimizer(parameters, section)
    values = [parameter.asnumpy().astype(np.float64) for parameter in parameters]
    first, second = [0.0] * 3, [0.0] * 3
    for step in range(1, 6):
        rate = 0.01 * step
        gradients = [generator.normal(size=each.shape).astype(np.float32) for each in parameters]
        optimizer(tuple(map(ms.Tensor, gradients)), *optimizer.scalars(step, rate))
        for index, gradient in enumerate(gradients):
            first[index] = 0.9 * first[index] + 0.1 * gradient
            second[index] = 0.99 * second[index] + 0.01 * gradient**2
            values[index] *= 1 - rate * (0.3 if index == 0 else 0.0)
            corrected = np.sqrt(second[index] / (1 - 0.99**step)) + 1e-3
            values[index] -= rate * first[index] / (1 - 0.9**step) / corrected
    for parameter, value in zip(parameters, values, strict=True):
        np.testing.assert_allclose(parameter.asnumpy(), value, rtol=1e-5, atol=1e-6)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        """True."""
        return True


@pytest.mark.parametrize("stream, lines, returns", [(io.StringIO, 3, 0), (Terminal, 1, 20)])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(stream, lines, returns):
    shown = stream()
    write = progress_writer(20, 10, shown)
    numbers = {"loss": 2.0, "learning_rate": 1e-3, "gradient_norm": 0.5, "tokens_per_second": 1e4}
    for step in range(1, 21):
        write({"step": step, **numbers})
    assert shown.getvalue().count("\n") == lines and shown.getvalue().count("\r") == returns
    assert "step 20/20  loss 2.0000" in shown.getvalue()


def test_missing_extra_is_told_before_the_first_step(run, monkeypatch):
    monkeypatch.setattr(records.importlib, "import_module", fail_with(ModuleNotFoundError("no such module")))
    with pytest.raises(ModuleNotFoundError, match=r"monitor.plot needs matplotlib: pip install -e '/.*\[plot\]'"):
        run("a", "monitor.plot=true")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallelism.data_parallel_shard=2"], "needs 2 ranks, but 1 was launched"),
        (["train_dataset.data_path=nowhere.txt"], "train_dataset.data_path: there is no file or folder 'nowhere.txt'"),
        (["training.stps=1"], "training.stps: unknown key (did you mean 'steps'?)"),
    ],
)
def test_command_line_errors(run, capsys, overrides, message):
    assert main(["train", "--config", ONE_RANK, *overrides]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["mindspore", "yaml"])
def test_missing_dependency_is_told_in_a_line(tmp_path, missing):
    """In a Python that has not installed us; `None` in sys.modules is a module that can't be found."""
    code = f"import sys; sys.modules['{missing}'] = None; from mindformers_core.__main__ import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(Path(ONE_RANK).parent.parent)}
    command = [sys.executable, "-c", code, "train", "--config", ONE_RANK]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {missing} is not installed in {sys.executable}: ")
    assert "run bash scripts/quickstart.sh, or pip install ." in done.stderr and done.stderr.count("\n") == 1


def test_other_errors_keep_their_traceback(run, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "train_step", fail_with(ValueError("inside a step")))
    with pytest.raises(ValueError, match="inside a step"):
        run("a")


RECOMPUTED = {
    "full": ["recompute=true"],
    "both": ["recompute.select=[layers.1.mlp]", "swap.layer_swap=[{layers: [0], backward_prefetch: 2}]"],
    "budget": ["recompute.budget=0.6"],
}


@pytest.mark.ranks
def test_recomputed_and_swapped_runs_give_the_same_curve(run, tmp_path, capsys):
    """To the last bit; and the recipe that the run leaves says the same. A choice within a budget is told and drawn."""
    short = "training.steps=3", "model.num_hidden_layers=2"
    plain, _ = run("plain", *short)
    for name, overrides in RECOMPUTED.items():
        found, _ = run(name, *short, *overrides)
        assert found == plain, name
        saved = load_recipe(str(tmp_path / name / "config.yaml"))
        given = load_recipe(ONE_RANK, [*SMALL, *short, *overrides])
        assert (saved.recompute, saved.swap) == (given.recompute, given.swap)
        assert saved.recompute.is_on
        picture = tmp_path / name / "recompute_curve.svg"
        assert picture.exists() == (name == "budget")
    said = capsys.readouterr().out
    told = re.search(
        r"^recompute, budget 0.6: (.*) of (.*) of saved activations stay .*, \d+\.\d % of the forward", said, re.M
    )
    assert f"chosen: {told[1]} of {told[2]} stay" in picture.read_text()
    assert said.count(f"what memory costs: {picture}") == 1
