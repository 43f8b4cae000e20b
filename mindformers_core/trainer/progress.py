"""Progress of a run as text: a bar where there is a terminal, a line every few steps elsewhere (log files)."""

import sys
import time

__all__ = ["Progress"]

_BAR_WIDTH = 24


class Progress:
    """Shows steps on a stream.

    Args:
        total: the last step.
        interval: steps between lines where the stream is no terminal.
        stream: default standard output.
    """

    def __init__(self, total, interval, stream=None):
        self.total = total
        self.interval = interval
        self.stream = sys.stdout if stream is None else stream
        self.started = None

    def show(self, row):
        """Show the metrics of a step: `step`, `loss`, `learning_rate`, `gradient_norm`, `tokens_per_second`."""
        step = row["step"]
        if self.started is None:
            self.started = (step, time.perf_counter())
        text = (
            f"step {step}/{self.total}  loss {row['loss']:.4f}  lr {row['learning_rate']:.3e}  "
            f"norm {row['gradient_norm']:.3f}  {row['tokens_per_second']:,.0f} tokens/s  {self._remaining(step)}"
        )
        if self.stream.isatty():
            done = _BAR_WIDTH * step // self.total
            self.stream.write(f"\r[{'=' * done}{' ' * (_BAR_WIDTH - done)}] {text}" + "\n" * (step == self.total))
        elif step % self.interval == 0 or step in (1, self.total):
            self.stream.write(text + "\n")
        self.stream.flush()

    def _remaining(self, step):
        first, since = self.started
        if step == first:
            return ""
        seconds = round((time.perf_counter() - since) / (step - first) * (self.total - step))
        return f"{seconds // 60}:{seconds % 60:02d} left"
