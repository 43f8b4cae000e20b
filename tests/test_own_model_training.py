"""Training of a model and with data of one's own: what isn't finite is never applied nor saved; mistakes are named."""

import json
import os
import re
import resource
from collections import Counter
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import matplotlib
import mindspore as ms
import numpy as np
import pytest
from matplotlib.image import imread
from mindspore import nn, ops

from mindformers_core.checkpoint import inspection
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.commands.command_line import main
from mindformers_core.commands.compare import read_losses
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.communication.world import process_state
from mindformers_core.data.datasets import open_dataset
from mindformers_core.explaining.pictures import BLUE, YELLOW
from mindformers_core.files import lock_folder
from mindformers_core.hints import columns
from mindformers_core.layout import layout
from mindformers_core.models import LayerRange, ModelSpec
from mindformers_core.operators import tensor_meta
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import TrainDataset
from mindformers_core.scopes import errors_at, origin_of
from mindformers_core.sharding.initialize import materialize
from mindformers_core.trainer import trainer
from mindformers_core.trainer.records import draw_losses, metrics_writer

BASE = """
training: {steps: 4, local_batch_size: 4, seed: 1}
parallelism: {data_parallel_shard: 1, zero_threshold_kb: 0}
lr_scheduler: {learning_rate: 1.0e-2, type: ConstantWarmUpLR}
train_dataset: {factory: "test_own_model_training:open_data", seq_length: 1}
model: {name: "test_own_model_training:LENGTHS"}
checkpoint: {enable_save: true, save_interleaved_steps: 1, keep_last: 1}
monitor: {plot: false}
"""


@dataclass(frozen=True)
class Config:
    """Of both models."""

    num_hidden_layers: int = 2
    result: str = ""
    note: str = ""


class Lengths(nn.Cell):
    """The length of a vector of zeros is 0, and its gradient isn't finite."""

    config_class = Config

    def __init__(self, config, layers=None):
        super().__init__()
        layers = layers or LayerRange(0, config.num_hidden_layers)
        numbers = range(layers.offset, layers.offset + layers.count)
        self.blocks = nn.CellDict([(str(number), nn.Dense(8, 8, has_bias=False)) for number in numbers])
        self.is_last, self.result = layers.is_last, config.result

    def shard(self, config):
        batch = layout(config.batch_axes, ...)
        return {"x": batch, "y": batch}, None if self.is_last else batch, None

    def construct(self, x, y):
        for block in self.blocks.values():
            x = block(x)
        if not self.is_last:
            return x
        lengths = ops.sqrt(ops.square(x).sum(-1))
        loss = (lengths / lengths if self.result == "nan" else ops.square(lengths - y)).mean()
        return {"vector": lengths, "dict": {"loss": loss}, "pair": (loss, lengths)}.get(self.result, loss)


LENGTHS = ModelSpec(
    Lengths, Config, inputs=("x", "y"), boundary=lambda config, batch, length: tensor_meta((batch, 8), "float32")
)


class Data:
    """Random samples; that of index `zero` is of zeros."""

    def __init__(self, zero=-1, change="x, y"):
        self.zero, self.change = zero, change

    def batch(self, first, count):
        draws = [np.random.default_rng(number).standard_normal(8) for number in range(first, first + count)]
        x = np.stack([draw * (number != self.zero) for number, draw in enumerate(draws, first)]).astype(np.float32)
        if self.change == "end" and first:
            raise StopIteration
        return eval(
            self.change.replace("end", "x, y"), {"x": x, "y": np.abs(x[:, 0]), "Tensor": ms.Tensor, "first": first}
        )


def open_data(section, config, seed):
    return Data(**section.options)


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "own.yaml").write_text(BASE)
    return str(tmp_path / "own.yaml")


COMPILED = ("training.max_norm=0", "context.mode=0", "checkpoint.async_save=true")


@pytest.mark.long
@pytest.mark.parametrize(("loss", "overrides"), [("0.1", ()), ("0.1", COMPILED), ("nan", ("model.result=nan",))])
def test_a_gradient_that_is_not_finite_ends_the_run(recipe, tmp_path, capfd, loss, overrides):
    """With a finite loss or not; the healthy checkpoint stays, and metrics are JSON that readers read."""
    folder = tmp_path / "run"
    overrides = ["train_dataset.options={zero: 13}", f"training.output_dir={folder}", *overrides]
    assert main(["train", "--config", recipe, *overrides]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: at step 4 (samples 12 to 15) the loss is " + loss)
    assert "the norm of all gradients nan: 2 weights have gradients that aren't finite, in the order of" in error
    assert error.endswith("pass blocks.1.weight, blocks.0.weight; the weights stay as they were after step 3")
    assert os.listdir(folder / "checkpoint") == ["step_3"]
    check_checksums(open_checkpoint(str(folder / "checkpoint/step_3")))

    def refuse(constant):
        raise AssertionError(constant)

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows[3]["gradient_norm"] is None and f"error: {rows[3]['not_finite']}" == error
    assert (rows[3]["loss"] is None) == (loss == "nan") == np.isnan(read_losses(str(folder))[4])
    with matplotlib.rc_context({"axes.facecolor": "black"}):
        draw_losses(str(folder))
    shown = Counter(map(tuple, np.round(255 * imread(folder / "loss.png")[..., :3]).reshape(-1, 3).astype(int)))
    assert shown.most_common(1)[0][0] == (255, 255, 255) and not shown[0, 0, 0]
    assert {tuple(bytes.fromhex(colour[1:])) for colour in (BLUE, YELLOW)} <= set(shown)


MESHES = {
    "dp 2": ("parallelism.data_parallel_shard=2",),
    "level 1": ("parallelism.data_parallel_shard=2", "parallelism.zero_level=1"),
    "level 2": ("parallelism.data_parallel_shard=2", "parallelism.zero_level=2", "training.max_norm=0"),
    "level 3": ("parallelism.data_parallel_shard=2", "parallelism.zero_level=3"),
    "pp 2": ("parallelism.pipeline_parallel=2", "parallelism.pipeline_parallel_microbatch_size=2"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_agree_that_nothing_is_updated(recipe, mesh):
    """The sample of zeros is rank 1's, or in the second micro-batch; every rank keeps every weight and moment."""
    jobs, before = [], []

    def prepare(job):
        jobs.append(job)
        before.append([(tensor, tensor.asnumpy().copy()) for tensor in job.optimizer.get_parameters()])

    overrides = *MESHES[mesh], "training.steps=1", "train_dataset.options={zero: 3}", "training.global_batch_size=8"
    local = "training.local_batch_size=2" if "dp" in mesh or "level" in mesh else "training.local_batch_size=4"
    rows = run_simulated(load_recipe(recipe, [*overrides, local]), 1, prepare)
    assert len(rows) == 2 and len({row["not_finite"] for (row,) in rows}) == 1
    assert (
        "2 weights have gradients that aren't finite, in the order of the backward pass blocks.1.weight, "
        in (rows[0][0]["not_finite"])
    )
    assert all(each.decay for job in jobs for each in job.optimizer.placed)
    for tensor, values in (pair for own in before for pair in own):
        np.testing.assert_array_equal(tensor.asnumpy(), values, err_msg=tensor.name)


@pytest.mark.parametrize("beside", ["true", "false"])
def test_weights_that_are_not_finite_are_not_saved(recipe, tmp_path, monkeypatch, capfd, beside):
    """With a finite loss and gradient: the update overflows. What another process is still writing is completed."""
    monkeypatch.setattr(trainer, "learning_rate", lambda recipe, step, samples: 1e39 if step == 3 else 1e-2)
    options = f"training.output_dir={tmp_path / 'run'}", f"checkpoint.async_save={beside}"
    assert main(["train", "--config", recipe, *options]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "error: blocks.0.weight, blocks.1.weight: not finite after step 3, which is not saved"
    assert os.listdir(tmp_path / "run/checkpoint") == ["step_2"]


def test_two_runs_in_one_folder(recipe, tmp_path, monkeypatch, capfd):
    """The second one is an error, and changes nothing; after the first one it moves that aside."""
    command = ["train", "--config", recipe, f"training.output_dir={tmp_path / 'run'}"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").touch()
    with lock_folder(tmp_path / "run"):
        assert main(command) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: training.output_dir: {tmp_path}/run: another run has this folder, and goes on")
        assert sorted(os.listdir(tmp_path)) == ["own.yaml", "run"] and not (tmp_path / "run/metrics.jsonl").exists()
    monkeypatch.setattr(process_state(), "observer", process_state().observer)  # of this process, restored at the end
    assert main([*command, "monitor.digests=true"]) == 0 and (tmp_path / "run.1/config.yaml").exists()
    assert (tmp_path / "run/digests").exists()


def test_a_folder_that_takes_no_records(recipe, tmp_path, capfd):
    """One that can't be made; and a full disk, which leaves whole lines of metrics."""
    (tmp_path / "file").touch()
    assert main(["train", "--config", recipe, f"training.output_dir={tmp_path / 'file/run'}"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: training.output_dir: {tmp_path}/file/run: [Errno 20] Not a directory")
    write, limits = metrics_writer(str(tmp_path), after_step=0), resource.getrlimit(resource.RLIMIT_FSIZE)
    write({"step": 1, "loss": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"training.output_dir: {tmp_path}: .*File too large"):
            write({"step": 2, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


def test_what_may_differ_where_a_checkpoint_is_loaded(recipe, tmp_path, capfd):
    """Keys that change no tensor, which a line tells; not the seed, nor what changes tensors."""
    command = ["train", "--config", recipe, "checkpoint.keep_last=0"]
    assert main([*command, f"training.output_dir={tmp_path / 'a'}", "training.steps=2"]) == 0
    command += [f"checkpoint.load_path={tmp_path / 'a'}", f"training.output_dir={tmp_path / 'b'}"]
    loaded = f"loaded {tmp_path}/a/checkpoint/step_2: "
    for key, said in (
        ("model.note=x", "all, of step 2; sample 8 of the data is next; other than there: model.note 'x', not '', "),
        ("checkpoint.no_load_optim=true", "weights only; other than there: training.steps 4, not 2"),
    ):
        assert main([*command, key]) == 0
        assert any(line.startswith(loaded + said) for line in capfd.readouterr().out.splitlines())
    for key, error in (
        (
            "train_dataset.seed=3",
            r"train_dataset: .*/step_2: the data aren't those of the run that goes on: seed is 3, was 1: take",
        ),
        ("training.seed=3", r"training.seed: 3, but the run of .*/step_2 has 1, and its draws go on: take th"),
        ("model.num_hidden_layers=3", r".*has no model tensor 'blocks.2.weight' .*model.num_hidden_layers 3, not 2"),
    ):
        assert main([*command, key]) == 2
        assert re.match(f"error: {error}", capfd.readouterr().err.splitlines()[-1])


def test_what_decays(recipe, tmp_path, capfd):
    """The run and the dry run say it."""
    for options in (["--dry-run", "context.mode=0"], ["training.steps=1"]):
        assert main(["train", "--config", recipe, f"training.output_dir={tmp_path / 'run'}", *options]) == 0
        said = capfd.readouterr().out
        assert "\ndecay 0.01  2 weights: blocks.*.weight\nno decay    0 weights: \n" in said
        assert ("\nmemory      more than below: in graph mode MindSpore keeps" in said) == ("--dry-run" in options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("end", "batch(4, 4) .* of 4 rows, from a stream that doesn't end: it raised StopIteration"),
        ("x[1:], y", "it returned arrays of [0-3], [1-4] rows"),
        ("x, y.sum()", "it returned a tuple of float32, ndarray"),
        ("x", "it returned a ndarray"),
        ("{'x': x}", "it returned a dict"),
        ("Tensor(x), Tensor(y)", "it returned a tuple of Tensor"),
    ],
)
def test_data_that_are_no_batch(recipe, tmp_path, capfd, change, said):
    options = f"train_dataset.options={json.dumps({'change': change})}"
    assert main(["train", "--config", recipe, options, f"training.output_dir={tmp_path / 'run'}"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: test_own_model_training:open_data: batch(")
    assert re.search(said.replace("(", "\\(").replace(")", "\\)"), error), error


@pytest.mark.parametrize("result", ["vector", "dict", "pair"])
def test_results_of_a_model(recipe, tmp_path, capfd, result):
    """The loss, alone or first; others are an error that names the line of `construct`."""
    command = ["train", "--config", recipe, f"model.result={result}", f"training.output_dir={tmp_path / 'run'}"]
    assert main(command) == (0 if result == "pair" else 2)
    if result != "pair":
        error = capfd.readouterr().err.splitlines()[-1]
        line = Lengths.construct.__code__.co_firstlineno
        assert error.startswith(f"error: model.name: test_own_model_training:LENGTHS: construct ({__file__}:{line}) ")
        assert error.endswith("it returns a dict" if result == "dict" else "it returns a tensor of shape (4,)")


def test_a_spec_of_something_else():
    with pytest.raises(TypeError, match=r"ModelSpec.tied: \('a',\) should be a function, as tied=lambda config: …"):
        ModelSpec(Lengths, Config, tied=("a",))
    with ms.DeviceCtx("meta"):
        net = nn.CellList([nn.Dense(2, 2)])
        net[0].table = ms.Parameter(ms.Tensor(np.arange(8)), name="table")
    with pytest.raises(ValueError, match=r"0.table: parameter 'table' of Dense \(.*basic.py:\d+\), shape \(8,\), is"):
        materialize(net, 0)


def test_ends_of_commands(tmp_path, monkeypatch, capfd):
    """Interrupted, or no longer read, is no traceback; an error has one if that is asked for, and where none of ours
    has raised it; then it is a defect.
    """
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    for error, code in ((KeyboardInterrupt, 130), (BrokenPipeError, 141)):
        monkeypatch.setattr(inspection, "inspect", partial(_raise, error))
        assert main(["inspect", str(tmp_path)]) == code
        assert capfd.readouterr().err == ("interrupted\n" if code == 130 else "")
    monkeypatch.setattr(inspection, "inspect", partial(_raise, ValueError))
    for debug in ("", "1"):
        monkeypatch.setenv("MINDFORMERS_DEBUG", debug)
        assert main(["inspect", str(tmp_path)]) == 2
        assert ("in _raise" in capfd.readouterr().err) == (debug == "1")
    monkeypatch.setenv("MINDFORMERS_DEBUG", "")
    broken = SimpleNamespace(folder="", pieces={1: 5}, tensors={})
    defect = "error: not foreseen by mindformers_core: TypeError: object of type 'int' has no len()"
    for wrong, code, said in (
        (lambda path: {}[1], 2, "error: KeyError: 1"),  # in the user's code
        (lambda path: broken, 70, defect),
    ):
        monkeypatch.setattr(inspection, "find_checkpoint", lambda path: path)
        monkeypatch.setattr(inspection, "open_checkpoint", wrong)
        assert main(["check", str(tmp_path)]) == code
        *trace, last = capfd.readouterr().err.splitlines()
        assert last.startswith(said) and trace[0].startswith("Traceback")
    with pytest.raises(TypeError, match="^there: ") as defect, errors_at("there: "):
        columns([1])  # fails within
    with pytest.raises(ValueError, match="^here: ") as mistake, errors_at("here: "):
        int("x")
    assert [origin_of(each.value) for each in (defect, mistake)] == ["package", "raise"]


def _raise(error, *_):
    raise error


def test_no_place_for_the_bytes_of_texts(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder in (f"{tmp_path}/file/cache", "~nobody_here/cache"):
        section = TrainDataset(data_path=(__file__,), cache_dir=folder)
        with pytest.raises(OSError, match=f"^train_dataset.data_path: .*_dir {folder} can't get the tokens: "):
            open_dataset(section, SimpleNamespace(vocab_size=256), 1, {})
