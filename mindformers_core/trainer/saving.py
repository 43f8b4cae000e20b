"""After which steps a job saves, and what that costs it."""

from collections import deque

from mindformers_core.analysis.recovery import Costs, Risks, best_interval, costs_of, seconds_of, time_shown

_FIRST, _MOST = 5, 1000  # steps before the first save with auto; those whose seconds are kept
_NEWS = 1.1  # factor between intervals of which both are told


class Saving:
    """The steps that `checkpoint.save_interleaved_steps` asks to save after.

    With `auto`, after a few steps to measure, they are as far apart as `best_interval` says for the seconds of the last
    steps and save on the slowest rank. No number of the training depends on it.

    Args:
        section: the recipe's section `checkpoint`.
        ranks: the `Ranks` of the job.
        checkpointer: the `Checkpointer`.
    """

    def __init__(self, section, ranks, checkpointer):
        self._section, self._ranks, self._checkpointer = section, ranks, checkpointer
        self._is_auto, self._interval = section.save_interleaved_steps == "auto", section.save_interleaved_steps
        self._rows, self._next, self._told = deque(maxlen=_MOST), None, 0

    def is_due(self, row):
        """Whether to save after the step of a `Row`: asked after each step, with one answer on all ranks."""
        step, every = row["step"], self._section.keep_every
        if not self._is_auto:
            return step % self._interval == 0
        self._rows.append({"seconds": row["seconds"]})
        if self._next is None:
            self._next, self._interval = step + _FIRST - 1, _FIRST
        return step >= self._next or (every > 0 and step % every == 0)

    def add(self, row, folder):
        """Put the seconds of a save into the `Row`; with `auto`, all ranks agree on the next one.

        Args:
            folder: of the checkpoint, None where it wasn't saved.
        """
        if folder is not None:
            row.update(self._checkpointer.seconds)
        if not self._is_auto:
            return
        if folder is not None:
            own = costs_of([*self._rows, row])
            gathered = self._ranks.gather([own.step, own.save, own.background])
            self._agree(Costs(*map(max, zip(*gathered.values()))))
        self._next = row["step"] + self._interval

    def _agree(self, costs):
        given, mtbf = self._section.mtbf, seconds_of(self._section.mtbf, "checkpoint.mtbf")
        interval = self._interval = best_interval(costs, Risks(mtbf))
        if self._ranks.rank == 0 and not self._told / _NEWS <= interval <= self._told * _NEWS:
            self._told = interval
            print(
                f"checkpoint.save_interleaved_steps: auto: every {interval} steps, since one takes "
                f"{time_shown(costs.step)}, a save {time_shown(costs.save)}, and mtbf is {given}"
            )
