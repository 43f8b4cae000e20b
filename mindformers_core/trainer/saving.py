"""After which steps a job saves, and what that costs it."""

from collections import deque

from mindformers_core.analysis.recovery import Job, best_interval, costs_of, seconds_of
from mindformers_core.hints import seconds_shown

_FIRST, _MOST = 5, 1000  # steps before the first save with auto; those whose seconds are kept
_NEWS = 1.5  # factor between intervals of which both are told


class Saving:
    """The steps that `checkpoint.save_interleaved_steps` asks to save after.

    With `auto`, after a few steps to measure, they are as far apart as `best_interval` says for the seconds of the last
    steps and save on the slowest rank. No number of the training depends on it. `section`: that of the recipe.
    """

    def __init__(self, section, ranks, checkpointer):
        self._section, self._ranks, self._checkpointer = section, ranks, checkpointer
        self._is_auto = section.save_interleaved_steps == "auto"
        self._interval = _FIRST if self._is_auto else section.save_interleaved_steps
        self._rows, self._next, self._told = deque(maxlen=_MOST), None, 0

    def is_due(self, row):
        """Whether to save after the step of a `Row`: asked after each step, with one answer on all ranks."""
        step, every = row["step"], self._section.keep_every
        if not self._is_auto:
            return step % self._interval == 0
        self._next = self._next or step + _FIRST - 1
        self._rows.append({"seconds": row["seconds"]})
        return step >= self._next or (every > 0 and step % every == 0)

    def add(self, row, folder):
        """Put the seconds of a save into the `Row`; with `auto`, all ranks agree on the next one.

        `folder`: of the checkpoint, None where it wasn't saved.
        """
        if folder is not None:
            row.update(self._checkpointer.seconds)
            if self._is_auto:
                self._agree(costs_of([*self._rows, row]))
        self._next = row["step"] + self._interval

    def _agree(self, own):
        gathered, mtbf = self._ranks.gather(own).values(), self._section.mtbf
        costs = {name: max(each[name] for each in gathered) for name in own}
        self._interval = best_interval(Job(seconds_of(mtbf), **costs))
        if self._ranks.rank == 0 and not self._told / _NEWS <= self._interval <= self._told * _NEWS:
            self._told, step, save = self._interval, seconds_shown(costs["step"]), seconds_shown(costs["save"])
            text = f"every {self._interval} steps, since one takes {step}, a save {save}, and mtbf is {mtbf}"
            print(f"checkpoint.save_interleaved_steps: auto: {text}")
