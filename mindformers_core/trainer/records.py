"""Records of a run: the run folder with metrics, a picture and event files; and printed lines."""

import importlib
import json
import math
import os
import sys
import time
from collections import UserDict
from contextlib import suppress

from mindformers_core.explaining import pictures
from mindformers_core.files import lock_folder, write_whole
from mindformers_core.hints import install_hint
from mindformers_core.recompute import write_curve
from mindformers_core.scopes import errors_at
from mindformers_core.sharding.inspecting import explain_activations
from mindformers_core.trainer.kept_programs import PROGRAMS

_BAR_WIDTH = 24
_PATIENCE = 1.0  # seconds after which a row is due


class Row(UserDict):
    """The numbers of a step by name: docs/metrics.md. A tensor is read from the device when its number is asked for."""

    def __getitem__(self, name):
        if hasattr(value := self.data[name], "asnumpy"):
            value = self.data[name] = float(value.asnumpy())
        return value


class Recorder:
    """Rows of a loop: `writers`, the file's first, get them when one is due, every `interval` steps or after a second.

    Until then nothing reads their tensors. Without writers nothing is kept but the first row and the last one.

    Attributes:
        count: number of rows.
    """

    def __init__(self, writers, interval):
        self._writers, self._interval, self.count = writers, interval, 0
        self._waiting, self._first, self._last = [], None, None
        self._started = self._written = time.perf_counter()

    def add(self, row, is_due=False):
        """Record a row, at once if it `is_due`."""
        self.count, self._first, self._last = self.count + 1, self._first or row, row
        self._waiting += [row] if self._writers else []
        if is_due or row["step"] % self._interval == 0 or time.perf_counter() > self._written + _PATIENCE:
            self.flush()

    def add_before_save(self, row):
        """Write all rows, this one as far as it is known: a job that goes on from the save begins with the next."""
        self.flush()
        for write in self._writers[:1]:  # to the file
            write(row)

    def flush(self):
        """Give the writers all rows that they haven't had."""
        while self._waiting:
            row = self._waiting.pop(0)
            for write in self._writers:
                write(row)
        self._written = time.perf_counter()

    def summary(self, trainer):
        """The line about all rows, None without any; rank 0 writes it to summary.txt, and draws the losses."""
        if not self.count:
            return None
        recipe, seconds = trainer.recipe, time.perf_counter() - self._started
        tokens = self.count * trainer.plan.samples * recipe.train_dataset.seq_length
        folder = recipe.training.output_dir
        text = (
            f"{self.count} steps on ranks {trainer.mesh} in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s; "
            f"loss {self._first['loss']:.4f} -> {self._last['loss']:.4f}; run folder {folder}"
        )
        if trainer.rank == 0:
            with record_errors(folder):
                write_whole(os.path.join(folder, "summary.txt"), text + "\n")
                if recipe.monitor.plot:
                    draw_losses(folder)
        return text


def record_errors(folder):
    """A context manager: errors name the run folder, which can't be made, or takes no more records."""
    return errors_at(f"training.output_dir: {folder}: ", kinds=OSError)


def require_extras(recipe):
    """Import the packages of `monitor.plot` and `monitor.tensorboard`, which training needs at its end only.

    Raises:
        ModuleNotFoundError: a missing package, with the extra to install and the key that needs it.
    """
    for key, extra, module in (("plot", "plot", "matplotlib"), ("tensorboard", "tensorboard", "tensorboard")):
        if getattr(recipe.monitor, key):
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    f"monitor.{key} needs {module}: {install_hint(extra)}, or turn monitor.{key} off"
                ) from error


def open_run_folder(folder, config_text, keep):
    """Make `folder`, with `config_text` as its config.yaml, and return its lock, an open file. Called on rank 0 only.

    An earlier run in this folder is never overwritten: the folder is renamed to `folder.1`, `folder.2`, …. Its kept
    programs come back: they fit, or aren't taken.

    Args:
        folder: of the run.
        config_text: the recipe in YAML.
        keep: whether this run resumes from a checkpoint in the folder, which is then not renamed.

    Raises:
        BlockingIOError: a run that goes on has it. OSError: it can't be made.
    """
    os.makedirs(folder, exist_ok=True)
    lock = lock_folder(folder)
    if os.path.exists(os.path.join(folder, "config.yaml")) and not keep:
        moved = next(name for name in map(f"{folder}.{{}}".format, range(1, 10**6)) if not os.path.exists(name))
        os.rename(folder, moved)
        os.makedirs(folder)
        with suppress(FileNotFoundError):  # they are no record of a run
            os.rename(os.path.join(moved, PROGRAMS), os.path.join(folder, PROGRAMS))
        print(f"an earlier run was moved to {moved}")
        lock.close()
        return open_run_folder(folder, config_text, keep)
    write_whole(os.path.join(folder, "config.yaml"), config_text)
    return lock


def metrics_writer(folder, after_step):
    """A function that appends a row, a dict with `step`, `loss` and other numbers, to metrics.jsonl as a JSON object.

    What isn't finite is null; the row's text `not_finite` says more. A row takes the place of the last one of its step.

    Args:
        folder: the run folder.
        after_step: rows of later steps are deleted: a resumed run writes them again.
    """
    path = os.path.join(folder, "metrics.jsonl")
    kept = [row for row in _read_rows(path) if row["step"] <= after_step] if os.path.exists(path) else []
    write_whole(path, "".join(map(_line, kept)))
    last = {}

    def write(row):
        with record_errors(folder):
            size = os.path.getsize(path)
            start = last["start"] if last.get("step") == row["step"] else size
            try:
                with open(path, "r+b") as file:
                    file.seek(start)
                    file.write(_line(row).encode())
                    file.truncate()
            except OSError:  # a part of the line is no JSON
                os.truncate(path, start)
                raise
            last.update(step=row["step"], start=start)

    return write


def _line(row):
    """A row as JSON, which has no NaN and no infinity: null."""
    plain = {key: None if isinstance(each, float) and not math.isfinite(each) else each for key, each in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _read_rows(path):
    """The rows of a metrics.jsonl file, without an incomplete last line of a killed run."""
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def tensorboard_writer(folder):
    """A function that adds the numbers of a row as scalars to TensorBoard event files below the run folder."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(os.path.join(folder, "tensorboard"))

    def write(row):
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.items() if isinstance(value, float)]
        writer.add_event(Event(step=row["step"], wall_time=time.time(), summary=Summary(value=values)))
        writer.flush()

    return write


def draw_losses(folder):
    """Draw loss.png from the metrics in the run folder: loss and learning rate by step, one above the other."""
    rows = _read_rows(os.path.join(folder, "metrics.jsonl"))
    steps, known = [row["step"] for row in rows], [row["loss"] for row in rows if row["loss"] is not None]
    words = (f"loss {known[0]:.4g} → {known[-1]:.4g}", f"lowest {min(known):.4g}") if known else ()
    curves = ("loss", "loss, nats per token", pictures.BLUE), ("learning_rate", "learning rate", pictures.YELLOW)

    def figure_of():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), dpi=150)
        place = {"left": 0.09, "right": 0.97, "top": 0.79, "bottom": 0.1, "hspace": 0.3}
        panels = figure.subplots(2, sharex=True, height_ratios=(3, 1), gridspec_kw=place)
        for axes, (key, label, colour) in zip(panels, curves):
            axes.plot(steps, [row[key] for row in rows], color=colour, linewidth=1.2, marker=".", markersize=2)
            axes.set_title(label, loc="left", fontsize=pictures.TEXT_SIZE, color=pictures.INK)
            axes.grid(color=pictures.PALE)
            axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step", fontsize=pictures.SMALL_SIZE, color=pictures.SOFT_INK)
        pictures.dress(figure, place["left"], os.path.basename(os.path.abspath(folder)), words)
        return figure

    pictures.write_picture(os.path.join(folder, "loss.png"), "png", figure_of)


def progress_writer(total, interval, stream=None):
    """A function that shows a row as text: a bar on a terminal, a line every few steps elsewhere (log files).

    A row is a dict with `step`, `loss`, `learning_rate`, `gradient_norm` and `tokens_per_second`. Where a source of the
    data begins another epoch, a line says so.

    Args:
        total: number of the last step.
        interval: steps between lines where the stream is no terminal.
        stream: default standard output.
    """
    stream, first = sys.stdout if stream is None else stream, None

    def write(row):
        nonlocal first
        step, now = row["step"], time.perf_counter()
        first = first or (step, now)
        if "epoch_begins" in row:
            stream.write("\n" * stream.isatty() + f"step {step}: {row['epoch_begins']}\n")
        seconds = round((now - first[1]) / max(1, step - first[0]) * (total - step))
        text = (
            f"step {step}/{total}  loss {row['loss']:.4f}  lr {row['learning_rate']:.3e}  "
            f"norm {row['gradient_norm']:.3f}  {row['tokens_per_second']:,.0f} tokens/s  "
        ) + (f"{seconds // 60}:{seconds % 60:02d} left" if step > first[0] else "")
        if stream.isatty():
            stream.write(f"\r[{'=' * (_BAR_WIDTH * step // total):{_BAR_WIDTH}}] {text}" + "\n" * (step == total))
        elif step % interval == 0 or step in (1, total):
            stream.write(text + "\n")
        stream.flush()

    return write


def report_activations(recipe, mesh, rank, cells):
    """Print the recomputed and swapped operators of this rank's `cells`, by number of their stage.

    Under a budget the curve of memory against recomputed time is drawn into the run folder. Called on all ranks
    after the first step, when there are programs; the first rank of every stage prints. Without recompute and swap
    nothing is printed.
    """
    if any(mesh.coordinate(rank, tuple(axis for axis in mesh.axis_names if axis != "pp"))):
        return
    is_whole = recipe.parallelism.pipeline_parallel == 1
    for stage, cell in cells.items():
        if recipe.recompute.budget is None:
            text = "\n  ".join(explain_activations(cell))
        else:
            name = "recompute_curve.svg" if is_whole else f"recompute_curve_stage_{stage}.svg"
            path = os.path.join(recipe.training.output_dir, name)
            text = f"{write_curve(cell, path)}\n  what memory costs: {path}"
        if text:
            print(text if is_whole else f"stage {stage}: {text}")
