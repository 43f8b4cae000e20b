"""After which steps a job saves, and what that costs it."""

from collections import deque

from mindformers_core.analysis.recovery import Job, best_interval, costs_of, seconds_of
from mindformers_core.hints import seconds_shown

_FIRST, _MOST = 5, 1000  # steps before the first save with auto; those whose seconds are kept
_NEWS = 1.5  # factor between intervals of which both are told


class Saving:
    """The steps that `checkpoint.save_interleaved_steps` asks to save after.

    With `auto`, after a few steps to measure, they are as far apart as `best_interval` says for the seconds of the last
    steps and save on the slowest rank. No number of the training depends on it.

    Args:
        section: the recipe's section `checkpoint`.
        ranks: the `Ranks` of the job.
    """

    def __init__(self, section, ranks, checkpointer):
        self._section, self._ranks, self._checkpointer = section, ranks, checkpointer
        is_auto = section.save_interleaved_steps == "auto"
        self._interval = _FIRST if is_auto else section.save_interleaved_steps
        self._mtbf = seconds_of(section.mtbf) if is_auto else None
        self._rows, self._next, self._told = deque(maxlen=_MOST), None, 0

    def is_due(self, row):
        """Whether to save after the step of a `Row`: asked after each step, with one answer on all ranks."""
        step, every = row["step"], self._section.keep_every
        if self._mtbf is None:
            return step % self._interval == 0
        self._next = self._next or step + _FIRST - 1
        self._rows.append({"seconds": row["seconds"]})
        return step >= self._next or (every > 0 and step % every == 0)

    def add(self, row, folder):
        """Put the seconds of a save into the `Row`; with `auto`, all ranks agree on the next one.

        Args:
            folder: of the checkpoint, None where it wasn't saved.
        """
        if folder is not None:
            row.update(self._checkpointer.seconds)
            if self._mtbf is not None:
                gathered = self._ranks.gather(costs_of([*self._rows, row])).values()
                self._agree({name: max(own[name] for own in gathered) for name in ("step", "save", "background")})
        self._next = row["step"] + self._interval

    def _agree(self, costs):
        interval = self._interval = best_interval(Job(self._mtbf, **costs))
        if self._ranks.rank == 0 and not self._told / _NEWS <= interval <= self._told * _NEWS:
            self._told, times = interval, [seconds_shown(costs[name]) for name in ("step", "save")]
            print(
                f"checkpoint.save_interleaved_steps: auto: every {interval} steps, since one takes {times[0]}, a save "
                f"{times[1]}, and mtbf is {self._section.mtbf}"
            )
