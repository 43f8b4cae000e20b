"""What a run leaves for people and tools: metrics.jsonl, loss.png, summary.txt, TensorBoard event files."""

import importlib
import json
import os
import time

from mindformers_core.files import write_whole

__all__ = ["MetricsFile", "TensorBoardFile", "draw_losses", "require_extra"]


def require_extra(module, extra, key):
    """Import `module`; `ModuleNotFoundError` that says which extra to install and which key needs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{key} needs {module.partition('.')[0]}: pip install 'mindformers_core[{extra}]', or turn {key} off"
        ) from error


class MetricsFile:
    """metrics.jsonl: one JSON object a step, written through at once.

    Args:
        folder: the run folder.
        after_step: rows of later steps, which a resumed run writes anew, are dropped.
    """

    def __init__(self, folder, after_step):
        self.path = os.path.join(folder, "metrics.jsonl")
        kept = [row for row in read_rows(self.path) if row["step"] <= after_step] if os.path.exists(self.path) else []
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row):
        """Append a dict with `step`, `loss` and other numbers."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path):
    """The rows of a metrics.jsonl file; a last line that a killed run left half written doesn't count."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


class TensorBoardFile:
    """Numbers of every step as TensorBoard event files below the run folder."""

    def __init__(self, folder):
        require_extra("tensorboard", "tensorboard", "monitor.tensorboard")
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(os.path.join(folder, "tensorboard"))

    def write(self, row):
        """Add every number of `row` but the step itself as a scalar at `row["step"]`."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in row.items() if tag != "step"]
        self._writer.add_event(
            self._event(step=row["step"], wall_time=time.time(), summary=self._summary(value=values))
        )
        self._writer.flush()


def draw_losses(folder):
    """loss.png of the folder's metrics: loss (and learning rate, thin) by step.

    Raises:
        ModuleNotFoundError: without the extra `plot`.
    """
    require_extra("matplotlib", "plot", "monitor.plot")
    from matplotlib.figure import Figure

    rows = read_rows(os.path.join(folder, "metrics.jsonl"))
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, [row["loss"] for row in rows], color="tab:blue", label="loss")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=os.path.basename(os.path.abspath(folder)))
    axes.grid(alpha=0.3)
    rates = axes.twinx()
    rates.plot(steps, [row["learning_rate"] for row in rows], color="tab:orange", linewidth=0.8, label="learning rate")
    rates.set_ylabel("learning rate")
    figure.legend(loc="upper right", bbox_to_anchor=(1, 1), bbox_transform=axes.transAxes)
    figure.savefig(os.path.join(folder, "loss.png"), dpi=120)
